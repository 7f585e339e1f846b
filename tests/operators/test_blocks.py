"""The block operators against ``quark.numerics``: every attribute, shapes of every kind, special values."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto
from tests.operators.amd_operators import ROUNDING_MODES, bfp_quantize_dequantize, mx_quantize_dequantize
from tests.operators.running import assert_same, awkward, model_of, run, run_operator, special

from quark.errors import ConfigError, ModelError
from quark.numerics.blocks import BLOCKS
from quark.operators import NodeFacts, block_operators, node
from quark.operators.blockquant import formats
from quark.operators.mx import ELEMENT_TYPES

PRIME = {"bfp_method": "to_bfp_prime", "block_size": 16}
BFP_CASES = [
    *({"rounding_mode": mode} for mode in (0, 1, 2)),
    *({"rounding_mode": mode, "use_compiler_version_cpu_kernel": 1} for mode in (0, 1, 2)),
    *({**PRIME, "bit_width": bits, "rounding_mode": mode} for bits in (11, 13, 16) for mode in (0, 1, 2)),
    {**PRIME, "bit_width": 14, "sub_block_size": 4, "sub_block_shift_bits": 2, "rounding_mode": 2},
    {"bit_width": 12, "block_size": 5, "rounding_mode": 2},
    {"bit_width": 20, "block_size": 16},
]
SHAPES = [((3, 32), 1), ((2, 24, 5, 3), 1), ((3, 37), -1), ((50,), 0), ((4, 7, 3), 0), ((2, 5, 48), -1), ((40, 3), -2)]


@pytest.mark.parametrize("attributes", BFP_CASES, ids=str)
def test_bfp(attributes: dict) -> None:
    for x, axis in [(special(), 1), *((awkward(shape), axis) for shape, axis in SHAPES)]:
        got = run_operator("BFPQuantizeDequantize", x, {**attributes, "axis": axis})
        assert_same(got, bfp_quantize_dequantize(x, **attributes, axis=axis))


@pytest.mark.parametrize("element", ELEMENT_TYPES)
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_mx(element: str, mode: int) -> None:
    for x, axis in [(special(), 1), *((awkward(shape), axis) for shape, axis in SHAPES)]:
        attributes = {"element_dtype": element, "rounding_mode": mode, "axis": axis}
        assert_same(run_operator("MXQuantizeDequantize", x, attributes), mx_quantize_dequantize(x, **attributes))


@pytest.mark.parametrize("name", formats())
def test_own_block_operator(name: str) -> None:
    block = BLOCKS[name]
    for x, axis in [(special(), 1), *((awkward(shape), axis) for shape, axis in SHAPES)]:
        above = np.float32(np.abs(x[np.isfinite(x)]).max() / 2688) if block.tensor_scale else None
        got = run_operator("BlockQuantizeDequantize", x, {"format": name, "axis": axis}, {"tensor_scale": above})
        assert_same(got, block.round(x, axis, tensor_scale=above))


@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("shape", [(0, 16, 16), (2, 0, 16), (2, 16, 0), (0, 37, 5), (3, 0, 7), (3, 7, 0)])
def test_free_axes_may_be_of_length_zero(shape: tuple[int, ...], axis: int) -> None:
    x = np.zeros(shape, np.float32)
    known = tuple(None if length == 0 else length for length in shape)
    for name, attributes in [
        ("BFPQuantizeDequantize", {}),
        ("BFPQuantizeDequantize", PRIME),
        ("MXQuantizeDequantize", {"element_dtype": "fp8_e4m3"}),
        ("BlockQuantizeDequantize", {"format": formats()[0]}),
    ]:
        attributes = {**attributes, "axis": axis}
        model = model_of(name, attributes, {"x": x}, facts=NodeFacts(known), dynamic=True)
        assert run(model, {"x": x}).shape == shape


def test_bfloat16_first() -> None:
    x = awkward((4, 32))
    attributes = {"convert_to_bfloat_before_bfp": 1, "bit_width": 20}
    assert_same(run_operator("BFPQuantizeDequantize", x, attributes), bfp_quantize_dequantize(x, **attributes))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types(dtype: type) -> None:
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(dtype)
    output = TensorProto.FLOAT16 if dtype is np.float16 else TensorProto.DOUBLE
    for op_name, simulate in (
        ("BFPQuantizeDequantize", bfp_quantize_dequantize),
        ("MXQuantizeDequantize", mx_quantize_dequantize),
    ):
        assert_same(run_operator(op_name, x, {}, output=output), simulate(x.astype(np.float32)).astype(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1), (0, 8), (3, 0)])
def test_one_element_or_none_passes(shape: tuple[int, ...]) -> None:
    x = np.full(shape, 1.2345, np.float32)
    for op_name in ("BFPQuantizeDequantize", "MXQuantizeDequantize"):
        assert_same(run_operator(op_name, x, {"axis": 0}), x)


def test_dynamic_batch_of_a_whole_axis() -> None:
    x = awkward((5, 16, 3, 3))
    facts = NodeFacts((None, 16, None, None))
    made = node("BFPQuantizeDequantize", ["x"], ["y"], {}, facts)
    assert made.overload.endswith("@whole-3.FLOAT")
    assert_same(run_operator("BFPQuantizeDequantize", x, {}, dynamic=True), bfp_quantize_dequantize(x))


@pytest.mark.parametrize("opset", [13, 15, 17, 19, 21])
@pytest.mark.parametrize("shape", [(), (1,), (40,), (3, 40), (2, 40, 5), (2, 9, 3, 3)])
def test_a_tensor_of_unknown_rank(shape: tuple[int, ...], opset: int) -> None:
    """What stands behind an ``If`` has no shape before it runs; a vector has one axis, whatever the attribute says."""
    x, axis = awkward(shape), 1 if len(shape) > 1 else -1
    mx = run_operator("MXQuantizeDequantize", x, {"rounding_mode": 2}, dynamic="rank", opset=opset)
    assert_same(mx, BLOCKS["mxint8"].round(x, axis))
    bfp = run_operator("BFPQuantizeDequantize", x, {"rounding_mode": 2}, dynamic="rank", opset=opset)
    assert_same(bfp, BLOCKS["bfp16"].round(x, axis))
    two = {"bfp_method": "to_bfp_prime", "bit_width": 13, "block_size": 16, "rounding_mode": 2}
    levels = run_operator("BFPQuantizeDequantize", x, two, dynamic="rank", opset=opset)
    assert_same(levels, BLOCKS["mx6"].round(x, axis))
    own = run_operator("BlockQuantizeDequantize", x, {"format": "amdfp4", "axis": 1}, dynamic="rank", opset=opset)
    assert_same(own, BLOCKS["amdfp4"].round(x, axis))


def test_a_nan_does_not_hide_the_largest_element() -> None:
    """ONNX Runtime's ReduceMax drops what came before a NaN."""
    x = np.ones((1, 8), np.float32) / 3
    x[0, 0], x[0, 4] = 100, np.nan
    got = run_operator("BFPQuantizeDequantize", x, {})
    assert got[0, 0] == 100 and np.isnan(got[0, 4]) and got[0, 1] == 0


