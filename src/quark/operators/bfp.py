"""``BFPQuantizeDequantize`` (com.amd.quark, version 1): block floating point, with one or two levels of scale.

``to_bfp`` (BFP16): E the exponent of the largest magnitude of a block, m = bit_width - 9,

    step = 2**(E - (m - 1));  y = clip(round(x / step), -(2**m - 1), 2**m - 1) * step

Infinities and NaN do not count for E and are copied. With ``use_compiler_version_cpu_kernel`` codes reach -2**m, and a
block whose largest value rounds up to 2**m has its step doubled. ``convert_to_bfloat_before_bfp`` rounds x to bfloat16.

``to_bfp_prime`` (MX4, MX6, MX9; "With Shared Microexponents", Rouhani et al., ISCA 2023): sub-blocks lower the exponent
by D = min(E - their own exponent, 2**sub_block_shift_bits - 1); step = 2**(E - D + 1 - m). Subnormal inputs count as 0;
an infinity or a NaN makes its whole block NaN.

A sign of zero may differ from the peer's kernel, which for ties and underflow keeps it in some modes and not in others.
"""

from __future__ import annotations

from collections.abc import Mapping

from quark.errors import ConfigError
from quark.operators.arithmetic import floor_power, round_integer
from quark.operators.blockwise import all_finite, copy_nonfinite, is_finite, shared_power, spread
from quark.operators.body import Body
from quark.operators.views import NodeFacts, View, from_blocks, from_float, to_blocks, to_float, view_of

TWO_LEVELS = ("to_bfp_prime", "to_bfp_prime_shared")
METHODS = ("to_bfp", *TWO_LEVELS)
ATTRIBUTES: dict[str, int | str] = {
    "bfp_method": "to_bfp",
    "axis": 1,
    "bit_width": 16,
    "block_size": 8,
    "rounding_mode": 0,
    "sub_block_size": 2,
    "sub_block_shift_bits": 1,
    "convert_to_bfloat_before_bfp": 0,
    "use_compiler_version_cpu_kernel": 0,
}
_SIGN_AND_EXPONENT = 9  # bits of a bit_width that are not mantissa
_SMALLEST_NORMAL = 2.0**-126
_NO_SUBNORMAL_MATTERS = 2.0**-90  # above it, what is subnormal rounds to zero by itself


def variant(attributes: Mapping, facts: NodeFacts) -> str:
    """The overload of a node at ``facts``.

    Raises:
        ConfigError: attributes that contradict each other.
    """
    size, sub = attributes["block_size"], attributes["sub_block_size"]
    if attributes["bfp_method"] in TWO_LEVELS and size % sub:
        raise ConfigError(f"sub_block_size {sub} does not divide block_size {size}")
    return view_of(facts, attributes["axis"], size).label


def write(body: Body, attributes: Mapping, label: str) -> str:
    """The body of ``BFPQuantizeDequantize`` on the input ``x``."""
    view = View.parse(label)
    x = to_float(body, "x", view.elem_type)
    if attributes["convert_to_bfloat_before_bfp"]:
        x = body.cast(body.cast(x, "BFLOAT16"), "FLOAT")
    if view.kind != "one":
        x = (_two_levels if attributes["bfp_method"] in TWO_LEVELS else _one_level)(body, x, attributes, view)
    return from_float(body, x, view.elem_type)


def _one_level(body: Body, x: str, attributes: Mapping, view: View) -> str:
    size, mode = attributes["block_size"], attributes["rounding_mode"]
    mantissa = attributes["bit_width"] - _SIGN_AND_EXPONENT
    carries = attributes["use_compiler_version_cpu_kernel"]
    highest = 2.0**mantissa - 1

    def quantize(inner: Body, blocks: str, peaks: str) -> str:
        step = shared_power(inner, peaks, unit=1 - mantissa)
        if carries:
            step = _doubled_on_carry(inner, blocks, step, mode, highest)
        return _scaled(inner, blocks, spread(inner, step, view, size), mode, -highest - bool(carries), highest)

    return from_blocks(body, copy_nonfinite(body, to_blocks(body, x, view, size), view, quantize), x, view, size)


