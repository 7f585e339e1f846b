"""Plans of dynamic quantization, groups that part, where an LSTM is faster in integers: on small graphs."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import onnx
import pytest
from tests.onnx_flow import models

from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import LayerSpec, TensorSpec
from quark.numerics.granularity import Channel
from quark.onnx.graph.model import load
from quark.onnx.qdq import align, dynamic, slower
from quark.operators.storage import PACKED_ATTRIBUTES


def test_all_nodes_that_read_a_tensor_are_named() -> None:
    text = "g (float[2, 4] x) => (float[2, 4] y, float[2, 4] z) { y = MatMul (x, w) z = MatMul (x, w) }"
    model, plan = load(models.model(text, {"w": models.normal(4, 4)}, 17)), Plan()
    layer = LayerSpec(inputs=TensorSpec("uint8"), weight=TensorSpec("int8"))
    for number, node in enumerate(model.graph):
        node.name = f"n{number}"
        dynamic._add(node, layer, "asked", plan, model)
    assert {name: tensor.readers for name, tensor in plan.tensors.items()} == {
        "x": frozenset(["n0", "n1"]),
        "w": frozenset(["n0", "n1"]),
    }
    assert [plan.tensors[name].role for name in "xw"] == ["activation", "weight"]
    other = replace(layer, weight=TensorSpec("uint8"))
    model.graph[1].name = "n2"
    dynamic._add(model.graph[1], other, "asked", plan, model)  # another type: a weight of its own
    mine = model.graph[1].inputs[1]
    assert mine is not None and mine.name != "w" and plan.tensors[str(mine.name)].readers == frozenset(["n2"])


def test_both_sides_of_a_product_are_activations_that_nobody_observes() -> None:
    text = "g (float[2, 4] x, float[4, 4] w) => (float[2, 4] y) { y = MatMul (x, w) }"
    model, plan = load(models.model(text, {}, 17)), Plan()
    layer = LayerSpec(inputs=TensorSpec("uint8"), weight=TensorSpec("int8"))
    dynamic._add(model.graph[0], layer, "asked", plan, model)
    assert {name: (tensor.role, tensor.observed) for name, tensor in plan.tensors.items()} == dict.fromkeys(
        "xw", ("activation", False)
    )


def test_members_with_other_types_form_groups_of_their_own() -> None:
    plan = Plan()
    types = {"a": "int8", "b": "int16", "c": "int8", "d": "int16"}
    for name, kind in types.items():
        spec = TensorSpec(kind, granularity=Channel(0) if name == "c" else TensorSpec(kind).granularity)
        plan.put(TensorPlan(name, "activation", spec, "", "a", observed=name == "a"))
    plan.put(TensorPlan("alone", "activation", TensorSpec("int8"), "", "alone"))
    for name in ("e", "f"):
        plan.put(TensorPlan(name, "activation", TensorSpec("int8"), "", "e", observed=False))
    align._split_groups(plan)
    assert {name: (one.group, one.observed) for name, one in plan.tensors.items()} == {
        "a": ("a", True),
        "b": ("b", True),
        "c": ("a", False),
        "d": ("b", False),
        "alone": ("alone", True),
        "e": ("e", False),
        "f": ("e", False),
    }


ROWS = {
    tuple(line.split("\t")[:2]): [float(part) for part in line.split("\t")[2:]]
    for line in files("quark.onnx.qdq").joinpath("kernel_times.tsv").read_text("utf-8").splitlines()
    if line.startswith("LSTM")
}


@pytest.mark.parametrize("steps", [1, 2, 30, None])
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("hidden", [4, 16, 64, 256])
def test_an_lstm_is_in_integers_where_the_table_says(steps: int | None, batch: int, hidden: int) -> None:
    """Products: every gate of every step reads the input and the hidden state, a quarter of the gates long."""
    read = 24
    shape = f"{steps or 'S'}, {batch}, {read}"
    made = f"{steps or 'S'}, 1, {batch}, {hidden}"
    text = f"g (float[{shape}] x) => (float[{made}] y) {{ y = LSTM<hidden_size = {hidden}> (x, w, r) }}"
    weights = {"w": models.normal(1, 4 * hidden, read), "r": models.normal(1, 4 * hidden, hidden)}
    node = load(onnx.shape_inference.infer_shapes(models.model(text, weights, 17))).graph[0]
    kind, entries = "LSTM" if batch == 1 else "LSTM batch", (steps or 1) * batch * 4 * hidden
    times = {}
    for form in ("float", "integer"):
        call, element, product = ROWS[kind, form]
        times[form] = call + element * entries / 1e3 + product * entries * (read + hidden) / 1e6
    assert slower.dynamic_is_faster(node) is (times["integer"] < times["float"])


def test_an_lstm_of_unknown_sizes_counts_as_one_step() -> None:
    text = "g (float[4, 1, 8] x) => (float[4, 1, 1, 512] y) { y = LSTM<hidden_size = 512> (x, w, r) }"
    weights = {"w": models.normal(1, 2048, 8), "r": models.normal(1, 2048, 512)}
    node = load(models.model(text, weights, 17)).graph[0]
    read, weight = node.inputs[0], node.inputs[1]
    assert read is not None and weight is not None and slower.dynamic_is_faster(node)
    read.shape = None
    assert slower.dynamic_is_faster(node)
    weight.shape = None
    assert not slower.dynamic_is_faster(node)


def test_one_scale_has_the_axis_that_the_operators_have_by_default() -> None:
    from quark.onnx import Int3Spec, ModelQuantizer, QConfig, QLayerConfig

    text = "g (float[2, 4] x) => (float[2, 3] y) { y = MatMul (x, w) }"
    proto = models.model(text, {"w": models.normal(4, 3)}, 17)
    spec = Int3Spec()
    config = QConfig(QLayerConfig(input_tensors=spec, weight=spec), extra_options={"PrintSummary": False})
    made = ModelQuantizer(config).quantize_model(proto, None, [models.feeds(proto)])
    found = ((node.op_type, one) for node in made.graph.node for one in node.attribute)
    axes = {kind: one.i for kind, one in found if one.name == "axis"}
    assert axes == dict.fromkeys(("QuantizeDequantize", "PackedDequantize"), PACKED_ATTRIBUTES["axis"])
