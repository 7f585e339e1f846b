"""Decisions of the ONNX engine that whole models rarely meet, each asked directly; what is expected is written out."""

from __future__ import annotations

import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models

from quark.config.nbits import NBits
from quark.config.options import Options
from quark.config.overrides import Override
from quark.config.plan import NodePlan, Plan, TensorPlan
from quark.config.rules import Decision, LayerSpec
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError
from quark.ir.surgery import Names, constant_array
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx import Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.graph.model import load
from quark.onnx.npu import fixed_point, positions
from quark.onnx.pipeline import prepare
from quark.onnx.qdq import (
    channel_axes,
    dual_pairs,
    dynamic,
    floats,
    initializers,
    masks,
    nbits,
    nbits_algorithms,
    overrides,
    parameters,
    place,
    recurrent,
    slots,
    slower,
    tables,
)
from quark.onnx.qdq.op_rules import OP_RULES


@pytest.mark.parametrize("format, largest", [("bfloat16", 2.0), ("float16", 65504.0)])
def test_scaled_floats_put_the_larger_side_on_their_range(format: str, largest: float) -> None:
    """The range that AMD's float formats are reduced to; all zero needs no scale, which is then 1."""
    lo, hi = np.array([-3.0, -1.0, 0.5, -2.0, 0.0]), np.array([1.0, 5.0, 4.0, -1.0, 0.0])
    scale, zero_point = parameters.from_range(TensorSpec(format), lo, hi, True)
    np.testing.assert_allclose(scale, np.array([3.0, 5.0, 4.0, 2.0, largest]) / largest, rtol=1e-7)
    assert scale.dtype == np.float32 and zero_point.dtype == np.int64
    np.testing.assert_array_equal(zero_point, np.zeros(5))
    plain = parameters.from_range(TensorSpec("int8"), np.float64(-3), np.float64(1), False)
    assert float(plain[0]) == pytest.approx(3 / 127, rel=1e-6)


def planned(name: str, role: str = "activation", **fields: Any) -> TensorPlan:
    return TensorPlan(name, role, TensorSpec("int8"), "", name, **fields)


@pytest.mark.parametrize("readers", [None, {"n2", "n3"}, {"n1", "n2"}])
def test_nodes_that_an_algorithm_added_read_float(readers: set[str] | None) -> None:
    """Of a tensor that others read too, those keep their codes; one that nobody else reads stays float."""
    text = (
        "g (float[2] x) => (float[2] y, float[2] z, float[2] v) { y = Relu (x) z = Sqrt (x) v = Exp (x) a = Neg (y) }"
    )
    model, plan = load(models.model(text, {}, 17)), Plan()
    for number, node in enumerate(model.graph):
        node.name = f"n{number + 1}"
        if node.op_type in ("Relu", "Neg"):
            node.meta[slots.STAYS_FLOAT] = "added"
    plan.put(planned("x", readers=None if readers is None else frozenset(readers)))
    plan.put(planned("y"))
    placement: Any = SimpleNamespace(model=model, plan=plan)
    place._feed_float(placement)
    assert plan.tensors.keys() == {"x"}
    assert plan.tensors["x"].readers == {"n2", "n3"} - ({"n3"} if readers == {"n1", "n2"} else set())
    assert "only nodes that an algorithm added read it" in plan.explain("y")


