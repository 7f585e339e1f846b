"""microxcaling's tests of its compiled kernels against its Python, with this package's arithmetic as the kernels.

Its functions call ``mx_ext``, a compiled module, where they are told ``custom_cuda=True``; its tests compare both ways
on every encoding of a type. Here that module is ours, so they compare their reference with ``quark.numerics``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from judge_reached import counted

from quark.numerics.blocks import BLOCKS, Block
from quark.numerics.elements import ELEMENTS, Float
from quark.numerics.rounding import rule_of

#: Their rounding modes, which round magnitudes.
MODES = ("half_away", "toward_zero", "half_even")
SMALLEST = 2.0**-126


def float_of(bits: int, exponent: int, largest: float, saturates: bool) -> Float:
    """Our format of these bits (theirs count the sign and the leading one)."""
    return Float("judged", exponent, bits - 2, largest, has_infinity=not saturates, has_nan=True, saturates=saturates)


def elements(
    x: torch.Tensor, bits: int, exponent: int, largest: float, mode: int, saturates: bool, subnormal: bool
) -> torch.Tensor:
    """``quantize_elemwise_func_cpp``."""
    rule = rule_of(MODES[mode], None)
    if exponent == 0:
        row = ELEMENTS[f"int{bits}"]
        unit = 2.0 ** (bits - 2)
        return row.snap(x * unit, 0, rule, True) / unit
    if not subnormal:
        x = torch.where(x.abs() < 2.0 ** (2 - 2 ** (exponent - 1)), 0 * x, x)
    return float_of(bits, exponent, largest, saturates).snap(x, 0, rule, False)


def block_of(bits: int, exponent: int, largest: float, size: int) -> Block:
    """Our block format of these elements."""
    if exponent == 0:
        element = ELEMENTS[f"int{bits}"]
        return replace(BLOCKS["mxint8"], name="judged", element=element, unit=2.0 ** (2 - bits), size=size, narrow=True)
    for row in BLOCKS.values():
        element, plain = row.element, row.rule == "e8m0_floor" and not row.tensor_scale
        fields = isinstance(element, Float) and (element.exponent_bits, element.mantissa_bits, element.max)
        if plain and fields == (exponent, bits - 2, largest):
            return replace(row, size=size)
    raise NotImplementedError(f"no block format of elements with {exponent} and {bits} bits")


def blocks(
    x: torch.Tensor, scale_bits: int, exponent: int, bits: int, largest: float, peaks: torch.Tensor, axis: int,
    flush: bool, mode: int,
) -> torch.Tensor:  # fmt: skip
    """``quantize_mx_func_cpp``."""
    if scale_bits != 8:
        pytest.skip(f"no format here has scales of {scale_bits} bits")
    if flush:
        x = torch.where(peaks < SMALLEST, 0 * x, x)
    return block_of(bits, exponent, largest, x.shape[axis]).round(x, axis, MODES[mode])


def pytest_configure(config: Any) -> None:
    """Before their modules are imported."""
    module = ModuleType("mx_ext")
    module.quantize_elemwise_func_cpp = counted(elements)  # type: ignore[attr-defined]
    module.quantize_mx_func_cpp = counted(blocks)  # type: ignore[attr-defined]
    sys.modules["mx_ext"] = module