def _doubled_on_carry(body: Body, blocks: str, step: str, mode: int, highest: float) -> str:
    """``step``, doubled where the largest value of the block rounds to more than ``highest`` steps."""
    top = body.op("Div", body.reduce("ReduceMax", blocks, 1), step)
    carries = body.op("Greater", round_integer(body, top, mode), highest)
    return body.op("Where", carries, body.op("Add", step, step), step)


def _scaled(body: Body, blocks: str, step: str, mode: int, low: float, high: float) -> str:
    """clip(round(blocks / step), low, high) * step."""
    codes = body.op("Clip", body.op("Div", blocks, step), low, high)
    return body.op("Mul", round_integer(body, codes, mode), step)


def _two_levels(body: Body, x: str, attributes: Mapping, view: View) -> str:
    size, sub, mode = attributes["block_size"], attributes["sub_block_size"], attributes["rounding_mode"]
    mantissa = attributes["bit_width"] - _SIGN_AND_EXPONENT
    highest = 2.0**mantissa - 1
    blocks = to_blocks(body, x, view, size // sub, sub)
    sub_peaks = _sub_peaks(body, body.op("Abs", blocks), view, size // sub, sub)
    peaks = body.reduce("ReduceMax", sub_peaks, 1)

    def quantize(inner: Body, values: str, sub_peaks: str, peaks: str) -> str:
        step = _own_steps(inner, sub_peaks, peaks, 1 - mantissa, attributes["sub_block_shift_bits"])
        return _scaled(inner, values, spread(inner, step, view, sub), mode, -highest, highest)

    def special(inner: Body) -> str:
        magnitude = inner.op("Abs", blocks)
        counted = inner.op("Where", is_finite(inner, magnitude), magnitude, float("inf"))
        tops = _sub_peaks(inner, counted, view, size // sub, sub)
        subnormal = inner.op("Less", magnitude, _SMALLEST_NORMAL)
        values = inner.op("Where", subnormal, 0.0, blocks)
        return quantize(inner, values, tops, inner.reduce("ReduceMax", tops, 1))

    def ordinary(inner: Body) -> str:
        return quantize(inner, blocks, sub_peaks, peaks)

    rows = body.op("Reshape", blocks, body.ints(-1, size))  # for the sum only, where any rows do
    plain = None if view.finite else _finite_and_normal(body, rows, peaks)
    result = special(body) if plain is None else body.branch(plain, ordinary, special)
    return from_blocks(body, result, x, view, size)


def _own_steps(body: Body, sub_peaks: str, peaks: str, unit: int, shift_bits: int) -> str:
    """max(2**exponent of the sub-block, 2**(exponent of the block - largest shift)) * 2**unit."""
    if shift_bits > 1:
        lowest = shared_power(body, peaks, unit=unit + 1 - 2**shift_bits)
        return body.op("Max", floor_power(body, sub_peaks, unit), lowest)
    shared = shared_power(body, peaks)  # one bit: is the sub-block's largest magnitude at or above it?
    reached = body.op("Floor", body.op("Div", sub_peaks, shared))
    return body.op("Mul", body.op("Add", reached, 1.0), body.op("Mul", shared, 2.0 ** (unit - 1)))


def _sub_peaks(body: Body, magnitude: str, view: View, runs: int, sub: int) -> str:
    """Maxima over the sub-blocks, [M, runs, 1, inner..]; pooling is thirty times a reduction of two neighbours."""
    if view.axis != -1:
        return body.reduce("ReduceMax", magnitude, 2)
    rows = body.op("Reshape", magnitude, body.ints(-1, 1, runs * sub))  # axis 0: pooling bears no other of length 0
    pooled = body.op("MaxPool", rows, attributes={"kernel_shape": [sub], "strides": [sub]})
    return body.op("Reshape", pooled, body.ints(-1, runs, 1))


def _finite_and_normal(body: Body, rows: str, peaks: str) -> str:
    """A scalar: no infinity, no NaN, and no block so small that its subnormal elements would not round to zero."""
    nonzero = body.op("Where", body.op("Equal", peaks, 0.0), 1.0, peaks)
    smallest = body.op("ReduceMin", nonzero, attributes={"keepdims": 0})
    normal = body.op("Greater", smallest, _NO_SUBNORMAL_MATTERS)
    return body.op("And", all_finite(body, rows), normal)