@pytest.mark.parametrize("shape, axis, expected", [
    ((4,), -1, 0), ((4,), 0, 0), ((2, 3), -1, 1), ((2, 3), -2, 0), ((2, 3), 1, 1),
    ((4,), 1, "-1..0, not 1"), ((4,), -2, "-1..0, not -2"), ((2, 3), 2, "-2..1, not 2"),
    ((), 0, "this is a single number; leave it out"),
])  # fmt: skip
def test_axes_of_overridden_constants(shape: tuple[int, ...], axis: int, expected: Any) -> None:
    value = ir.Value(name="w", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    value.const_value = ir.tensor(models.normal(*shape))
    ir.Graph([], [], nodes=[], initializers=[value])
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            overrides._overridden(planned("w", "weight"), Override(axis=axis), value)
        return
    found = overrides._overridden(planned("w", "weight", observed=False), Override(axis=axis), value)
    assert found.observed
    assert found.spec.granularity == Channel(expected)


@pytest.mark.parametrize(
    "known, expected", [(None, None), ({"n1", "n2"}, {"n2", "x_convert"}), ({"n1"}, {"x_convert"})]
)
def test_readers_of_a_second_type_leave_the_first(known: set[str] | None, expected: set[str] | None) -> None:
    text = "g (float[2] x) => (float[2] y, float[2] z) { y = Relu (x) z = Sqrt (x) }"
    model, plan = load(models.model(text, {}, 17)), Plan()
    for number, node in enumerate(model.graph):
        node.name = f"n{number + 1}"
    plan.put(planned("x", readers=None if known is None else frozenset(known)))
    overrides._convert(model, plan, model.graph.inputs[0], Override(format="int16"), frozenset(["n1"]))
    assert plan.tensors["x"].readers == expected and plan.tensors["x"].spec.format == "int8"
    assert plan.tensors["x_convert"].spec.format == "int16" and plan.tensors["x_convert"].readers is None
    with pytest.raises(ConfigError, match="'n9' does not read this tensor"):
        overrides._convert(model, plan, model.graph.inputs[0], Override(format="int16"), frozenset(["n9"]))


@pytest.mark.parametrize("lo, hi, position, expected", [
    (-1.0, 3.0, 6, -64), (-1.0, 3.0, 5, -96), (1.0, 3.0, 6, -128), (-9.0, 1.0, 5, 127), (-0.5, 0.5, 7, -64),
])  # fmt: skip
def test_zero_points_follow_moved_positions(lo: float, hi: float, position: int, expected: int) -> None:
    """The lowest code stands for the least value, or 0: zero point = -128 - lo 2^p, within -128..127."""
    spec = TensorSpec("int8", symmetric=False, scale_rule="power_of_two")
    tensor = TensorPlan("x", "activation", spec, "", "x", scale=np.float32(1), zero_point=np.int8(3), range=(lo, hi))
    moved = positions._moved(tensor, np.array(position), "note")
    assert float(moved.scale) == 2.0**-position and int(moved.zero_point) == expected
    assert moved.changes == ("note",) and positions._moved(moved, np.array(position), "note").changes == ("note",)
    plain = TensorPlan("x", "activation", TensorSpec("int8"), "", "x", scale=np.float32(1), zero_point=np.int8(0))
    assert int(positions._moved(plain, np.array(position), "note").zero_point) == 0


# ---- ranges of constants ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given, found, expected", [
    ((-1.0, None), (-5.0, 3.0), (-1.0, 3.0)),
    ((None, 2.0), (-5.0, 3.0), (-5.0, 2.0)),
    ((3.0, None), (-5.0, 3.0), (3.0, 3.0)),
    (None, (4.0, 3.0), (4.0, 3.0)),
    ((-1.0, 1.0), None, (-1.0, 1.0)),
    ((3.5, None), (-5.0, 3.0), "rmin 3.5 lies beyond the largest value 3"),
    ((None, -6.0), (-5.0, 3.0), "rmax -6.0 lies beyond the smallest value -5"),
    ((1.0, None), (np.zeros(2), np.array([2.0, 0.5])), "rmin 1.0 lies beyond the largest value 0.5"),
    ((None, 1.0), (np.array([0.5, 2.0]), np.full(2, 3.0)), "rmax 1.0 lies beyond the smallest value 2"),
])  # fmt: skip
def test_sides_that_are_given_take_the_place_of_those_found(given: Any, found: Any, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            parameters._with_fixed(planned("w", fixed_range=given), lambda: found)
    else:
        assert parameters._with_fixed(planned("w", fixed_range=given), lambda: found) == expected


@pytest.mark.parametrize("scale, zero, low, high", [
    (0.5, 0, -64.0, 63.5), (0.5, 10, -69.0, 58.5), ([0.5, 2.0], [0, -28], [-64.0, -200.0], [63.5, 310.0]),
])  # fmt: skip
def test_the_range_of_a_scale_and_a_zero_point(scale: Any, zero: Any, low: Any, high: Any) -> None:
    found = parameters._as_given(planned("w"), (scale, zero))
    np.testing.assert_array_equal(np.asarray(found.range), [low, high])
    assert found.scale.dtype == np.float32 and found.zero_point.dtype == np.int32


@pytest.mark.parametrize("method", ["minmax", "mse"])
@pytest.mark.parametrize("granularity, shape", [(Tensor(), ()), (Channel(0), (3,)), (Group(1, 4), (3, 2))], ids=str)
def test_a_constant_has_a_range_for_each_scale(granularity: Any, shape: tuple[int, ...], method: str) -> None:
    values = models.normal(3, 8)
    spec = TensorSpec("int8", granularity=granularity, method=method)
    lo, hi = parameters.weight_range(values, spec, "w")
    assert lo.shape == hi.shape == shape
    if method == "minmax":
        parts = values.reshape(*shape, -1)
        np.testing.assert_array_equal([lo, hi], [parts.min(-1), parts.max(-1)])
    block = parameters.weight_range(values, TensorSpec("mxfp8_e4m3", granularity=Group(1, 32)), "w")
    assert [float(side) for side in block] == [values.min(), values.max()]


# ---- which tensors ---------------------------------------------------------------------------------------------------


def named(text: str, weights: dict[str, np.ndarray] | None = None, opset: int = 17) -> ir.Model:
    model = load(onnx.shape_inference.infer_shapes(models.model(text, weights or {}, opset)))
    for number, node in enumerate(model.graph):
        node.name = f"n{number + 1}"
    return model


def test_only_a_pool_looks_past_what_a_pad_adds() -> None:
    """Every window of a MaxPool holds a value of the input, too; anything else passes the large number on."""
    pad = 'p = Pad<mode = "constant"> (x, pads, low)'
    weights = {"pads": np.array([0, 0, 1, 0, 0, 1]), "low": np.array(-1e30, np.float32)}
    for body, carried in (("y = MaxPool<kernel_shape = [3]> (p)", {"p"}), ("y = Abs (p)", {"p", "y"})):
        model = named(f"g (float[1, 2, 4] x) => (float[1, 2, n] y) {{ {pad} {body} }}", weights)
        assert {value.name for value in masks.masked_tensors(model)[1]} == carried


@pytest.mark.parametrize("first, second, expected", [
    (False, True, "'n1' (Relu) stays float: first"), (True, False, "'n2' (Exp) stays float: second"),
    (True, True, "no rule quantizes it for"), (None, False, "'n2' (Exp) stays float: second"), (None, None, "no rule"),
])  # fmt: skip
def test_the_reason_of_a_float_tensor_is_that_of_a_node_that_stays_float(
    first: bool | None, second: bool | None, expected: str
) -> None:
    model, plan = named("g (float[2] x) => (float[2] y) { a = Relu (x) y = Exp (a) }"), Plan()
    for name, quantized, reason in (("n1", first, "first"), ("n2", second, "second")):
        if quantized is not None:
            plan.nodes[name] = NodePlan(name, "?", quantized, reason)
    floats.note_floats(model, plan)
    assert expected in plan.floats["a"]


@pytest.mark.parametrize("spoilt", [np.inf, -np.inf, np.nan, 3e38, -3e38])
def test_a_table_with_one_number_beyond_its_codes_is_not_stored(spoilt: float) -> None:
    """Also in a row that is not among those looked at."""
    values = models.normal(3 * tables._ROWS, 8)
    spec = TensorSpec("int8", granularity=Channel(0))

    def faithful(array: np.ndarray) -> bool:
        value = ir.Value(name="w")
        value.const_value = ir.tensor(array)
        return tables._is_faithful(value, spec)

    assert faithful(values)
    values[1, 3] = spoilt
    assert not faithful(values)


@pytest.mark.parametrize("given, inputs, expected", [
    ("int8", None, "int8"), ("uint8", None, "uint8"), ("int16", None, "int16"), ("int4", None, "int8"),
    ("int8", "int8", "int8"), ("int8", "int16", "int16"), ("uint8", "uint16", "int16"), ("uint16", "int16", "uint16"),
    ("int4", "uint16", "int16"), ("uint8", "fp8_e4m3", "uint8"), ("bfloat16", "int16", "int16"),
])  # fmt: skip
def test_rows_of_tables_have_the_bits_of_the_activations_they_are(
    given: str, inputs: str | None, expected: str
) -> None:
    found = tables._for_rows(TensorSpec(given), None if inputs is None else TensorSpec(inputs))
    assert found.format == expected and found.granularity == Channel(0)


@pytest.mark.parametrize("told, transformer, expected", [
    (None, False, False), (None, True, True), (True, False, True), (False, True, False)
])  # fmt: skip
def test_products_of_activations(told: bool | None, transformer: bool, expected: bool) -> None:
    job: Any = SimpleNamespace(options=SimpleNamespace(MatMulConstBOnly=told, EnableNPUTransformer=transformer))
    assert place._const_b_only(job) is expected


@pytest.mark.parametrize("told, expected", [(None, True), (True, True), (False, False)])
def test_a_node_beside_a_tensor_of_another_type_takes_that(told: bool | None, expected: bool) -> None:
    model, plan = named("g (float[2] x) => (float[2] y) { y = Relu (x) }"), Plan()
    plan.put(planned("x"))
    at = dual_pairs.Boundaries(model, plan, {"x": Override(format="int16", symmetric=told)}, False)
    layer: Any = LayerSpec(TensorSpec("int8"), TensorSpec("int8"), None, None)
    found = dual_pairs._own(model.graph[0], layer, at)
    assert found.inputs == found.outputs == TensorSpec("int16", symmetric=expected)


@pytest.mark.parametrize("why", ["an entry without a layer", "no inputs", "not quantized", None])
def test_only_quantized_nodes_settle_the_types_beside_them(why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = named("g (float[2] x) => (float[2] y) { y = Relu (x) }"), Plan()
    plan.nodes["n1"] = NodePlan("n1", "Relu", why != "not quantized", "because")
    layer = LayerSpec(None if why == "no inputs" else TensorSpec("int8"), None, TensorSpec("int8"), None)
    decision = Decision(None if why == "an entry without a layer" else layer, "because")
    settled = list[str]()
    monkeypatch.setattr(dual_pairs, "_settle_input", lambda node, value, own, at: settled.append(value.name))
    monkeypatch.setattr(dual_pairs, "_settle_output", lambda node, value, own, at: settled.append(value.name))
    job: Any = SimpleNamespace(options=Options(EnableDualQuantNodePairs=True))
    dual_pairs.pair_boundaries(model, plan, job, {"n1": decision})
    assert settled == ([] if why else ["x", "y"])


def test_a_weight_of_few_bits_is_read_by_its_node() -> None:
    plan, weights = Plan(), {"w": models.normal(8, 3)}
    model = named("g (float[2, 8] x) => (float[2, 3] y) { y = MatMul (x, w) }", weights)
    nbits._add(model.graph[0], NBits(), plan)
    assert {tensor.name: tensor.readers for tensor in plan} == {"w": frozenset(["n1"])}


@pytest.mark.parametrize("zero, scale, expected", [
    ([0, 0], [1.0, 2.0], True), ([0, 1], [1.0, 2.0], False), (0, 1.0, True), (1, 1.0, False),
    ([[0], [0]], [[1.0], [2.0]], False),
])  # fmt: skip
def test_weights_of_integer_recurrent_layers(zero: Any, scale: Any, expected: bool) -> None:
    assert recurrent._symmetric(planned("w", scale=np.asarray(scale), zero_point=np.asarray(zero))) is expected


@pytest.mark.parametrize("length", [40, 41])
@pytest.mark.parametrize("rule", ["float32", "power_of_two"])
def test_long_names_are_shortened_where_nothing_looks_for_them(length: int, rule: str) -> None:
    name = "n" * (length - 1) + "z"
    found = initializers.stem(TensorPlan(name, "weight", TensorSpec("int8", scale_rule=rule), "", name))
    if length == 40 or rule == "power_of_two":
        assert found == name
    else:
        assert found == "n" * 23 + f"z_{zlib.crc32(name.encode()):08x}"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_under_given_scales_stay_within_their_bits(bits: int) -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, 13:19] = -1e6, -1.0, 1.0, 1e6, -1e6, 0.0
    zero = np.array([[1, 2]], np.uint8)
    found = nbits_algorithms.on_grid(weight, NBits(Bits=bits, GroupSize=16), np.ones((1, 2), np.float32), zero)
    assert found[0, 0, -4:].tolist() == [1, 0, 0, 2] and found[0, 1, :4].tolist() == [2**bits - 1, 0, 2, 2]


# ---- what the device computes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha, beta, expected", [
    (1 / 6, 0.5, True), (1 / 6 + 2e-6, 0.5, False), (1 / 6 - 2e-6, 0.5, False), (1 / 6, 0.5 + 2e-6, False),
    (1 / 6, 0.5 - 2e-6, False), (1 / 6, -0.5, False), (0.2, 0.5, False), (1 / 6, 0.0, False),
])  # fmt: skip
def test_the_slope_that_the_device_has(alpha: float, beta: float, expected: bool) -> None:
    node = ir.node("HardSigmoid", [ir.Value(name="x")], attributes={"alpha": alpha, "beta": beta})
    assert fixed_point.is_sixth(node) is expected
    told = "the device has alpha 1/6 and beta 1/2 only"
    assert fixed_point.of_sixth(node) == (2731 / 2**14 * 6 if expected else told)


