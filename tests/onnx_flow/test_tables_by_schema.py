"""The tables of operators against ONNX's own schemas: which input is data, weight, bias, shape or index; since when.

The tables give positions; here the inputs are named as ONNX's documents name them.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.config.options import Options
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import LayerSpec, TensorSpec
from quark.errors import ConfigError
from quark.numerics.formats import FORMATS, Block
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
from quark.onnx.graph.model import load
from quark.onnx.pipeline import prepare
from quark.onnx.qdq import dual_pairs, float_biases
from quark.onnx.qdq.dynamic import ACTIVATION, DYNAMIC_RULES
from quark.onnx.qdq.index_paths import PLACE_INPUTS, SHAPE_INPUTS_FROM
from quark.onnx.qdq.node_kinds import STORED_FROM, activation_kind, constant_kind, opsets_of
from quark.onnx.qdq.op_rules import DIVISORS, GENERIC, OP_RULES
from quark.onnx.qdq.place import place

OPSET = 21
WEIGHTS = {"Conv": "W", "ConvTranspose": "W", "Gemm": "B", "MatMul": "B"}
BIASES = {"Conv": "B", "ConvTranspose": "B", "Gemm": "C", "InstanceNormalization": "B"}
PARAMETERS = {
    "PRelu": ("slope",),
    "InstanceNormalization": ("scale",),
    "LayerNormalization": ("Scale", "B"),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), ("W", "R", "B")),
}
ALL = ("Add", "Mul", "Sub", "Min", "Max", "Concat")
SHAPES = {
    "ConstantOfShape": "input", "Expand": "shape", "Gather": "indices", "GatherElements": "indices",
    "GatherND": "indices", "OneHot": "indices", "Pad": "pads", "Range": "start", "Reshape": "shape", "Resize": "roi",
    "Slice": "starts", "Split": "split", "Squeeze": "axes", "Tile": "repeats", "TopK": "K", "Unsqueeze": "axes",
}  # fmt: skip
PLACES = {"GridSample": ["grid"], "RoiAlign": ["rois", "batch_indices"], "ScatterElements": ["indices"]}
PLACES |= {"ScatterND": ["indices"]}
DYNAMIC = {
    "MatMul": (["A", "B"], ["B"]),
    "Gemm": (["A"], ["B"]),
    "Conv": (["X"], ["W"]),
    "Gather": ([], ["data"]),
    "LSTM": ([], ["W", "R"]),
}


def names_of(op_type: str, opset: int = OPSET) -> list[str]:
    return [one.name for one in onnx.defs.get_schema(op_type, opset).inputs]


@pytest.mark.parametrize("op_type", OP_RULES)
def test_slots_of_operators(op_type: str) -> None:
    rule, names = OP_RULES[op_type], names_of(op_type)
    assert (None if rule.weight is None else names[rule.weight]) == WEIGHTS.get(op_type)
    assert (None if rule.bias is None else names[rule.bias]) == BIASES.get(op_type)
    assert tuple(names[position] for position in rule.parameters) == PARAMETERS.get(op_type, ())
    if op_type in ALL:
        assert rule.data is None
    elif op_type == "Where":
        assert rule.data is not None and [names[position] for position in rule.data] == ["X", "Y"]
    else:
        assert rule.data == (0,)
    assert rule.fixed_range == ((0.0, 1.0) if op_type == "Softmax" else None)
    assert (rule.output == "none") == (op_type == "ArgMax")


def test_channels_of_weights() -> None:
    """[out, in, ..] of Conv, [in, out, ..] of ConvTranspose, [in, out] of products."""
    found = {name: (rule.channel_axis, rule.reduce_axis) for name, rule in OP_RULES.items() if rule.weight is not None}
    assert found == {"Conv": (0, 1), "ConvTranspose": (1, 0), "Gemm": (1, 0), "MatMul": (-1, -2)}
    assert GENERIC.data is None and GENERIC.op_set == "extra"


def test_divisors() -> None:
    assert {name: names_of(name)[position] for name, position in DIVISORS.items()} == {
        "Div": "B",
        "Reciprocal": "X",
        "Log": "input",
    }


def test_inputs_that_hold_shapes_and_indices() -> None:
    found = {name: names_of(name)[first] for name, first in SHAPE_INPUTS_FROM.items() if name != "Upsample"}
    assert found == SHAPES and names_of("Upsample", 9)[SHAPE_INPUTS_FROM["Upsample"]] == "scales"
    places = {
        name: [names_of(name)[k] for k in positions] for name, positions in PLACE_INPUTS.items() if name in PLACES
    }
    assert places == PLACES and all(positions == (1,) for name, positions in PLACE_INPUTS.items() if name not in PLACES)


@pytest.mark.parametrize("op_type", DYNAMIC_RULES)
def test_slots_of_dynamic_kernels(op_type: str) -> None:
    rule, names = DYNAMIC_RULES[op_type], names_of(op_type)
    assert ([names[k] for k in rule.data], [names[k] for k in rule.weights]) == DYNAMIC[op_type]


def test_what_a_dynamic_activation_is() -> None:
    """DynamicQuantizeLinear makes uint8 with whatever zero point the values ask for."""
    assert (ACTIVATION.format, ACTIVATION.symmetric, ACTIVATION.dynamic) == ("uint8", False, True)
    assert set(onnx.defs.get_schema("DynamicQuantizeLinear").outputs[0].types) == {"tensor(uint8)"}


@pytest.mark.parametrize(("one", "other", "apart"), [
    ("uint8", "int8", False), ("uint16", "int16", False), ("uint4", "int4", False),
    ("uint8", "int16", True), ("int8", "int16", True), ("uint16", "uint8", True), ("int8", "int8", False),
])  # fmt: skip
def test_a_sign_makes_no_second_precision(one: str, other: str, apart: bool) -> None:
    signless: Any = SimpleNamespace(unsigned=True)
    assert dual_pairs.Boundaries.differ(signless, one, other) is apart
    assert dual_pairs.Boundaries.differ(SimpleNamespace(unsigned=False), one, other) is (one != other)  # type: ignore[arg-type]


@pytest.mark.parametrize(("product", "fits"), [(2.0**-14, True), (2.0**-14 * 0.999, False)])
def test_products_of_scales_are_numbers_of_float16(product: float, fits: bool) -> None:
    data = TensorPlan("x", "activation", TensorSpec("int8", scale_rule="float16"), "", "x", scale=np.float32(product))
    weight = TensorPlan("w", "weight", TensorSpec("int8"), "", "w", scale=np.ones(2, np.float32))
    with nullcontext() if fits else pytest.raises(ConfigError, match="float16 cannot hold"):
        plan = Plan()
        for tensor in (data, weight):
            plan.put(tensor)
        float_biases.check_half(plan, TensorPlan("b", "bias", TensorSpec("int32"), "", "b", bias_of=("x", "w")))


@pytest.mark.parametrize("name", STORED_FROM)
def test_since_when_constants_of_a_type_can_be_read(name: str) -> None:
    def reads(opset: int) -> bool:
        allowed = onnx.defs.get_schema("DequantizeLinear", opset).type_constraints
        return any(f"tensor({name.lower()})" in one.allowed_type_strs for one in allowed)

    since = next(opset for opset in range(13, onnx.defs.onnx_opset_version() + 1) if reads(opset))
    assert STORED_FROM[name] == since


@pytest.mark.parametrize(
    ("layer", "options", "expected"),
    [
        ({"inputs": "int8", "weight": "int8"}, {}, 13),
        ({"inputs": "int16", "weight": "int8"}, {}, 21),
        ({"inputs": "int8", "weight": "int4"}, {}, 21),
        ({"inputs": "bfloat16", "weight": "bfloat16"}, {}, 13),
        ({"inputs": "int32", "weight": "int8"}, {}, 13),
        ({"inputs": "mxfp4", "weight": "mxfp4"}, {}, 13),
        ({"inputs": "int8", "weight": "fp8_e4m3"}, {}, 19),
        ({"inputs": "int16", "weight": "int8"}, {"WeightsOnly": True}, 13),
        ({"inputs": "int8", "weight": "int8"}, {"UseFP32Scale": False}, 19),
        ({"inputs": "int8", "weight": "int8", "group": True}, {}, 13),
        ({"inputs": "int8", "weight": "int4", "group": True}, {}, 21),
    ],
)
def test_the_opset_that_a_layer_needs(layer: dict[str, Any], options: dict[str, Any], expected: int) -> None:
    granularity = Group(1, 32) if layer.pop("group", False) else Tensor()
    weight = TensorSpec(layer["weight"], granularity=granularity)
    made = LayerSpec(inputs=TensorSpec(layer["inputs"]), weight=weight, outputs=None, bias=None)
    assert max(opsets_of(made, Options(**options))) == expected


# ---- placement and writing -------------------------------------------------------------------------------------------

MINMAX = CalibMethod.MinMax
NORM = """g (float[1, 4, 5, 5] x) => (float[1, 4, 5, 5] z) {
    a = InstanceNormalization (x, s, b) r = Relu (a) z = Conv (r, w) }"""


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("producer", ["norm", "conv"])
def test_what_a_relu_is_one_kernel_with(asked: bool, producer: str) -> None:
    weights = {"s": models.normal(4), "b": models.normal(4, seed=1), "w": models.normal(4, 4, 1, 1)}
    graph = NORM if producer == "norm" else NORM.replace("InstanceNormalization (x, s, b)", "Conv (x, w)")
    if producer == "conv":
        weights = {"w": weights["w"]}
    layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=MINMAX), weight=Int8Spec(calibration_method=MINMAX))
    options = {"PrintSummary": False, "RemoveQDQInstanceNorm": asked}
    prepared = prepare(load(models.model(graph, weights, 17)), QConfig(layer, extra_options=options).compile())
    assert ("a" in place(prepared.model, prepared.job).tensors) == (producer == "norm" and not asked)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["Gather", "Gemm", "Gemm, rows", "MatMul"])
@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_a_matrix_run_along_what_is_summed(kind: str, symmetric: bool, bits: int) -> None:
    graphs = {
        "Gather": "g (int64[3] x) => (float[3, 64] y) { y = Gather (w, x) }",
        "Gemm": "g (float[3, 32] x) => (float[3, 64] y) { y = Gemm (x, w) }",
        "Gemm, rows": "g (float[3, 64] x) => (float[3, 32] y) { y = Gemm <transB = 1> (x, w) }",
        "MatMul": "g (float[3, 32] x) => (float[3, 64] y) { y = MatMul (x, w) }",
    }
    proto = models.model(graphs[kind], {"w": models.normal(32, 64)}, 17)
    parameters = {"GroupSize": 32, "Bits": bits, "Symmetric": symmetric, "Algorithm": "DEFAULT"}
    options = {"PrintSummary": False, "UseMatMulNBits": True, "MatMulNBitsParams": parameters}
    layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=MINMAX), weight=Int8Spec(calibration_method=MINMAX))
    result = ModelQuantizer(QConfig(layer, extra_options=options)).run(proto, None, [models.feeds(proto)])
    chosen = [node for node in result.plan.nodes.values() if node.quantized]
    if not chosen:
        assert kind == "Gather"
        return
    tensor = result.plan.tensors["w"]
    rows = kind in ("Gather", "Gemm, rows")
    assert tensor.spec.granularity == Group(1 if rows else 0, 32)
    assert np.shape(tensor.scale) == ((32, 2) if rows else (64, 1))
    assert (np.asarray(tensor.zero_point) == 2 ** (bits - 1)).all() == symmetric
    feed = models.feeds(proto)
    wanted = models.run(proto, feed)[0]
    got = models.run(result.proto, feed)[0]  # type: ignore[arg-type]
    assert np.abs(got - wanted).max() < (0.2 if bits == 4 else 0.02) * max(1.0, np.abs(wanted).max())


def test_a_range_that_is_known_stays_with_a_tensor_that_is_read_again() -> None:
    """A Softmax writes 0..1, whoever reads it and in whatever order."""
    text = """g (float[2, 8] x) => (float[2, 4] y, float[2, 4] z) {
        s = Softmax (x) y = MatMul (s, w) z = MatMul (s, v) }"""
    weights = {"w": models.normal(8, 4), "v": models.normal(8, 4, seed=1)}
    layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=MINMAX), weight=Int8Spec(calibration_method=MINMAX))
    prepared = prepare(
        load(models.model(text, weights, 17)), QConfig(layer, extra_options={"PrintSummary": False}).compile()
    )
    assert place(prepared.model, prepared.job).tensors["s"].fixed_range == (0.0, 1.0)


def test_channels_are_those_of_the_operator() -> None:
    text = "g (float[1, 4, 5, 5] x) => (float[1, 6, 5, 5] y) { y = ConvTranspose (x, w) }"
    from quark.onnx import QuantGranularity

    weight = Int8Spec(calibration_method=MINMAX, quant_granularity=QuantGranularity.Channel)
    layer = QLayerConfig(input_tensors=UInt8Spec(calibration_method=MINMAX), weight=weight)
    prepared = prepare(
        load(models.model(text, {"w": models.normal(4, 6, 1, 1)}, 17)),
        QConfig(layer, extra_options={"PrintSummary": False}).compile(),
    )
    assert place(prepared.model, prepared.job).tensors["w"].spec.granularity == Channel(1)


# ---- kinds of nodes --------------------------------------------------------------------------------------------------

PLAIN = {"int8", "uint8", "int16", "uint16"}
WIDE = {"int32", "uint32", "float16", "bfloat16"}
FOLDED = {"fp8_e4m3", "fp8_e5m2", "int2", "uint2"}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("as_cast", ["BF16QDQToCast", "EnableVaimlBF16", None])
@pytest.mark.parametrize("grouped", [True, False])
def test_what_carries_a_format(name: str, as_cast: str | None, grouped: bool) -> None:
    options = Options(**({} if as_cast is None else {as_cast: True}))
    spec = TensorSpec(name, granularity=Group(1, 32) if grouped else Tensor())
    cast = as_cast is not None and name in ("float16", "bfloat16")
    if isinstance(FORMATS[name], Block):
        assert activation_kind(spec, options) == constant_kind(spec, options) == "block"
        return
    activation = "cast" if cast else "standard" if name in PLAIN else "extended" if name in WIDE else "element"
    assert activation_kind(spec, options) == activation
    folded = name in FOLDED or (grouped and name in ("int8", "uint8"))
    stored = name in PLAIN | {"int32", "int4", "uint4"}
    expected = "cast" if folded or cast else "standard" if stored else "extended" if name in WIDE else "element"
    assert constant_kind(spec, options) == expected


@pytest.mark.parametrize(
    ("slot", "format", "granularity", "told"),
    [
        ("inputs", "int8", Channel(0), "one scale per tensor"),
        ("outputs", "int8", Group(1, 4), "one scale per tensor"),
        ("inputs", "mxfp4", Group(1, 32), None),
        ("inputs", "int8", Tensor(), None),
        ("weight", "int8", Channel(0), None),
        ("weight", "int4", Group(1, 4), None),
        ("weight", "fp8_e4m3", Group(1, 4), None),
        ("weight", "bfloat16", Group(1, 4), "bfloat16 has no scales"),
        ("weight", "float16", Channel(0), "float16 has no scales"),
        ("weight", "e5m3", Tensor(), "e5m3 has no sign"),
        ("weight", "int3", Group(1, 4), "ONNX has no groups"),
        ("weight", "int3", Channel(0), None),
    ],
)
def test_granularities_that_onnx_has(slot: str, format: str, granularity: Any, told: str | None) -> None:
    if format not in FORMATS:
        return
    slots = {"inputs": None, "weight": None, "outputs": None, "bias": None}
    layer = LayerSpec(**{**slots, slot: TensorSpec(format, granularity=granularity)})
    if told is None:
        assert list(opsets_of(layer, Options()))
        return
    with pytest.raises(ConfigError, match=told):
        list(opsets_of(layer, Options()))


@pytest.mark.parametrize(("option", "slot"), [("ActivationScaled", "inputs"), ("WeightScaled", "weight")])
@pytest.mark.parametrize("format", ["bfloat16", "float16", "int8"])
def test_only_floats_of_16_bits_are_scaled_on_request(option: str, slot: str, format: str) -> None:
    slots = {"inputs": None, "weight": None, "outputs": None, "bias": None}
    layer = LayerSpec(**{**slots, slot: TensorSpec(format)})
    if format == "int8":
        with pytest.raises(ConfigError, match=rf"{option} scales bfloat16, float16 only; the data type of {slot}"):
            list(opsets_of(layer, Options(**{option: True})))
    else:
        assert list(opsets_of(layer, Options(**{option: True})))
    other = {"ActivationScaled": "WeightScaled", "WeightScaled": "ActivationScaled"}[option]
    assert list(opsets_of(layer, Options(**{other: True})))
