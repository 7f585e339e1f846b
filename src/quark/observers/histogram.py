"""A histogram of fixed size over the upper bits of the float32 pattern: one pass, any order, any number of samples.

A float32 is 1 sign bit, 8 exponent bits, 23 mantissa bits; as an integer its magnitude grows with the value, so

    bin(x) = max(bits(|x|) >> 12  -  base, 0)

has 2048 equal bins (``NumBins``) in every octave [2^e, 2^(e+1)): a bin is at most 1/2048 of its value wide, for the 16
octaves below the largest magnitude. Below them 16 bins make an octave, down to the smallest normal number, so that a
value far out does not turn all others into zeros:

    bin(x) = max(bits(|x|) >> 12  -  base,  bits(|x|) >> 19  -  base / 128)  +  the number of bins below

When a larger value comes, the bins move up by whole octaves and the lowest fold into coarse ones, so the counts are
those of one pass with the final base: merging is exact and associative. The 512 largest magnitudes of each sign are
kept as they are, so that quantiles far out are exact.

The first 16384 values are kept as they are, and later ones wait until so many have come together: a histogram of few
values is exact, and small samples cost what they hold instead of a pass over the bins.

Memory: 143 KiB per sign, twice as much from 2^31 values on. Counting (``quark.observers.patterns``) overlaps the next
inference: all passes but the last release the interpreter lock, and that one (``add.at``, faster than ``bincount``)
holds it for 0.1 ms.
Not handled: float64 beyond the float32 range (an error, as infinity).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np

from quark.errors import ConfigError
from quark.observers.patterns import BELOW, LARGEST, OCTAVES, SPARSE, count_patterns
from quark.observers.statistics import INFINITE, State, extremes, flattened, patterns_from_zero

PER_OCTAVE = 2048
#: Fewer bins would not carry the searches; more than these gain nothing.
FEWEST, MOST = 16, 1 << 16
TAIL = 512
BLOCK = 1 << 10
CHUNK = 32 * BLOCK
PATIENCE = 1 << 14
GOLDEN = (math.sqrt(5) - 1) / 2

Own = TypeVar("Own", bound="Histogram")
Bins = tuple[np.ndarray, np.ndarray, np.ndarray]
#: Smallest and largest value of every block; of the smallest, one may stand for all where none is below zero.
Blocks = tuple[np.ndarray, np.ndarray]


class Histogram:
    """Counts of the values of one tensor, with exact extremes and exact tails.

    Args:
        bins: bins in every octave, rounded up to a power of two (``NumBins``).

    Attributes:
        per_octave: bins in every octave.
        lo, hi: smallest and largest value seen.
        count: values seen.
    """

    def __init__(self, bins: int = PER_OCTAVE) -> None:
        if not FEWEST <= bins <= MOST:
            raise ConfigError(f"NumBins is {bins}; a histogram has {FEWEST} to {MOST} bins an octave")
        self.lo, self.hi = np.inf, -np.inf
        self.count = 0
        self._mantissa = math.ceil(math.log2(bins))
        self.per_octave = 1 << self._mantissa
        self._bins = BELOW + (OCTAVES << self._mantissa)
        self._top = 0  # the largest biased exponent seen, plus one
        self._counts = self._empty(0)  # [signs, bins], of positive, then of negative values (only once there are some)
        self._inside = 0  # how many values they count
        self._tails = [np.empty(0, np.float32), np.empty(0, np.float32)]  # largest magnitudes, descending
        self._waiting: list[np.ndarray] = []  # values that are not in the bins yet
        self._waits = 0  # how many they are

    # ---- collecting --------------------------------------------------------------------------------------------------

    def update(self, x: np.ndarray) -> None:
        """Count the values of one sample (any shape and float type), in pieces that stay in the cache.

        Raises:
            DataError: the array holds NaN or infinity.
        """
        flat = flattened(x)
        if not flat.size:
            return
        if flat.size < PATIENCE:
            self._postpone(flat)
        else:
            self._insert(flat)
        self.count += flat.size

    def _postpone(self, flat: np.ndarray) -> None:
        """Look at a few values now, and count them later."""
        lo, hi = extremes(flat)
        self.lo, self.hi = min(self.lo, lo), max(self.hi, hi)
        self._wait(flat.copy())

    def _wait(self, flat: np.ndarray) -> None:
        """Let values wait; when many do, they go into the bins."""
        self._waiting.append(flat)
        self._waits += flat.size
        if self._waits >= PATIENCE:
            self._settle()

    def _settle(self) -> None:
        """Put the values that wait into the bins."""
        if self._waiting:
            flat, self._waiting, self._waits = np.concatenate(self._waiting), [], 0
            self._insert(flat)

    @property
    def _few(self) -> bool:
        """Whether there are values, and all are still there."""
        return 0 < self.count == self._waits

    def _held(self) -> np.ndarray:
        """The values that wait, ascending: their order does not count."""
        return np.sort(np.concatenate([np.empty(0, np.float32), *self._waiting]))

    def _binned(self) -> Histogram:
        """This histogram with all values in its bins; of few values, a copy."""
        if not self._few:
            self._settle()
            return self
        copy = Histogram(self.per_octave)
        copy._insert(self._held())
        copy.count = self.count
        return copy

    def _insert(self, flat: np.ndarray) -> None:
        """Put values into bins and tails."""
        lowest, highest = outer_blocks(flat)
        self._count(flat, self._widen(flat, lowest, highest))
        self._keep_tail(0, flat, highest)
        self._keep_tail(1, flat, -lowest)

    def _widen(self, flat: np.ndarray, lowest: np.ndarray, highest: np.ndarray) -> bool:
        """Make room for values with these extremes of blocks; whether there are negative ones."""
        lo, hi = float(lowest.min()), float(highest.max())
        if not (np.isfinite(lo) and np.isfinite(hi)):
            extremes(flat)  # says how many there are
        self._raise_top(_exponent(max(-lo, hi)) + 1)
        self.lo, self.hi = min(self.lo, lo), max(self.hi, hi)
        return lo < 0

    def _count(self, flat: np.ndarray, negative: bool, times: int = 1) -> None:
        """Count values, for which there is room, each ``times`` times."""
        self._have(1 + negative)
        self._counts = self._wide_enough(flat.size * times)
        count_patterns(self._counts[: 1 + negative], flat, self._lowest(), self._mantissa, times)

    def _have(self, signs: int) -> None:
        """Make rows for so many signs."""
        if len(self._counts) < signs:
            self._counts = np.concatenate([self._counts, self._empty(signs - len(self._counts))])

    def _empty(self, signs: int) -> np.ndarray:
        """Counts of so many signs."""
        return np.zeros((signs, self._bins), np.int32)

    def _wide_enough(self, more: int) -> np.ndarray:
        """The counts, in 64 bits from where one of them could have passed 32 with so many values more."""
        self._inside += more
        return self._counts if self._inside <= LARGEST else self._counts.astype(np.int64, copy=False)

    def _lowest(self) -> int:
        """The biased exponent of the lowest octave with fine bins."""
        return max(self._top - OCTAVES, 0)

    def _raise_top(self, top: int) -> None:
        """Make room for magnitudes below 2^(top - 127): move the bins down, fold the lowest into coarse ones."""
        before = self._lowest()
        self._top = max(self._top, top)
        octaves = self._lowest() - before
        if octaves:
            self._counts = self._moved(self._counts, octaves)

    def _moved(self, counts: np.ndarray, octaves: int) -> np.ndarray:
        """The counts when the fine bins start so many octaves higher."""
        signs = len(counts)
        coarse, fine = counts[:, :BELOW], counts[:, BELOW:]
        folded = fine.reshape(signs, OCTAVES << SPARSE, 1 << self._mantissa - SPARSE).sum(2, dtype=counts.dtype)
        start, gone = octaves << SPARSE, min(octaves, OCTAVES) << self._mantissa
        low, high = (np.zeros((signs, size), counts.dtype) for size in (start, gone))
        below = np.concatenate([coarse, folded, low], axis=1)[:, start : start + BELOW]
        return np.concatenate([below, fine[:, gone:], high], axis=1)

    def _keep_tail(self, sign: int, flat: np.ndarray, largest: np.ndarray) -> None:
        """Take over what ``flat`` adds to the largest magnitudes of one sign; ``largest``: those of its blocks."""
        tail = self._tails[sign]
        full = tail.size == TAIL
        if largest.max() <= (tail[-1] if full else 0):
            return
        bound = tail[-1] if full else np.nextafter(self._outer_edge(sign), np.float32(0), dtype=np.float32)
        blocks = np.flatnonzero(largest > bound)
        if blocks.size < largest.size // 4:
            flat = within(flat, blocks)
        found = flat[flat > bound] if sign == 0 else -flat[flat < -bound]
        self._tails[sign] = _largest(np.concatenate([tail, found]))

    def _outermost(self) -> list[np.ndarray]:
        """The largest magnitudes of positive and of negative values, descending, as they are."""
        return self._tails

    def _outer_edge(self, sign: int) -> np.float32:
        """A magnitude that at least ``TAIL`` values of this sign reach, or all that are not counted as zero."""
        outward = np.cumsum(self._counts[sign][::-1], dtype=np.int64)
        place = self._bins - 1 - int(np.searchsorted(outward, TAIL))
        return np.float32(self._edges()[max(place, 0)])

    def merge(self, other: Histogram) -> None:
        """Add what ``other`` has seen; ``other`` stays as it is."""
        if not other.count:
            return
        moved = Histogram.from_state(Histogram.state(other))
        top = max(self._top, moved._top)
        self._raise_top(top)
        moved._raise_top(top)
        self._have(len(moved._counts))
        self._counts = self._counts.astype(np.int64, copy=False)
        self._counts[: len(moved._counts)] += moved._counts
        self._tails = [_largest(np.concatenate(pair)) for pair in zip(self._tails, moved._tails, strict=True)]
        for values in moved._waiting:
            self._wait(values)
        self.lo, self.hi, self.count = min(self.lo, other.lo), max(self.hi, other.hi), self.count + other.count

    def state(self) -> State:
        """Everything, as arrays; bins that are empty at the end are left out."""
        if not self._few:
            self._settle()
        return {
            "waiting": self._held(),
            "extremes": np.array([self.lo, self.hi]),
            "count": np.array(self.count),
            "top": np.array(self._top),
            "bins": np.array(self.per_octave),
            "signs": np.array(len(self._counts)),
            "counts": self._counts.astype(np.int64).reshape(-1),
            **{side: tail.copy() for side, tail in zip(("high", "low"), self._outermost(), strict=True)},
        }

    @classmethod
    def from_state(cls: type[Own], state: Mapping[str, Any]) -> Own:
        """The statistic that ``state()`` described."""
        new = cls(int(state["bins"]))
        new.lo, new.hi = (float(value) for value in state["extremes"])
        new.count, new._top = int(state["count"]), int(state["top"])
        new._counts = np.array(state["counts"], np.int64).reshape(int(state["signs"]), new._bins)
        new._tails = [np.array(state[side], np.float32) for side in ("high", "low")]
        if state["waiting"].size:
            new._wait(np.array(state["waiting"], np.float32))
        return new

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _edges(self) -> np.ndarray:
        """Edges of the bins of one sign, float64 [bins + 1]."""
        return _edges_from(self._lowest(), self._mantissa)

    def bins(self) -> Bins:
        """Left edges, right edges and counts of the bins that are not empty, in ascending order."""
        whole = self._binned()
        if whole is not self:
            return whole.bins()
        edges = self._edges()
        parts = [(edges[:-1], edges[1:], counts) for counts in self._counts[:1]]
        for counts in self._counts[1:]:
            parts.insert(0, (-edges[:0:-1], -edges[-2::-1], counts[::-1]))
        return _occupied([np.concatenate(column) for column in zip(*parts, strict=True)]) if parts else _occupied([])

    def magnitude_bins(self) -> Bins:
        """Left edges, right edges and counts of the bins of |x| that are not empty, in ascending order."""
        whole = self._binned()
        if whole is not self:
            return whole.magnitude_bins()
        edges = self._edges()
        return _occupied([edges[:-1], edges[1:], self._counts.sum(0, dtype=np.int64)])

    def quantile(self, share: float) -> float:
        """The value that ``share`` (0..1) of all values do not exceed: exact in the tails, else to 1/2048 of itself."""
        whole = self._binned()
        if whole is not self:
            return whole.quantile(share)
        rank = rank_of(share, self.count)
        high, low = self._outermost()
        if self.count - rank < high.size:
            return float(high[self.count - rank])
        if rank <= low.size:
            return -float(low[rank - 1])
        return float(np.clip(_at_rank(self.bins(), rank), self.lo, self.hi))

    def magnitude_quantile(self, share: float) -> float:
        """The same for |x|."""
        whole = self._binned()
        if whole is not self:
            return whole.magnitude_quantile(share)
        rank = rank_of(share, self.count)
        outer = _largest(np.concatenate(self._outermost()))
        if self.count - rank < outer.size:
            return float(outer[self.count - rank])
        return float(min(_at_rank(self.magnitude_bins(), rank), max(-self.lo, self.hi)))

    def points(self, whole: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """A few thousand values with weights that stand for all values, for searches that try many ranges.

        Bins are joined the further they lie below the largest magnitude, until 16 make an octave, so that each stays
        below 1/2048 of the largest magnitude or 1/16 of its own value. A bin stands at golden-section positions within
        its width, not in its middle: middles are multiples of a power of two, on which a power-of-two scale would seem
        to have no rounding error.

        Args:
            whole: join no bins: up to 74,000 values, for those who must tell near ranges apart.

        Returns:
            values float32 [n] within [lo, hi], weights float64 [n].
        """
        if self._few:
            return self._held(), np.ones(self._waits)
        self._settle()
        return self._points_of(self._counts, whole)

    def _points_of(self, every: Iterable[np.ndarray], whole: bool) -> tuple[np.ndarray, np.ndarray]:
        """The points of these counts of positive and of negative values."""
        values, weights = [], []
        for sign, counts in zip((1, -1), every, strict=False):
            left, right, joined = self._joined(counts, whole)
            # The first place is a left edge: zeros stay zeros.
            place = left + (right - left) * np.modf(GOLDEN * np.arange(left.size))[0]
            values.append(sign * place)
            weights.append(joined)
        return np.clip(np.concatenate(values), self.lo, self.hi).astype(np.float32), np.concatenate(weights)

    def _joined(self, counts: np.ndarray, whole: bool) -> Bins:
        """Bins of one sign, joined towards zero unless ``whole``; empty ones left out."""
        starts = np.arange(self._bins) if whole else _joints(self._mantissa)
        sums = np.add.reduceat(counts, starts, dtype=np.int64)
        kept = np.flatnonzero(sums)
        edges = self._edges()
        ends = np.append(starts[1:], self._bins)
        return edges[starts[kept]], edges[ends[kept]], sums[kept].astype(np.float64)

    def linear(self, bins: int) -> tuple[np.ndarray, np.ndarray]:
        """Counts [bins] and edges [bins + 1] of equal bins between lo and hi, for pictures."""
        if not self.count:
            return np.zeros(bins, np.int64), np.linspace(0, 1, bins + 1)
        left, right, counts = self.bins()
        middle = np.clip((left + right) / 2, self.lo, self.hi)
        widen = 0.5 * (self.hi == self.lo)
        found, edges = np.histogram(middle, bins, (self.lo - widen, self.hi + widen), weights=counts)
        return found.astype(np.int64), edges


@lru_cache(maxsize=4)
def _edges_from(lowest: int, mantissa: int) -> np.ndarray:
    """Edges of bins whose fine ones start at this octave, not to be written to; the first that are used start at 0."""
    fine = (lowest << mantissa) + np.arange((OCTAVES << mantissa) + 1, dtype=np.int64)
    coarse = (lowest << SPARSE) - np.arange(BELOW, 0, -1, dtype=np.int64)
    patterns = np.concatenate([np.maximum(coarse, 0) << (23 - SPARSE), fine << (23 - mantissa)])
    return np.minimum(patterns, 0x7F7FFFFF).astype(np.int32).view(np.float32).astype(np.float64)


@cache
def _joints(mantissa: int) -> np.ndarray:
    """The first of the bins that are joined to one: the fewer in an octave, the further it lies below the largest."""
    octaves = np.arange(OCTAVES)
    steps = 1 << np.minimum(OCTAVES - 1 - octaves, mantissa - SPARSE)
    parts = [
        np.arange(octave << mantissa, octave + 1 << mantissa, step) for octave, step in zip(octaves, steps, strict=True)
    ]
    return np.concatenate([np.arange(BELOW), BELOW + np.concatenate(parts)])


def _exponent(magnitude: float) -> int:
    """The biased exponent of a non-negative float32."""
    return int(np.float32(magnitude).view(np.int32) >> 23)


def block_extremes(flat: np.ndarray) -> Blocks:
    """Smallest and largest of every block, in pieces that stay in the cache."""
    blocks = -(-flat.size // BLOCK)
    lowest, highest = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    for start in range(0, flat.size, CHUNK):
        piece, rows = flat[start : start + CHUNK], slice(start // BLOCK, (start + CHUNK) // BLOCK)
        starts = np.arange(0, piece.size, BLOCK)
        np.minimum.reduceat(piece, starts, out=lowest[rows])
        np.maximum.reduceat(piece, starts, out=highest[rows])
    return lowest, highest


def outer_blocks(flat: np.ndarray) -> Blocks:
    """``block_extremes``; where no value is below zero, one zero stands for the smallest of all blocks."""
    patterns = patterns_from_zero(flat)
    if patterns is not None:
        highest = np.maximum.reduceat(patterns, np.arange(0, patterns.size, BLOCK))
        if highest.max() < INFINITE:
            return np.zeros(1, np.float32), highest.view(np.float32)
    return block_extremes(flat)


def within(flat: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """The values of these blocks, whose numbers ascend."""
    whole = flat.size // BLOCK
    found = flat[: whole * BLOCK].reshape(-1, BLOCK)[blocks[blocks < whole]].reshape(-1)
    return np.concatenate([found, flat[whole * BLOCK :]]) if blocks.size and blocks[-1] == whole else found


def _largest(magnitudes: np.ndarray) -> np.ndarray:
    """The ``TAIL`` largest, descending."""
    if magnitudes.size > TAIL:
        magnitudes = np.partition(magnitudes, magnitudes.size - TAIL)[-TAIL:]
    return np.sort(magnitudes)[::-1]


def _occupied(columns: list[np.ndarray]) -> Bins:
    """The rows of (left, right, count) with a count."""
    if not columns:
        return np.empty(0), np.empty(0), np.empty(0, np.int64)
    left, right, counts = columns
    kept = np.flatnonzero(counts)
    return left[kept], right[kept], counts[kept].astype(np.int64)


def rank_of(share: float, count: int) -> int:
    """How many values, from the smallest on, make ``share`` of ``count``: 1..count."""
    return min(max(math.ceil(share * count - 1e-6), 1), count)


def _at_rank(bins: Bins, rank: int) -> float:
    """The value of this rank (from 1), on a straight line through its bin."""
    left, right, counts = bins
    upto = np.cumsum(counts)
    place = int(np.searchsorted(upto, rank))
    within = (rank - (upto[place] - counts[place]) - 0.5) / counts[place]
    return float(left[place] + (right[place] - left[place]) * within)
