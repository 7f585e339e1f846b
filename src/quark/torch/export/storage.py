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

from functools import cache
from math import prod
from typing import TypeAlias

import torch

from quark.dataclass import dataclass
from quark.numerics.elements import Element, Int
from quark.numerics.packing import AWQ_ORDER, pack, unpack
from quark.torch.config.type import code_type

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
    bits: int
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


#: Layouts of the peer's files; every other format follows from its row.
CODECS = {
    **dict.fromkeys(("int2", "uint2"), Storage(torch.uint8, 2, "high", transposes=True)),
    **dict.fromkeys(("int4", "uint4"), Storage(torch.int32, 4, reorders=True, transposes=True)),
}
ALONE = (8, 16, 32)  # bits of codes that are an element each
SHIFTS = Storage(torch.uint8, 1)  # exponents that pairs of MX6 and MX9 lower by one


@cache
def storage_of(element: Element) -> Storage:
    """How the codes of a format are stored."""
    if element.name in CODECS:
        return CODECS[element.name]
    alone = element.bits in ALONE
    return Storage(code_type(element), 0 if alone else element.bits, transposes=isinstance(element, Int) and alone)
