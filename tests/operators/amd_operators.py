"""The arithmetic of the block operators of domain ``com.amd.quark``, by their attribute names.

``bfp_quantize_dequantize`` is ``BFPQuantizeDequantize``, ``mx_quantize_dequantize`` is ``MXQuantizeDequantize``: blocks
along ``axis``, a short last block padded with zeros, ``rounding_mode`` 0 = half away from zero, 1 = half up,
2 = half to even. A compiler that knows these operators expects exactly these numbers, so their deviations stay:

- ``to_bfp`` clips the block's largest element instead of raising the exponent, unless
  ``use_compiler_version_cpu_kernel`` is set;
- ``to_bfp_prime`` makes a block with an infinity or a NaN all NaN, and takes subnormal inputs for 0;
- ``MXQuantizeDequantize`` rounds small floats half to even whatever the mode says;
- a tensor of one element passes unchanged (but for ``convert_to_bfloat_before_bfp``).
"""

from __future__ import annotations

from dataclasses import replace

from quark.errors import ConfigError, unknown
from quark.numerics.array import Array, as_array
from quark.numerics.blocks import BLOCKS, Block
from quark.numerics.elements import ELEMENTS, Int

ROUNDING_MODES = {0: "half_away", 1: "half_up", 2: "half_even"}
MX_ELEMENTS = {  # element_dtype -> the row with that element
    "int8": "mxint8",
    "fp8_e4m3": "mxfp8_e4m3",
    "fp8_e5m2": "mxfp8_e5m2",
    "fp6_e3m2": "mxfp6_e3m2",
    "fp6_e2m3": "mxfp6_e2m3",
    "fp4_e2m1": "mxfp4",
}
BFP_METHODS = ("to_bfp", "to_bfp_prime", "to_bfp_prime_shared")


def rounding_of(rounding_mode: int) -> str:
    """The rounding that ``rounding_mode`` means."""
    if rounding_mode not in ROUNDING_MODES:
        raise ConfigError(unknown("rounding_mode", rounding_mode, map(str, ROUNDING_MODES)))
    return ROUNDING_MODES[rounding_mode]


def bfp_block(
    bfp_method: str = "to_bfp",
    bit_width: int = 16,
    block_size: int = 8,
    sub_block_size: int = 2,
    sub_block_shift_bits: int = 1,
    use_compiler_version_cpu_kernel: int = 0,
) -> Block:
    """The block format that these attributes of ``BFPQuantizeDequantize`` describe.

    Args:
        bfp_method: "to_bfp" (one shared exponent) or "to_bfp_prime" (two levels; "to_bfp_prime_shared" is the same).
        bit_width: 8 for the exponent, 1 for the sign, the rest for the mantissa.
        block_size: elements that share an exponent.
        sub_block_size, sub_block_shift_bits: the second level.
        use_compiler_version_cpu_kernel: two's complement codes, and the exponent rises where the largest would clip.
    """
    if bfp_method not in BFP_METHODS:
        raise ConfigError(unknown("bfp_method", bfp_method, BFP_METHODS))
    mantissa = bit_width - 9
    if not 1 <= mantissa <= 15:
        raise ConfigError(f"bit_width {bit_width} leaves {mantissa} mantissa bits; 10 to 24 are possible")
    element, unit = Int(f"int{mantissa + 1}", mantissa + 1), 2.0 ** (1 - mantissa)
    name = f"{bfp_method}({bit_width}, {block_size})"
    if bfp_method == "to_bfp":
        carry = bool(use_compiler_version_cpu_kernel)
        return Block(name, element, block_size, unit=unit, narrow=not carry, carry=carry)
    levels = Block(name, element, block_size, unit=unit, narrow=True, nonfinite="nan")
    return replace(levels, sub_block=sub_block_size, shift_bits=sub_block_shift_bits)


def bfp_quantize_dequantize(
    x: Array,
    bfp_method: str = "to_bfp",
    axis: int = 1,
    bit_width: int = 16,
    block_size: int = 8,
    rounding_mode: int = 0,
    sub_block_size: int = 2,
    sub_block_shift_bits: int = 1,
    convert_to_bfloat_before_bfp: int = 0,
    use_compiler_version_cpu_kernel: int = 0,
) -> Array:
    """``x`` (any shape) through ``BFPQuantizeDequantize`` with these attributes; see ``bfp_block``."""
    x = as_array(x)
    if convert_to_bfloat_before_bfp:
        x = ELEMENTS["bfloat16"].round(x)
    block = bfp_block(
        bfp_method, bit_width, block_size, sub_block_size, sub_block_shift_bits, use_compiler_version_cpu_kernel
    )
    return through(block, x, axis, rounding_of(rounding_mode))


def mx_quantize_dequantize(
    x: Array, element_dtype: str = "int8", axis: int = 1, block_size: int = 32, rounding_mode: int = 0
) -> Array:
    """``x`` (any shape) through ``MXQuantizeDequantize`` with these attributes."""
    if element_dtype not in MX_ELEMENTS:
        raise ConfigError(unknown("element_dtype", element_dtype, MX_ELEMENTS))
    block = replace(BLOCKS[MX_ELEMENTS[element_dtype]], size=block_size)
    rounding = rounding_of(rounding_mode)
    return through(block, as_array(x), axis, rounding if element_dtype == "int8" else "half_even")


def through(block: Block, x: Array, axis: int, rounding: str) -> Array:
    """``x`` through ``block``, but for a single element, which the operators do not touch."""
    lonely = len(x.reshape(-1)) == 1
    return x + 0 if lonely else block.round(x, axis if len(x.shape) > 1 else 0, rounding)
