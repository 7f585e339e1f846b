"""Weights that a loop hands to itself are weights: read from outside, quantized, and the answers are the same."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.onnx_flow import models

from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.graph.model import load, to_proto
from quark.onnx.graph.run import Runner
from quark.onnx.passes import constants
from quark.onnx.passes.registry import apply, passes

FLOAT, WIDE = onnx.TensorProto.FLOAT, 64


def value(name: str, *shape: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, FLOAT, list(shape))


def network(kind: str, w_after: str = "w", outputs: Iterable[str] = ("h_end", "scanned")) -> onnx.ModelProto:
    """h = tanh(h W + U x) in each iteration; W and its bias go around as state.

    ``w_after``: what the body hands on as W: "w", "same" (an Identity of it) or "double" (W + W).
    """
    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["hw"]),
        helper.make_node("Add", ["hw", "b"], ["hwb"]),
        helper.make_node("Tanh", ["hwb"], ["next"]),
        helper.make_node("Identity", ["next"], ["seen"]),
        helper.make_node("Identity", ["w"], ["same"]),
        helper.make_node("Add", ["w", "w"], ["double"]),
    ]
    weights = {"W": 0.1 * models.normal(WIDE, WIDE), "B": models.normal(WIDE)}
    state = [value("w", WIDE, WIDE), value("h", 2, WIDE), value("b", WIDE)]
    after = [value(w_after, WIDE, WIDE), value("next", 2, WIDE), value("b", WIDE)]
    if kind == "Loop":
        count = [helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [])]
        flag = [helper.make_tensor_value_info(name, onnx.TensorProto.BOOL, []) for name in ("on", "still")]
        nodes.append(helper.make_node("Identity", ["on"], ["still"]))
        body = helper.make_graph(nodes, "body", [*count, flag[0], *state], [flag[1], *after, value("seen", 2, WIDE)])
        loop = helper.make_node("Loop", ["n", "", "W", "x", "B"], ["w_end", "h_end", "b_end", "scanned"], body=body)
        inputs = [value("x", 2, WIDE), helper.make_tensor_value_info("n", onnx.TensorProto.INT64, [])]
    else:
        nodes[2] = helper.make_node("Add", ["hwb", "s"], ["next"])
        body = helper.make_graph(nodes, "body", [*state, value("s", 2, WIDE)], [*after, value("seen", 2, WIDE)])
        names = ["w_end", "h_end", "b_end", "scanned"]
        loop = helper.make_node("Scan", ["W", "x", "B", "many"], names, body=body, num_scan_inputs=1)
        inputs = [value("x", 2, WIDE), value("many", 3, 2, WIDE)]
    every = {"h_end": (2, WIDE), "scanned": (None, 2, WIDE), "w_end": (WIDE, WIDE), "b_end": (WIDE,)}
    out = [helper.make_tensor_value_info(name, FLOAT, every[name]) for name in outputs]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    loop.name = "loop"
    graph = helper.make_graph([loop], "g", inputs, out, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feed(kind: str, seed: int = 0, count: int = 3) -> dict[str, np.ndarray]:
    more = {"n": np.array(count)} if kind == "Loop" else {"many": models.normal(3, 2, WIDE, seed=seed)}
    return {"x": models.normal(2, WIDE, seed=seed), **more}


def expected(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """By hand: ONNX Runtime's Scan gives wrong states where the body hands one on as it came."""
    w, b = (onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer)
    h, seen = feeds["x"], []
    for added in feeds["many"] if "many" in feeds else [None] * int(feeds["n"]):
        h = np.tanh(h @ w + b) if added is None else h @ w + b + added
        seen.append(h)
    return [h, np.array(seen, np.float32).reshape(-1, 2, WIDE)]


def state_of(proto: onnx.ModelProto) -> list[str]:
    return [name for name in proto.graph.node[0].input if name]


