"""Counting by tables: what every value adds to the bins, told value by value."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from quark.observers import patterns
from quark.observers.histogram import Histogram
from quark.observers.patterns import BELOW, OCTAVES, SPARSE, count_patterns

SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


def told(values: np.ndarray, signs: int, lowest: int, mantissa: int, times: int) -> np.ndarray:
    """The counts, one value after the other."""
    counts = np.zeros((signs, BELOW + (OCTAVES << mantissa)), np.int64)
    for value in values.tolist():
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        fine = ((bits & 0x7FFFFFFF) >> 23 - mantissa) - (lowest << mantissa)
        coarse = ((bits & 0x7FFFFFFF) >> 23 - SPARSE) - (lowest << SPARSE)
        counts[(bits >> 31) * (signs - 1), BELOW + max(fine, coarse)] += times
    return counts


@pytest.mark.parametrize("mantissa", [4, 11, 16])
@pytest.mark.parametrize("signs", [1, 2])
@pytest.mark.parametrize(("largest", "lowest"), [(1.9, 112), (3e38, 239), (1e-30, 12), (1e-40, 0)])
def test_every_value_is_in_its_bin(mantissa: int, signs: int, largest: float, lowest: int) -> None:
    random = np.random.default_rng(3)
    magnitudes = largest * random.uniform(0, 1, 600) ** random.integers(1, 200, 600)
    values = np.append(magnitudes, [0, -0.0, SMALLEST, largest]).astype(np.float32)
    values *= random.choice([1, 1 - 2 * (signs - 1)], values.size).astype(np.float32)
    for times in (1, 7):  # the second finds the table that the first left
        counts = np.zeros((signs, BELOW + (OCTAVES << mantissa)), np.int32)
        count_patterns(counts, values, lowest, mantissa, times)
        np.testing.assert_array_equal(counts, told(values, signs, lowest, mantissa, times))


def test_more_than_a_table_holds_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "LARGEST", 20)
    values = np.float32([-1.5, 0.0, 1.0, 0.001] * 13)
    counts = np.zeros((2, BELOW + (OCTAVES << 11)), np.int64)
    count_patterns(counts, values, 112, 11, 3)
    np.testing.assert_array_equal(counts, told(values, 2, 112, 11, 3))


def test_what_an_interrupted_tensor_left_counts_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    values = np.random.default_rng(4).standard_normal(1 << 15).astype(np.float32)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(patterns, "_move", interrupted)
        Histogram().update(values)
    histogram = Histogram()
    histogram.update(values)
    assert histogram.bins()[2].sum() == values.size


class Taken(list[np.ndarray]):
    """Tables of which another thread takes the last one between a look and the taking."""

    def __len__(self) -> int:
        return 1


def test_a_table_that_another_thread_takes_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(patterns._empty, 11, Taken())
    values = np.float32([1.0, 1.5])
    counts = np.zeros((1, BELOW + (OCTAVES << 11)), np.int32)
    count_patterns(counts, values, 112, 11)
    np.testing.assert_array_equal(counts, told(values, 1, 112, 11, 1))