@pytest.mark.parametrize("inputs, expected", [
    ("x, w, v", [2.0, 6.0]), ("x, u, v", [1.0, 6.0]), ("x, w", [2.0, 127.0]), ("x", [-128.0, 127.0]),
    ("x, low, high", [-128.0, 127.0]), ("x, u", [1.0, 127.0]),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bounds_of_a_clip_are_made_whole(inputs: str, expected: list[float], dtype: Any) -> None:
    given = {"w": 2.0, "v": 6.0, "u": 1.25, "low": -1e4, "high": 127.5}
    given = {name: value for name, value in given.items() if name in inputs.split(", ")}
    kind = "float" if dtype is np.float32 else "float16"
    model = named(f"g ({kind}[3] x) => ({kind}[3] y) {{ y = Clip ({inputs}) }}",
                  {name: np.array(value, dtype) for name, value in given.items()})  # fmt: skip
    node = model.graph[0]
    changed = fixed_point.make_whole(node, fixed_point.bounds_of(node), Names(model))
    assert changed == (inputs != "x, w, v")
    bounds = [constant_array(value) for value in node.inputs[1:]]
    assert [float(bound) for bound in bounds] == expected and {bound.dtype for bound in bounds} == {np.dtype(dtype)}
    kept = {name for name, value in given.items() if value in (2.0, 6.0)}
    assert {name for name in model.graph.initializers if len(name) < 5} == kept


@pytest.mark.parametrize("format, stays, expected", [
    ("int8", False, True), ("int8", True, False), ("int4", False, False), ("int4", True, False),
    ("fp8_e4m3", False, False),
])  # fmt: skip
def test_which_recurrent_layers_store_codes(format: str, stays: bool, expected: bool) -> None:
    weights = {"w": models.normal(1, 12, 2), "r": models.normal(1, 12, 3)}
    model = named("g (float[4, 1, 2] x) => (float[4, 1, 1, 3] y) { y = LSTM<hidden_size = 3> (x, w, r) }", weights)
    plan = Plan()
    plan.nodes["n1"] = NodePlan("n1", "LSTM", False, "")
    if stays:
        model.graph[0].meta[slots.STAYS_FLOAT] = "added"
    decisions: Any = {"n1": SimpleNamespace(layer=LayerSpec(TensorSpec("int8"), TensorSpec(format), None, None))}
    job: Any = SimpleNamespace(options=SimpleNamespace(OpTypesToQuantize=[], NodesToQuantize=[]))
    recurrent.store_weights(model, plan, job, decisions)
    assert set(plan.tensors) == ({"w", "r"} if expected else set()) and plan.nodes["n1"].quantized is expected


@pytest.mark.parametrize("shape, group, depthwise", [
    ([4, 1, 3, 3], 4, True), ([4, 1, 3, 3], 2, False), ([4, 2, 3, 3], 4, False), ([1, 1, 3, 3], None, True),
    ([2, 1, 3, 3], None, False), (None, None, False), ([4, 1, 3], 4, True),
])  # fmt: skip
def test_channels_of_a_transposed_convolution(shape: list[int] | None, group: int | None, depthwise: bool) -> None:
    weight = ir.Value(name="w", shape=None if shape is None else ir.Shape(shape))
    attributes = {} if group is None else {"group": group}
    node = ir.node("ConvTranspose", [ir.Value(name="x"), weight], attributes=attributes)
    assert channel_axes.weight_axes(node, OP_RULES["ConvTranspose"]) == ((0, 1) if depthwise else (1, 0))


@pytest.mark.parametrize("shape, steps, batch", [
    ((7, 1, 2), 7, 1), ((1, 5, 2), 1, 5), (("n", 3, 2), 1, 3), ((4, "b", 2), 4, 1), (None, 1, 1), ((4, 3), 1, 1),
])  # fmt: skip
def test_steps_of_a_recurrent_layer(shape: Any, steps: int, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are not known there is one; a weight [2, 12, 2] has 24 sums of 2 products and 3 more each."""
    asked: list[Any] = []
    monkeypatch.setattr(slower, "_time", lambda *given: asked.append(given) or (1.0 if given[1] == "float" else 0.5))
    read = ir.Value(name="x", shape=None if shape is None else ir.Shape(shape))
    node = ir.node("LSTM", [read, ir.Value(name="w", shape=ir.Shape([2, 12, 2]))])
    assert slower.dynamic_is_faster(node)
    kind, gates = "LSTM" if batch == 1 else "LSTM batch", 24 * steps * batch
    assert asked == [(kind, form, gates, gates * 5.0) for form in ("float", "integer")]
    monkeypatch.setattr(slower, "_time", lambda *given: 1.0)
    assert not slower.dynamic_is_faster(node)
    node.inputs[1].shape = None  # type: ignore[union-attr]
    assert not slower.dynamic_is_faster(node)


LISTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing": ({}, None),
    "another node": ({"NodesToQuantize": ["n9"]}, "NodesToQuantize"),
    "this node": ({"NodesToQuantize": ["n1"]}, None),
    "another type": ({"OpTypesToQuantize": ["Conv"]}, "not among the operator types"),
    "this type": ({"OpTypesToQuantize": ["MatMul"]}, None),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("op_type", ["MatMul", "Relu", "custom"])
def test_why_a_node_of_the_dynamic_flow_stays_float(name: str, op_type: str) -> None:
    given, listed = LISTS[name]
    body = "y = MatMul (x, w)" if op_type != "Relu" else "y = Relu (x)"
    model = named(f"g (float[2, 4] x) => (float[2, 3] y) {{ {body} }}", {"w": models.normal(4, 3)})
    node = model.graph[0]
    node.domain = "my.own" if op_type == "custom" else ""
    job: Any = SimpleNamespace(options=Options(**given))
    layer = LayerSpec(TensorSpec("uint8"), TensorSpec("int8"), None, None)
    found = dynamic._why_float(node, layer, job, None)
    if op_type != "MatMul":
        assert found == "ONNX Runtime has no dynamic kernel for it"
    elif listed:
        assert listed in str(found)
    else:
        assert found is None and dynamic._why_float(node, layer, job, "no data") == "no data"


def test_only_outputs_of_the_graph_that_everyone_reads_quantized_change_names() -> None:
    """The float values of a tensor keep its name; where the graph's output is quantized, that has it."""
    config = QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()), extra_options={"PrintSummary": False})
    text = "g (float[1, 4] x) => (float[1, 4] y) { a = MatMul (x, w) b = Sigmoid (a) y = MatMul (b, w) }"
    proto = models.model(text, {"w": models.normal(4, 4)}, 17)
    made = ModelQuantizer(config).quantize_model(proto, None, [models.feeds(proto)])
    assert made is not None
    outputs = {node.name: node.output[0] for node in made.graph.node}
    produced = [node.output[0] for node in made.graph.node if node.op_type in ("MatMul", "Sigmoid")]
    assert {"a", "b"} <= set(produced) and "y" in outputs.values() and [one.name for one in made.graph.output] == ["y"]


@pytest.mark.parametrize("target, wanted, bits, alone, expected", [
    ("cpu", None, 8, False, True), ("npu", None, 8, False, False), ("npu", True, 8, False, True),
    ("cpu", False, 8, False, False), ("cpu", None, 16, False, False), ("cpu", None, 8, True, False),
    ("cpu", True, 16, False, False), ("cpu", True, 8, True, False),
])  # fmt: skip
def test_where_kernels_of_eight_bits_are_asked_for(
    target: str, wanted: bool | None, bits: int, alone: bool, expected: bool
) -> None:
    default = SimpleNamespace(inputs=TensorSpec(f"int{bits}"), weight=TensorSpec("int8"))
    job: Any = SimpleNamespace(target=target, options=SimpleNamespace(WeightsOnly=alone))
    job.rules = SimpleNamespace(default=default)
    assert place._suits_cpu(job, wanted) is expected


def test_the_window_of_a_pool_over_everything() -> None:
    known, unknown = ir.Value(name="x", shape=ir.Shape([1, 2, 5, 5])), ir.Value(name="x")
    free, flat = ir.Value(name="x", shape=ir.Shape([1, 2, 5, "n"])), ir.Value(name="x", shape=ir.Shape([1, 2]))
    sides = [fixed_point.kernel(ir.node("GlobalAveragePool", [one])) for one in (known, unknown, free, flat)]
    assert sides == [[5, 5], None, None, None]
    assert fixed_point.kernel(ir.node("AveragePool", [known], attributes={"kernel_shape": [3, 2]})) == [3, 2]
    assert fixed_point.of_pool(ir.node("GlobalAveragePool", [known])) == 25 * 10 / 2**8
    for one, told in ((unknown, "of unknown size"), (flat, "of unknown size")):
        assert fixed_point.of_pool(ir.node("GlobalAveragePool", [one])) == f"its kernel {told} is not square"


@pytest.mark.parametrize("shape, group, expected", [
    ((32, 1, 3, 3), 32, ("Conv depthwise", 100.0)), ((8, 2, 3, 3), 4, ("Conv grouped", 100.0)),
    ((2, 1, 3, 3), 2, ("Conv depthwise 1", 100.0)), ((8, 1, 3, 3), 8, ("Conv depthwise 8", 200.0)),
    ((16, 2, 3, 3), 1, ("Conv image", 100.0)), ((16, 5, 1, 1), 1, ("Conv 1x1 odd", 100.0)),
])  # fmt: skip
def test_rows_of_convolutions(shape: tuple[int, ...], group: int, expected: tuple[str, float]) -> None:
    assert slower.convolution(shape, group, 100.0) == expected


def plan_of(text: str, weights: dict[str, np.ndarray], **options: Any) -> Plan:
    layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    job = QConfig(layer, extra_options={"PrintSummary": False, **options}).compile()
    prepared = prepare(load(models.model(text, weights, 17)), job)
    return place.place(prepared.model, prepared.job)


def test_layers_that_share_a_bias_have_one_each() -> None:
    """Its scale is the product of those of a layer's input and weight."""
    text = """g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] z) {
        y = Conv (x, w, b) r = Relu (y) z = Conv (r, v, b) }"""
    weights = {"w": models.normal(4, 4, 1, 1), "v": models.normal(4, 4, 1, 1, seed=1), "b": models.normal(4)}
    plan = plan_of(text, weights)
    biases = [tensor for tensor in plan if tensor.role == "bias"]
    assert len({tensor.name for tensor in biases}) == 2
    assert {tensor.bias_of[1] for tensor in biases if tensor.bias_of} == {"w", "v"}


@pytest.mark.parametrize("given, cpu, expected", [
    (None, True, True), (None, False, False), (True, False, True), (True, True, True), (False, True, False),
])  # fmt: skip
def test_what_decodes_boxes_may_stay_float(
    given: bool | None, cpu: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "decoding_nodes", lambda model: set(model.graph))
    monkeypatch.setattr(place, "_suits_cpu", lambda job, wanted: cpu and wanted is None)
    text = "g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] y) { y = Conv (x, w) }"
    plan = plan_of(text, {"w": models.normal(4, 4, 1, 1)}, FloatDecoding=given, FloatWhereFaster=False)
    assert [node.quantized for node in plan.nodes.values()] == [not expected]


@pytest.mark.parametrize("turned", [None, 0, 1])
def test_a_dynamic_gemm_with_its_weight_either_way(turned: int | None) -> None:
    weight = models.normal(6, 6)
    attributes = "" if turned is None else f"<transB = {turned}>"
    proto = models.model(
        f"g (float[3, 6] x) => (float[3, 6] y) {{ y = Gemm{attributes} (x, w, b) }}",
        {"w": weight, "b": models.normal(6)}, 17,
    )  # fmt: skip
    made = ModelQuantizer(QConfig.get_default_config("UINT8_DYNAMIC_QUANT")).quantize_model(proto, None, None)
    assert made is not None and "MatMulInteger" in {node.op_type for node in made.graph.node}
    feed = models.feeds(proto)
    expected, found = models.run(proto, feed)[0], models.run(made, feed)[0]
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
