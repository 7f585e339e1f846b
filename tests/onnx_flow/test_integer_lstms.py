"""The CPU target's LSTMs: in integers where ONNX Runtime is faster so and the numbers hold, else from stored codes."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.onnx_flow import models

from quark.errors import DataError
from quark.onnx import ModelQuantizer, QConfig

FLOAT, HIDDEN, READ, STEPS = TensorProto.FLOAT, 96, 96, 6
FORMS = {
    "plain": {},
    "reverse": {"direction": "reverse"},
    "both": {"direction": "bidirectional"},
    "activations": {
        "activations": ["HardSigmoid", "Tanh", "Relu"],
        "activation_alpha": [0.2],
        "activation_beta": [0.5],
    },
    "clip": {"clip": 0.3},
    "one gate for two": {"input_forget": 1},
}


def free(name: str, rank: int = 4) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, [None] * rank)


def lstm(
    batch: int = 1, spread: float = 1.0, hidden: int = HIDDEN, extras: bool = False, **attributes: object
) -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    """An LSTM with states (and lengths and peepholes where asked for), and what it reads."""
    random, directions = np.random.default_rng(3), 2 if attributes.get("direction") == "bidirectional" else 1
    wide = {"W": (4 * hidden, READ), "R": (4 * hidden, hidden), "B": (8 * hidden,), "P": (3 * hidden,)}
    arrays = {name: random.normal(0, 0.1, (directions, *size)).astype(np.float32) for name, size in wide.items()}
    if not extras:
        del arrays["P"]
    state = (directions, batch, hidden)
    ends = {"x": (STEPS, batch, READ), "h": state, "c": state}
    inputs = ["x", "W", "R", "B", "lengths" if extras else "", "h", "c", *(["P"] if extras else [])]
    node = helper.make_node("LSTM", inputs, ["y", "yh", "yc"], "cell", hidden_size=hidden, **attributes)
    stored = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    if extras:
        stored.append(numpy_helper.from_array(np.full(batch, STEPS - 1, np.int32), "lengths"))
    infos = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in ends.items()]
    outputs = [free(name, 3 + (name == "y")) for name in ("y", "yh", "yc")]
    graph = helper.make_graph([node], "g", infos, outputs, stored)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    sizes = np.geomspace(1, spread, READ)
    feeds = [{name: random.normal(size=shape).astype(np.float32) for name, shape in ends.items()} for _ in range(3)]
    return proto, [{**feed, "x": (feed["x"] * sizes).astype(np.float32)} for feed in feeds]


def quantized(proto: onnx.ModelProto, feeds: list, preset: str = "A8W8_CPU", **options: object):
    config = QConfig.get_default_config(preset)
    config.global_quant_config.extra_options.update(PrintSummary=False, **options)
    quantizer = ModelQuantizer(config)
    made = quantizer.quantize_model(proto, None, feeds)
    return made, [node.op_type for node in made.graph.node], quantizer.result.plan


@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_lstm_computes_in_integers_nearly_what_it_does_in_float(
    form: str, batch: int, extras: bool
) -> None:
    proto, feeds = lstm(batch, extras=extras, **FORMS[form])
    made, kinds, plan = quantized(proto, feeds)
    assert kinds == ["DynamicQuantizeLSTM"] and "DynamicQuantizeLSTM" in plan.nodes["cell"].reason
    for wanted, found in zip(models.run(proto, feeds[1]), models.run(made, feeds[1]), strict=True):
        assert 10 * np.log10((wanted**2).sum() / ((wanted - found) ** 2).sum()) > 28
    assert made.ByteSize() < 0.35 * proto.ByteSize()


def test_entries_of_very_different_sizes_keep_their_arithmetic_in_float() -> None:
    """One scale for all entries of a step would round most of them to nothing: found on the samples."""
    proto, feeds = lstm(spread=1e-5)
    weight = next(one for one in proto.graph.initializer if one.name == "W")
    weight.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(weight) / np.geomspace(1, 1e-5, READ, dtype="f"), "W")
    )
    _, kinds, plan = quantized(proto, feeds)
    assert "LSTM" in kinds and "Cast" in kinds and "dB in integers" in plan.nodes["cell"].reason


@pytest.mark.parametrize(
    ("hidden", "options", "preset"), [(8, {}, "A8W8_CPU"), (96, {"DynamicLSTM": False}, "A8W8_CPU"), (96, {}, "A8W8")]
)
def test_small_ones_other_targets_and_who_says_no_keep_the_float_kernel(
    hidden: int, options: dict, preset: str
) -> None:
    proto, feeds = lstm(hidden=hidden)
    assert "LSTM" in quantized(proto, feeds, preset, **options)[1]


def test_samples_that_can_be_read_once_are_enough_and_the_same_model_gives_the_same_bytes() -> None:
    proto, feeds = lstm()
    made = [quantized(proto, iter(feeds))[0].SerializeToString(deterministic=True) for _ in range(2)]
    assert made[0] == made[1] and b"DynamicQuantizeLSTM" in made[0]


def test_weights_that_two_layers_read_stay_codes_of_both() -> None:
    proto, feeds = lstm()
    second = onnx.NodeProto()
    second.CopyFrom(proto.graph.node[0])
    second.name, second.output[:] = "again", ["z", "zh", "zc"]
    proto.graph.node.append(second)
    proto.graph.output.append(free("z"))
    made, kinds, _ = quantized(proto, feeds)
    assert kinds.count("LSTM") == 2
    for wanted, found in zip(models.run(proto, feeds[0]), models.run(made, feeds[0]), strict=True):
        np.testing.assert_allclose(found, wanted, atol=0.02)


def test_an_lstm_in_a_body_is_tried_on_what_enters_it() -> None:
    proto, feeds = lstm()
    body = helper.make_graph(list(proto.graph.node), "then", [], [free("y")], proto.graph.initializer)
    other = helper.make_graph(
        [helper.make_node("Mul", ["x", "x"], ["sq"]), helper.make_node("Unsqueeze", ["sq", "one"], ["o"])],
        "else",
        [],
        [free("o")],
        [numpy_helper.from_array(np.array([1]), "one")],
    )
    nodes = [
        helper.make_node("ReduceMax", ["h"], ["most"], keepdims=0),
        helper.make_node("Greater", ["most", "least"], ["yes"]),
        helper.make_node("If", ["yes"], ["out"], then_branch=body, else_branch=other),
    ]
    stored = [numpy_helper.from_array(np.float32(-1e9), "least")]
    ends = [free("out")]
    graph = helper.make_graph(nodes, "g", list(proto.graph.input), ends, stored)
    outer = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made, _, _ = quantized(outer, feeds)
    kinds = {n.op_type for a in itertools.chain(*(n.attribute for n in made.graph.node)) for n in a.g.node}
    assert "DynamicQuantizeLSTM" in kinds
    wanted, found = models.run(outer, feeds[0])[0], models.run(made, feeds[0])[0]
    assert 10 * np.log10((wanted**2).sum() / ((wanted - found) ** 2).sum()) > 28


def test_a_sample_that_the_cell_does_not_take_is_told() -> None:
    """What leads to it runs, so that calibration saw no fault: it was a traceback."""
    proto, feeds = lstm()
    proto.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", FLOAT, [STEPS, 1, None]))
    with pytest.raises(DataError, match=r"does not run on this sample \('x' float32 \[6, 1, 95\]"):
        quantized(proto, [{**feed, "x": feed["x"][..., 1:]} for feed in feeds])


def test_two_branches_that_read_one_weight_have_its_codes_once() -> None:
    """The samples enter one branch, whose LSTM computes in integers; the other's is in float, from the same codes."""
    proto, feeds = lstm()
    nodes = {}
    for branch in ("then", "else"):
        node = onnx.NodeProto()
        node.CopyFrom(proto.graph.node[0])
        node.name, node.output[:] = branch, [f"{branch}_{end}" for end in ("y", "yh", "yc")]
        nodes[f"{branch}_branch"] = helper.make_graph([node], branch, [], [free(node.output[0])])
    chosen = [
        helper.make_node("ReduceMax", ["h"], ["most"], keepdims=0),
        helper.make_node("Greater", ["most", "least"], ["yes"]),
        helper.make_node("If", ["yes"], ["out"], name="choice", **nodes),
    ]
    stored = [*proto.graph.initializer, numpy_helper.from_array(np.float32(0), "least")]
    graph = helper.make_graph(chosen, "g", list(proto.graph.input), [free("out")], stored)
    outer = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made, _, _ = quantized(outer, feeds)
    branches = {one.name: [node.op_type for node in one.g.node] for one in made.graph.node[-1].attribute}
    assert "DynamicQuantizeLSTM" in branches["then_branch"] and "LSTM" in branches["else_branch"]
    assert made.ByteSize() < 0.35 * proto.ByteSize()
    for feed in (feeds[0], {**feeds[0], "h": -np.abs(feeds[0]["h"])}):
        wanted, found = models.run(outer, feed)[0], models.run(made, feed)[0]
        assert 10 * np.log10((wanted**2).sum() / ((wanted - found) ** 2).sum()) > 28
