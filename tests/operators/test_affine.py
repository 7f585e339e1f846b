"""The affine operators: every stored type, the limits of the wide ones, axes, float16 models."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.operators.running import assert_same, awkward, described, initializer, run, run_operator

from quark.errors import ConfigError, ModelError
from quark.numerics.affine import Coding
from quark.numerics.elements import ELEMENTS
from quark.numerics.granularity import Channel
from quark.numerics.granularity import Tensor as WholeTensor
from quark.operators import NodeFacts, add_functions, function_for, node
from quark.operators.elementwise import formats

INTEGERS = {"INT8": 8, "UINT8": 8, "INT16": 16, "UINT16": 16, "INT32": 32, "UINT32": 32}


def typed(value: float, name: str, shape: tuple[int, ...] = ()) -> TensorProto:
    """A zero point of the ONNX type ``name``."""
    count = int(np.prod(shape, dtype=int))
    return helper.make_tensor("zero_point", TensorProto.DataType.Value(name), shape, [value] * count)


def limits(name: str) -> tuple[int, int]:
    bits = INTEGERS[name]
    return (0, 2**bits - 1) if name.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def exact_codes(x: np.ndarray, scale: float, zero_point: int, name: str) -> np.ndarray:
    """clip(round_half_even(float32(x / scale)) + zero_point) in unbounded integers."""
    low, high = limits(name)
    quotients = (x / np.float32(scale)).astype(np.float32)
    return np.array([min(max(round(Fraction(float(q))) + zero_point, low), high) for q in quotients.ravel()]).reshape(
        x.shape
    )


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_codes_up_to_the_limits(name: str) -> None:
    low, high = limits(name)
    scale = 2.0**-4
    edge = np.array([low, high, low / 2, high / 2, low - 1, high + 1, 2**24 + 1, 2.0**23 + 1, 0.5, 1.5, -2.5]) * scale
    near = np.nextafter(edge.astype(np.float32), np.float32(0))
    x = np.concatenate([edge.astype(np.float32), near, awkward((40,)), np.float32([np.inf, -np.inf, 3e38])])
    for zero_point in {0, low // 4, high // 3, high}:
        constants = {"scale": np.float32(scale), "zero_point": typed(zero_point, name)}
        codes = run_operator("ExtendedQuantizeLinear", x, {}, constants, output=TensorProto.DataType.Value(name))
        want = exact_codes(x[:-3], scale, zero_point, name)
        np.testing.assert_array_equal(codes[:-3].astype(np.int64), want)
        np.testing.assert_array_equal(codes[-3:].astype(np.int64), [high, low, high])
        back = run_operator("ExtendedDequantizeLinear", codes, {}, constants)
        exact = [float(np.float32(float(int(q) - zero_point))) * np.float32(scale) for q in codes]
        assert_same(back, np.array(exact, np.float32))


@pytest.mark.parametrize(
    ("name", "dtype", "largest"),
    [
        ("FLOAT16", np.float16, 65504),
        ("BFLOAT16", ml_dtypes.bfloat16, np.inf),
        ("FLOAT8E4M3FN", ml_dtypes.float8_e4m3fn, 448),
        ("FLOAT8E5M2", ml_dtypes.float8_e5m2, 57344),
    ],
)
def test_float_types(name: str, dtype: type, largest: float) -> None:
    x = np.concatenate([awkward((64,)), np.float32([3.4e38, -3.4e38, np.nan])])
    constants = {"scale": np.float32(0.25), "zero_point": typed(0, name)}
    with np.errstate(over="ignore"):
        want = np.clip(x / np.float32(0.25), -largest, largest).astype(dtype)
    back = through_both(x, {}, constants)
    assert_same(back, want.astype(np.float32) * np.float32(0.25))


def through_both(x: np.ndarray, attributes: dict, constants: dict, opset: int = 21) -> np.ndarray:
    """ExtendedQuantizeLinear and ExtendedDequantizeLinear in one model."""
    tensors = [initializer(key, value) for key, value in constants.items()]
    rank = np.ndim(constants["scale"])
    facts = NodeFacts(x.shape, per_axis=bool(rank), code_type=TensorProto.DataType.Name(tensors[1].data_type))
    nodes = [
        node("ExtendedQuantizeLinear", ["x", "scale", "zero_point"], ["q"], attributes, facts),
        node("ExtendedDequantizeLinear", ["q", "scale", "zero_point"], ["y"], attributes, facts),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)
    graph = helper.make_graph(nodes, "pair", [described("x", x, False)], [output], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    add_functions(model)
    return run(model, {"x": x})


@pytest.mark.parametrize("name", ["INT8", "UINT16", "INT32", "UINT32"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("opset", [13, 21])
def test_pair_along_an_axis(name: str, axis: int, opset: int) -> None:
    x = awkward((3, 4, 5))
    scale = np.linspace(0.01, 2, x.shape[axis]).astype(np.float32)
    point = 0 if name.startswith("I") else 7
    element = ELEMENTS[name.lower()]
    got = through_both(x, {"axis": axis}, {"scale": scale, "zero_point": typed(point, name, scale.shape)}, opset)
    assert_same(got, Coding(element, Channel(axis)).fake_quantize(x, scale, np.full(scale.shape, point)))


@pytest.mark.parametrize("name", ["INT4", "UINT4"])
def test_four_bits(name: str) -> None:
    x = awkward((3, 8))
    got = through_both(x, {}, {"scale": np.float32(0.3), "zero_point": typed(2, name)})
    assert_same(got, Coding(ELEMENTS[name.lower()]).fake_quantize(x, np.float32(0.3), np.int32(2)))


@pytest.mark.parametrize("name", formats())
def test_one_node_for_every_element_format(name: str) -> None:
    element = ELEMENTS[name]
    point = element.middle if name.startswith("u") else 0
    for x, scale, granularity in [
        (awkward((6, 50)), np.float32(0.07), WholeTensor()),
        (awkward((4, 3, 8)), np.float32([0.5, 3, 0.01]), Channel(1)),
        (np.float32([3.4e38, -3.4e38, 1e-45, -0.0, np.nan]), np.float32(1), WholeTensor()),
    ]:
        points = np.full(scale.shape, point, np.int64 if name == "uint32" else np.int32)
        constants = {"scale": scale, "zero_point": points}
        got = run_operator("QuantizeDequantize", x, {"format": name, "axis": 1}, constants)
        assert_same(got, Coding(element, granularity).fake_quantize(x, scale, points))


def test_float16_model() -> None:
    x = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float16)
    constants = {"scale": np.float16(0.125), "zero_point": np.int32(3)}
    got = run_operator("QuantizeDequantize", x, {"format": "int8"}, constants, output=TensorProto.FLOAT16)
    want = Coding(ELEMENTS["int8"]).fake_quantize(x.astype(np.float32), np.float32(0.125), np.int32(3))
    assert_same(got, want.astype(np.float16))


def test_scale_of_one_element_is_one_scale() -> None:
    x = awkward((2, 3))
    constants = {"scale": np.float32([0.5]), "zero_point": np.int32([0])}
    got = run_operator("QuantizeDequantize", x, {"format": "int8"}, constants)
    assert_same(got, Coding(ELEMENTS["int8"]).fake_quantize(x, np.float32(0.5), np.int32(0)))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="unknown zero point type 'FLOAT4E2M1'"):
        node("ExtendedQuantizeLinear", ["x", "s", "z"], ["y"], {}, NodeFacts(code_type="FLOAT4E2M1"))
    with pytest.raises(ModelError, match="FLOAT8E4M3FN needs opset 19, and the model has opset 17"):
        function_for("ExtendedQuantizeLinear", {}, 17, "FLOAT8E4M3FN.tensor.FLOAT")
    with pytest.raises(ModelError, match="needs opset 13 or higher, and the model has opset 12"):
        function_for("ExtendedQuantizeLinear", {}, 12, "INT8.tensor.FLOAT")
