"""How codes and scales lie in the tensors of a file: one row per element format.

    int4, uint4   eight codes in an int32, first code in the lowest bits; ``reorder``: columns 0 2 4 6 1 3 5 7 (AWQ)
    int2, uint2   four in a byte, first code in the highest bits
    int3, fp6, fp4, and the 5-bit codes of MX6: a little-endian stream of bits
    the rest      one code per element of the type that has the format's width

Codes run along the last axis; a tensor of more than two axes is flattened to [first axis, rest] when it is packed.
Integers with groups along the last axis of a matrix are stored transposed, [in, out], with their scales and zero
points, as the peer does; int3 is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from quark.errors import ModelError
from quark.numerics.elements import Element
from quark.numerics.packing import AWQ_ORDER, pack, unpack

Shape: TypeAlias = tuple[int, ...]
PACK_METHODS = ("reorder", "order")


@dataclass(frozen=True)
class Storage:
    """How the codes of one element format are stored.

    Attributes:
        dtype: of the stored tensor.
        bits: width of a code where several share an element of it; 0: one code per element.
        first: where the first code of a byte lies.
        reorders: ``pack_method="reorder"`` has an effect.
        transposes: codes with groups along the last axis of a matrix are stored transposed.
    """

    dtype: torch.dtype
    bits: int = 0
    first: str = "low"
    reorders: bool = False
    transposes: bool = False

    def order(self, pack_method: str) -> tuple[int, ...] | None:
        """The permutation within a word."""
        return AWQ_ORDER if self.reorders and pack_method == "reorder" else None

    def shape(self, shape: Shape) -> Shape:
        """Of the stored tensor, for codes of ``shape``."""
        if not self.bits or not shape:
            return shape
        rows = flat(shape)
        return (*rows[:-1], -(-rows[-1] * self.bits // (8 * self.dtype.itemsize)))

    def put(self, codes: torch.Tensor, pack_method: str) -> torch.Tensor:
        """``codes`` as they are stored; a single code is not packed."""
        if not codes.dim():
            return codes.to(self.dtype) if self.bits else codes.view(self.dtype)
        if not self.bits:
            return codes.contiguous().view(self.dtype)
        order, rows = self.order(pack_method), codes.reshape(flat(tuple(codes.shape)))
        return pack(rows, self.bits, self.first, order, self.dtype.itemsize).view(self.dtype)

    def get(self, stored: torch.Tensor, element: Element, shape: Shape, pack_method: str) -> torch.Tensor:
        """The codes of ``shape`` that ``put`` stored."""
        code_dtype = getattr(torch, element.code_dtype)
        if not shape:
            return stored.to(code_dtype) if self.bits else stored.view(code_dtype)
        if not self.bits:
            return stored.view(code_dtype)
        count, order = flat(shape)[-1], self.order(pack_method)
        codes = unpack(stored.contiguous().view(torch.uint8), self.bits, count, self.first, order, signed(element))
        return codes.reshape(shape)


def signed(element: Element) -> bool:
    """Whether codes are numbers with a sign (the sign of a float is a bit of its code)."""
    return element.code_dtype.startswith("int")


def flat(shape: Shape) -> Shape:
    """Rows of what is packed: [first axis, everything else]."""
    return shape if len(shape) < 2 else (shape[0], prod(shape[1:]))


STORAGE = {
    "int2": Storage(torch.uint8, 2, "high", transposes=True),
    "uint2": Storage(torch.uint8, 2, "high", transposes=True),
    "int3": Storage(torch.uint8, 3),
    "uint3": Storage(torch.uint8, 3),
    "int4": Storage(torch.int32, 4, reorders=True, transposes=True),
    "uint4": Storage(torch.int32, 4, reorders=True, transposes=True),
    "int5": Storage(torch.uint8, 5),
    "int8": Storage(torch.int8, transposes=True),
    "uint8": Storage(torch.uint8, transposes=True),
    "int16": Storage(torch.int16, transposes=True),
    "uint16": Storage(torch.int16, transposes=True),
    "int32": Storage(torch.int32, transposes=True),
    "float16": Storage(torch.float16),
    "bfloat16": Storage(torch.bfloat16),
    "fp8_e5m2": Storage(torch.float8_e5m2),
    "fp8_e4m3": Storage(torch.float8_e4m3fn),
    "fp6_e3m2": Storage(torch.uint8, 6),
    "fp6_e2m3": Storage(torch.uint8, 6),
    "fp4_e2m1": Storage(torch.uint8, 4),
    "e5m3": Storage(torch.uint8),
    "e8m0": Storage(torch.uint8),
}
SHIFTS = Storage(torch.uint8, 1)  # exponents that pairs of MX6 and MX9 lower by one


def storage_of(element: Element) -> Storage:
    """The row of a format.

    Raises:
        ModelError: none; the format cannot be stored.
    """
    if element.name not in STORAGE:
        raise ModelError(f"{element.name} has no stored form; these have one: {', '.join(STORAGE)}")
    return STORAGE[element.name]