def test_every_attribute_is_written() -> None:
    made = node("BFPQuantizeDequantize", ["x"], ["y"], {"axis": -1}, NodeFacts((4, 8)))
    written = {a.name: a.s.decode() or a.i for a in made.attribute}
    assert written == {
        "bfp_method": "to_bfp",
        "axis": -1,
        "bit_width": 16,
        "block_size": 8,
        "rounding_mode": 0,
        "sub_block_size": 2,
        "sub_block_shift_bits": 1,
        "convert_to_bfloat_before_bfp": 0,
        "use_compiler_version_cpu_kernel": 0,
    }


@pytest.mark.parametrize(
    ("op_name", "attributes", "message"),
    [
        ("BFPQuantiseDequantize", {}, "Did you mean 'BFPQuantizeDequantize'"),
        ("BFPQuantizeDequantize", {"blocksize": 8}, "Did you mean 'block_size'"),
        ("BFPQuantizeDequantize", {"bit_width": 9}, "allowed are 10 to 24"),
        ("BFPQuantizeDequantize", {"bfp_method": "to_bpf"}, "Did you mean 'to_bfp'"),
        ("BFPQuantizeDequantize", {**PRIME, "sub_block_size": 3}, "sub_block_size 3 does not divide block_size 16"),
        ("MXQuantizeDequantize", {"element_dtype": "fp4_e2m2"}, "Did you mean 'fp4_e2m1'"),
        ("MXQuantizeDequantize", {"rounding_mode": 3}, "allowed are 0 to 2"),
    ],
)
def test_wrong_settings_are_named(op_name: str, attributes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        node(op_name, ["x"], ["y"], attributes)


def test_an_axis_that_does_not_exist() -> None:
    with pytest.raises(ModelError, match=r"axis 2 does not exist in a tensor of shape \(3, 4\)"):
        node("MXQuantizeDequantize", ["x"], ["y"], {"axis": 2}, NodeFacts((3, 4)))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("name", ["amdfp4", "mxfp4_even", "bfp16"])
def test_one_element_is_a_block_of_our_operator(shape: tuple[int, ...], name: str) -> None:
    x = np.full(shape, 1.2345, np.float32)
    got = run_operator("BlockQuantizeDequantize", x, {"format": name, "axis": 0})
    assert_same(got, BLOCKS[name].round(x, 0 if shape else -1))


def test_roundings_have_the_numbers_that_the_operators_know_them_by() -> None:
    assert {number: rounding for rounding, number in block_operators.ROUNDING_MODES.items()} == ROUNDING_MODES