def passed(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = load(proto)
    constants.run(model)
    return to_proto(model)


@pytest.mark.parametrize("w_after", ["w", "same"])
@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_constants_leave_the_state(kind: str, w_after: str) -> None:
    before = network(kind, w_after)
    after = passed(before)
    onnx.checker.check_model(after, full_check=True)
    assert not {"W", "B"} & set(state_of(after)) and "x" in state_of(after)
    for count in (0, 3) if kind == "Loop" else (3,):
        models.assert_close(models.run(after, feed(kind, 1, count)), expected(before, feed(kind, 1, count)))


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_a_constant_that_the_body_changes_stays_state(kind: str) -> None:
    after = passed(network(kind, "double"))
    assert "W" in state_of(after) and "B" not in state_of(after)


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_a_state_whose_end_is_an_output_of_the_model_stays(kind: str) -> None:
    after = passed(network(kind, outputs=("h_end", "w_end", "b_end")))
    assert {"W", "B"} <= set(state_of(after))


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_two_states_that_change_places_stay(kind: str) -> None:
    before = network(kind)
    body = before.graph.node[0].attribute[0].g
    second = next(output for output in body.output if output.name == "w")
    second.name = "b"  # the body hands its bias out twice: as W, whose shape no longer matters, and as B
    second.type.tensor_type.shape.dim.pop()
    assert {"W", "B"} <= set(state_of(passed(before)))


@pytest.mark.parametrize("more", ["an input", "no outputs"])
@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_a_loop_that_its_body_does_not_fit_stays_as_it_is(kind: str, more: str) -> None:
    """A Scan of opset 8 has the lengths of sequences in front of its state: each state was taken for the next."""
    before = network(kind, outputs=("h_end",))
    loop = before.graph.node[0]
    if more == "an input":
        loop.input.insert(0, "")
    else:
        del loop.output[2:]
    assert passed(before).graph.node[0].input == loop.input


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_they_are_quantized(kind: str) -> None:
    before = network(kind)
    samples = [feed(kind, seed) for seed in range(4)]
    result = ModelQuantizer(QConfig.get_default_config("A8W8")).quantize_model(before, None, samples)
    assert result is not None and before.ByteSize() > 1.8 * result.ByteSize()  # float and codes together were larger
    signal, found = expected(before, feed(kind, 9))[0], models.run(result, feed(kind, 9))[0]
    assert 10 * np.log10(np.sum(signal**2) / np.sum((signal - found) ** 2)) > 20


@pytest.mark.parametrize("behind", [[], ["Relu"], ["Relu", "Neg"]], ids=len)
@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_weights_of_a_loop_that_is_not_run_are_not_handed_over(kind: str, behind: list[str]) -> None:
    """ONNX Runtime refuses contents of an initializer that nothing reads: "Failed to find existing initializer"."""
    proto = network(kind, outputs=["h_end"])
    made = "h_end"
    for number, op_type in enumerate(behind):
        proto.graph.node.append(helper.make_node(op_type, [made], [f"behind_{number}"]))
        made = f"behind_{number}"
    proto.graph.output[0].name = made
    proto.graph.node.insert(0, helper.make_node("Relu", ["x"], ["first"]))
    proto.graph.output.append(value("first", 2, WIDE))
    model = load(proto)
    constants.run(model)
    found = Runner(model, ["first"]).run(feed(kind)).values["first"]
    np.testing.assert_array_equal(found, np.maximum(feed(kind)["x"], 0))


def placed(proto: onnx.ModelProto) -> tuple[set[str], set[str], onnx.ModelProto]:
    """Initializers of the graph and of the body after what a body reads alone has become its own."""
    model = load(passed(proto))
    fired = apply(model, passes()["body_constants"], {}).fired
    after = to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    outside, inside = ({t.name for t in g.initializer} for g in (after.graph, after.graph.node[0].attribute[0].g))
    assert len(inside) == fired and apply(model, passes()["body_constants"], {}).fired == 0
    return outside, inside, after


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_constants_that_a_body_reads_alone_become_its_own(kind: str) -> None:
    """Read from outside, they took the plan of its memory: Keras' recurrent networks ran at 0.80 to 0.85 of float."""
    outside, inside, after = placed(network(kind))
    assert (outside, inside) == (set(), {"W", "B"})
    models.assert_close(models.run(after, feed(kind)), expected(network(kind), feed(kind)))


@pytest.mark.parametrize("reader", ["a node", "an output", "another body"])
def test_constants_that_others_read_stay_outside(reader: str) -> None:
    proto = network("Loop", outputs=("h_end",))
    if reader == "a node":
        proto.graph.node.append(helper.make_node("Neg", ["B"], ["more"]))
        proto.graph.output.append(value("more", WIDE))
    elif reader == "an output":
        proto.graph.output.append(value("B", WIDE))
    else:
        again = onnx.NodeProto()
        again.CopyFrom(proto.graph.node[0])
        again.name, again.output[:] = "again", ["", "more", "", "all"]
        again.input[2] = again.input[4] = ""
        body = again.attribute[0].g
        body.node[0].input[1], body.node[1].input[1] = "W", "B"
        del again.input[4], again.input[2], again.output[2], again.output[0]
        del body.input[4], body.input[2], body.output[3], body.output[1], body.node[5], body.node[4]
        proto.graph.node.append(again)
        proto.graph.output.append(value("more", 2, WIDE))
    before = models.run(passed(proto), feed("Loop"))
    outside, inside, after = placed(proto)
    assert "B" in outside and "B" not in inside and ("W" in inside) == (reader != "another body")
    models.assert_close(models.run(after, feed("Loop")), before)
