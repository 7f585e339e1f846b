"""Counting float32 values by the upper bits of their patterns, straight into a histogram's bins.

    key(x) = bits(x) >> (23 - mantissa)        sign, 8 exponent bits, the first ``mantissa`` bits of the mantissa

A table has a place for every key, so that a value takes two passes: shift and count. The fine bins are a stretch of
the table as it is; the keys below them are summed, a coarse bin from each 2^(mantissa - SPARSE) of them. How many
values are still to be found says how far down that goes: hardly ever more than a few octaves, as zeros have a key of
their own.

A table is large (4 MiB of addresses for 2048 bins an octave), and little of it is ever touched. It is handed from one
tensor to the next, empty; one that an error left half counted is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

OCTAVES = 16
SPARSE = 4  # bits of the fewest points an octave keeps for the searches, and of the bins below the kept octaves
BELOW = 240 << SPARSE  # bins of the octaves that may lie below the kept ones
LARGEST = (1 << 31) - 1
#: Values whose keys are found in one piece; they stay in the cache.
PIECE = 1 << 15
#: Octaves below the fine bins that are looked through in one piece.
STRETCH = 8
#: Empty tables that wait for the next tensor, by the mantissa bits of their keys.
_empty: dict[int, list[np.ndarray]] = {}


def count_patterns(counts: np.ndarray, flat: np.ndarray, lowest: int, mantissa: int, times: int = 1) -> None:
    """Add values, each ``times`` times, to the counts of a histogram, in place.

    Args:
        counts: [signs, BELOW + (OCTAVES << mantissa)] of positive and, in a second row, of negative values. Without
            that row there is no value below 0; -0.0 is one of the positive ones then.
        flat: float32 [n], finite and below the last octave.
        lowest: the biased exponent of the lowest octave with fine bins.
        mantissa: bits; an octave has 2^mantissa fine bins.
    """
    spare = _empty.setdefault(mantissa, [])
    try:
        table = spare.pop()  # in one step: other threads count too
    except IndexError:
        table = np.zeros((2, 1 << 8 + mantissa), np.int32)
    most = LARGEST // times
    for start in range(0, flat.size, most):
        part = flat[start : start + most]
        _tally(table.reshape(-1), part, mantissa, times)
        _move(table, counts, part.size * times, lowest, mantissa)
    spare.append(table)


def _tally(table: np.ndarray, flat: np.ndarray, mantissa: int, times: int) -> None:
    """Count every key ``times`` times."""
    patterns, shift, keys = flat.view(np.uint32), np.uint32(23 - mantissa), np.empty(min(flat.size, PIECE), np.int64)
    for start in range(0, flat.size, PIECE):
        piece = patterns[start : start + PIECE]
        np.add.at(table, np.right_shift(piece, shift, out=keys[: piece.size]), np.int32(times))


def _move(table: np.ndarray, counts: np.ndarray, total: int, lowest: int, mantissa: int) -> None:
    """Move so many counts from the table to the bins; it is empty then."""
    base, first = lowest << mantissa, BELOW - (lowest << SPARSE)
    for sign, row in enumerate(table):
        bins = counts[min(sign, len(counts) - 1)]
        bins[first] += row[0]  # zeros
        total -= int(row[0])
        row[0] = 0
        if sign < len(counts):
            fine = row[base : base + (OCTAVES << mantissa)]
            bins[BELOW:] += fine
            total -= int(fine.sum(dtype=np.int32))
            fine.fill(0)
    for start, stop in _stretches(lowest) if total else ():
        for bins, row in zip(counts, table, strict=False):
            part = row[start << mantissa : stop << mantissa]
            coarse = part.reshape(-1, 1 << mantissa - SPARSE).sum(1, dtype=np.int32)
            bins[first + (start << SPARSE) : first + (stop << SPARSE)] += coarse
            total -= int(coarse.sum(dtype=np.int32))
            part.fill(0)
        if not total:
            return


def _stretches(lowest: int) -> Iterator[tuple[int, int]]:
    """Octaves below this one, from the highest on."""
    for stop in range(lowest, 0, -STRETCH):
        yield max(stop - STRETCH, 0), stop
