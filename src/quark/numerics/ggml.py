"""Types of GGML as formats: blocks whose codes and scales are chosen together, and the bytes that llama.cpp reads.

    Q4_0, Q5_0, Q8_0   32 numbers, one float16 scale                Q3_K, Q6_K         256: 16 scales, multiples of one
    Q4_1, Q5_1         32 numbers, scale and minimum                Q2_K, Q4_K, Q5_K   256: scales and minima, multiples

Codes come nearest to the values by least squares (``ggml_fit``), weighted by ``importance`` where it is known what each
column is multiplied with. A row whose scale float16 has not (below 6e-5 it loses digits, below 6e-8 all; above 65504
there is none) is not rounded, nor is any other of its tensor: a file keeps such a tensor whole. Not handled: NaN and
infinities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.numerics import ggml_bytes
from quark.numerics.array import Array, Operand, Same, as_array, as_parameter, float32, is_torch, permute
from quark.numerics.blocks import Block
from quark.numerics.chunks import like_input
from quark.numerics.elements import Int
from quark.numerics.ggml_bytes import BLOCK, SUPER, Fields
from quark.numerics.ggml_fit import (
    codes_of,
    divided,
    dot,
    extreme,
    fit_affine,
    fit_signed,
    not_below,
    squares,
    stored,
)
from quark.numerics.rounding import Rounding

SMALLEST = 2.0**-18  # scale that float16 has to within 2**-7 of it: below 2**-14 it loses a digit with each exponent
COARSE = 2.0**-21  # scale of a K-quant: its multiples make up for lost digits
LARGEST = 65504.0  # float16
PART = 1 << 16  # numbers that are rounded at a time
Fit = Callable[["Ggml", np.ndarray, np.ndarray], Fields]


@dataclass(frozen=True, kw_only=True)
class Ggml(Block):
    """A type of GGML.

    Attributes:
        kind: its name there.
        nbytes: of a block.
        largest: code; of codes around 0 the magnitude of the lowest.
        fit: finds what blocks hold.
        write: makes bytes of it.
        signed: codes around 0.
        sub: numbers under one step.
        units: of a K-quant, the largest multiple that a step is; 1: steps are float16 themselves.
    """

    kind: str
    nbytes: int
    largest: int
    fit: Fit
    write: Callable[[Fields], np.ndarray]
    signed: bool
    sub: int
    units: int

    @property
    def bits(self) -> float:
        """Bits per value, all scales included."""
        return 8 * self.nbytes / self.size

    def held(self, values: np.ndarray) -> bool:
        """Whether float16 has scales of the size that every row needs; a row of zeros needs none."""
        most = np.abs(values).max(-1, initial=0)
        scale = most / np.float32(self.largest * self.units)
        above = scale if self.signed else most / np.float32(self.units)  # which minima are multiples of
        return bool(((most == 0) | (scale >= (SMALLEST if self.units == 1 else COARSE)) & (above <= LARGEST)).all())

    def round(
        self,
        x: Array,
        axis: int = -1,
        rounding: Rounding = "half_even",
        tensor_scale: Operand | None = None,
        importance: np.ndarray | None = None,
    ) -> Same:
        """``x`` quantized and dequantized, in the type of ``x``; whole, where float16 has not its scales.

        Blocks lie along ``axis``: the last, or the first of a matrix, as of a weight [in, out].

        Raises:
            ConfigError: another axis, or rows that blocks do not divide.
        """
        array: Same = as_array(x)
        if array.ndim == 2 and axis in (0, -2):
            return permute(as_array(self.round(permute(array, (1, 0)), -1, rounding, None, importance)), (1, 0))
        values = self.rows(x, axis)
        return x if not self.held(values) else like_input(as_parameter(self.values(values, importance), as_array(x)), x)

    def rows(self, x: Array, axis: int = -1) -> np.ndarray:
        """Values as float32 of NumPy.

        Raises:
            ConfigError: another axis than the last, or rows that blocks do not divide.
        """
        array = as_array(x)
        if axis not in (-1, array.ndim - 1) or array.shape[-1] % self.size:
            shape = list(array.shape)
            raise ConfigError(f"{self.kind} has blocks of {self.size} along the last axis, and the tensor is {shape}")
        return np.asarray(float32(array.cpu() if is_torch(array) else array))

    def values(self, rows: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
        """What the codes of float32 rows stand for."""
        parts = [value_of(found) for found in self.fields(rows, importance)]
        return np.concatenate(parts).reshape(rows.shape) if parts else rows

    def data(self, rows: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
        """Float32 rows [.., n] as bytes."""
        return self.both(rows, importance)[0]

    def both(
        self, rows: np.ndarray, importance: np.ndarray | None = None, factor: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Float32 rows [.., n] as bytes, and what these stand for, from one search for the codes.

        ``factor`` [rows, 1] or [1, 1] multiplies both: the codes stay, and float16 rounds their scales in the bytes.
        """
        found = self.fields(rows, importance)
        if factor is None:
            parts = [(self.write(one), value_of(one)) for one in found]
        else:
            by = np.repeat(np.broadcast_to(factor[:, 0], len(rows)), rows.shape[-1] // self.size)
            parts = [
                (self.write(times(one, more)), value_of(one) * more[:, None, None]) for one, more in along(found, by)
            ]
        shape = (*rows.shape[:-1], rows.shape[-1] // self.size * self.nbytes)
        if not parts:
            return np.empty(shape, np.uint8), rows
        data, values = (np.concatenate(side) for side in zip(*parts, strict=True))
        return data.reshape(shape), values.reshape(rows.shape)

    def fields(self, rows: np.ndarray, importance: np.ndarray | None) -> Iterator[Fields]:
        """What the blocks hold, a part of the rows after the other."""
        blocks = rows.reshape(-1, self.size)
        count = max(1, PART // self.size)
        known = None if importance is None else importance.astype(np.float32).reshape(-1, self.size)
        for start in range(0, len(blocks), count):
            x = blocks[start : start + count]
            shape = len(x), self.size // self.sub, self.sub
            w = np.ones_like(x) if known is None else known[np.arange(start, start + len(x)) % len(known)]
            yield self.fit(self, x.reshape(shape), w.reshape(shape))


def value_of(found: Fields) -> np.ndarray:
    """The numbers that blocks stand for, in the order of llama.cpp's operations."""
    unit, low = found.d[:, None] * found.scales, found.dmin[:, None] * found.minima
    return found.codes * unit[..., None] - low[..., None]


def along(found: Iterator[Fields], by: np.ndarray) -> Iterator[tuple[Fields, np.ndarray]]:
    """Parts, and those of ``by`` [blocks] that belong to them."""
    start = 0
    for one in found:
        yield one, by[start : start + len(one.d)]
        start += len(one.d)


def times(found: Fields, by: np.ndarray) -> Fields:
    """Blocks multiplied by ``by`` [n], their codes as they are."""
    return found._replace(d=stored(found.d * by), dmin=stored(found.dmin * by))


def apart(x: np.ndarray, found: Fields, w: np.ndarray) -> np.ndarray:
    """What sub-blocks are off."""
    return squares(x - value_of(found), w)


def nearest_codes(row: Ggml, x: np.ndarray, found: Fields) -> Fields:
    """The same scales and minima with the codes that are nearest."""
    unit, low = (found.d[:, None] * found.scales)[..., None], (found.dmin[:, None] * found.minima)[..., None]
    first, last = (-row.largest, row.largest - 1) if row.signed else (0, row.largest)
    return found._replace(codes=codes_of(x + low, unit, first, last))


def plain(d: np.ndarray, low: np.ndarray | None, x: np.ndarray) -> Fields:
    """Blocks of 32 under the steps and minima ``d`` and ``low`` [n, 1], without codes."""
    ones = np.ones_like(d)
    minimum = np.zeros_like(d) if low is None else stored(low)
    return Fields(stored(d)[:, 0], minimum[:, 0], ones, -ones, x)


def in_bytes(row: Ggml, x: np.ndarray, w: np.ndarray) -> Fields:
    """Codes of 8 bits, whose range is the best step."""
    found = plain(np.abs(x).max(-1) / np.float32(row.largest), None, x)
    return found._replace(codes=codes_of(x, found.d[:, None, None], -row.largest, row.largest))


def around_zero(row: Ggml, x: np.ndarray, w: np.ndarray) -> Fields:
    """Signed codes under one scale."""
    return nearest_codes(row, x, plain(fit_signed(x, w, row.largest), None, x))


def above_minimum(row: Ggml, x: np.ndarray, w: np.ndarray) -> Fields:
    """Codes above a minimum."""
    return nearest_codes(row, x, plain(*fit_affine(x, w, row.largest, False), x))


def multiples(values: np.ndarray, of: np.ndarray, first: int, last: int) -> np.ndarray:
    """``values`` [n, k] as whole multiples of ``of`` [n]."""
    return codes_of(values, of[:, None], first, last)


def scaled_around_zero(row: Ggml, x: np.ndarray, w: np.ndarray) -> Fields:
    """Signed codes under multiples of one scale."""
    step, most = fit_signed(x, w, row.largest), row.units
    d = not_below(-extreme(step) / np.float32(most))
    found = Fields(d, np.zeros_like(d), multiples(step, d, -most, most - 1), np.zeros_like(step), x)
    found = nearest_codes(row, x, found)
    for more in (-1, 1):
        other = found._replace(scales=np.clip(found.scales + more, -most, most - 1))
        found = better(found, nearest_codes(row, x, other), x, w)
    units = found.codes * found.scales[..., None]
    other = found._replace(d=stored(divided(over(w * x, units), over(w * units, units))))
    return whole_better(found, nearest_codes(row, x, other), x, w)


def scaled_above_minima(row: Ggml, x: np.ndarray, w: np.ndarray) -> Fields:
    """Codes above minima, both multiples of one number each."""
    step, low = fit_affine(x, w, row.largest, True)
    d, dmin = not_below(step.max(-1) / np.float32(row.units)), not_below(-low.min(-1) / np.float32(row.units))
    found = Fields(d, dmin, multiples(step, d, 0, row.units), multiples(-low, dmin, 0, row.units), x)
    found = nearest_codes(row, x, found)
    for more in (0, -1, 1):
        other = nearest_codes(row, x, found._replace(scales=np.clip(found.scales + more, 0, row.units)))
        found = better(found, other, x, w)
        off = dot(w, other.codes * (d[:, None] * other.scales)[..., None] - x)
        minima = multiples(divided(off, w.sum(-1)), dmin, 0, row.units)
        found = better(found, nearest_codes(row, x, other._replace(minima=minima)), x, w)
    return whole_better(found, nearest_codes(row, x, refitted(found, x, w)), x, w)


def refitted(found: Fields, x: np.ndarray, w: np.ndarray) -> Fields:
    """The same codes and multiples under the two numbers of least squares; they stay where those are no such pair."""
    a, b = found.codes * found.scales[..., None], np.broadcast_to(-found.minima[..., None], x.shape)
    aa, bb, ab, ax, bx = over(w * a, a), over(w * b, b), over(w * a, b), over(w * a, x), over(w * b, x)
    one = divided(ax, aa)
    both = aa * bb - ab * ab
    d, dmin = divided(ax * bb - bx * ab, both), divided(bx * aa - ax * ab, both)
    free = (both > 1e-6 * aa * bb) & (d > 0) & (dmin >= 0)
    d, dmin = np.where(free, d, np.where(bb > 0, found.d, one)), np.where(free, dmin, found.dmin)
    return found._replace(d=stored(d), dmin=stored(dmin))


def over(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of products over whole blocks."""
    return dot(a.reshape(len(a), -1), np.ascontiguousarray(b).reshape(len(b), -1))


def better(one: Fields, other: Fields, x: np.ndarray, w: np.ndarray) -> Fields:
    """The better of two, sub-block by sub-block."""
    wins = apart(x, other, w) < apart(x, one, w)
    return one._replace(
        scales=np.where(wins, other.scales, one.scales),
        minima=np.where(wins, other.minima, one.minima),
        codes=np.where(wins[..., None], other.codes, one.codes),
    )


def whole_better(one: Fields, other: Fields, x: np.ndarray, w: np.ndarray) -> Fields:
    """The better of two that have the same multiples, block by block."""
    wins = apart(x, other, w).sum(-1) < apart(x, one, w).sum(-1)
    return one._replace(
        d=np.where(wins, other.d, one.d),
        dmin=np.where(wins, other.dmin, one.dmin),
        codes=np.where(wins[:, None, None], other.codes, one.codes),
    )


def row(
    kind: str,
    nbytes: int,
    largest: int,
    fit: Fit,
    write: Callable[[Fields], np.ndarray],
    scales: tuple[int, int] = (BLOCK, 1),
) -> Ggml:
    """A row of ``GGML``; ``scales``: values that share a scale, and in how many steps it is stored."""
    bits, (sub, units) = int(kind[1]), scales
    return Ggml(
        kind.lower(),
        Int(f"int{bits}", bits),
        BLOCK if units == 1 else SUPER,
        kind=kind,
        nbytes=nbytes,
        largest=largest,
        fit=fit,
        write=write,
        signed=fit in (in_bytes, around_zero, scaled_around_zero),
        sub=sub,
        units=units,
    )


GGML = {
    one.name: one
    for one in (
        row("Q4_0", 18, 8, around_zero, ggml_bytes.q4_0),
        row("Q4_1", 20, 15, above_minimum, ggml_bytes.q4_1),
        row("Q5_0", 22, 16, around_zero, ggml_bytes.q5_0),
        row("Q5_1", 24, 31, above_minimum, ggml_bytes.q5_1),
        row("Q8_0", 34, 127, in_bytes, ggml_bytes.q8_0),
        row("Q2_K", 84, 3, scaled_above_minima, ggml_bytes.q2_k, (16, 15)),
        row("Q3_K", 110, 4, scaled_around_zero, ggml_bytes.q3_k, (16, 32)),
        row("Q4_K", 144, 15, scaled_above_minima, ggml_bytes.q4_k, (32, 63)),
        row("Q5_K", 176, 31, scaled_above_minima, ggml_bytes.q5_k, (32, 63)),
        row("Q6_K", 210, 32, scaled_around_zero, ggml_bytes.q6_k, (16, 128)),
    )
}
