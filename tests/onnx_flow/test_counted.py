"""Which samples an interrupted calibration has counted: each sample counts once, and others than before are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quark.errors import DataError
from quark.files.journal import Journal
from quark.observers import Histogram, MinMax, Statistic
from quark.onnx.counted import CountedSamples, restore, state_of
from quark.onnx.fingerprint import of_arrays

Feeds = list[dict[str, np.ndarray]]


def feeds(count: int, seed: int = 0) -> Feeds:
    draw = np.random.default_rng(seed)
    return [{name: draw.standard_normal(5).astype(np.float32) for name in "ba"} for _ in range(count)]


def run(path: Path | None, given: Feeds, stop: int | None = None, at_once: int = 1) -> tuple[dict[str, Statistic], int]:
    """Count samples, ``at_once`` together, until ``stop`` of them are counted in this run; how many were."""
    statistics: dict[str, Statistic] = {"a": MinMax(), "b": Histogram()}
    journal = Journal(path, {"model": "m"} if path else None)
    counted = CountedSamples(journal, statistics)
    assert bool(counted) is (path is not None)
    waiting, seen = 0, 0
    for feed in counted.unseen(given):
        for name, array in feed.items():
            statistics[name].update(array)
        waiting, seen = waiting + 1, seen + 1
        if waiting == at_once:
            counted.count(waiting)
            waiting = 0
        if seen == stop:
            return statistics, seen
    if waiting:
        counted.count(waiting)
    counted.close()
    return statistics, seen


def same(one: dict[str, Statistic], other: dict[str, Statistic]) -> bool:
    left, right = state_of(one), state_of(other)
    return left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("stops", [[], [2], [2, 2], [4], [6]])
def test_every_sample_counts_once(stops: Sequence[int], at_once: int, tmp_path: Path) -> None:
    whole, _ = run(None, feeds(6))
    for stop in stops:
        assert run(tmp_path / "r.json", feeds(6), stop, at_once)[1] == stop
    found, seen = run(tmp_path / "r.json", feeds(6), None, at_once)
    assert same(found, whole) and seen == 6 - sum(stops)
    found, seen = run(tmp_path / "r.json", feeds(6))
    assert same(found, whole) and seen == 0


def test_other_samples_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "half.json", feeds(6), 3)
    others = feeds(6)
    others[0]["a"][4] += 1
    with pytest.raises(DataError, match="the first 3 samples are not those that were counted before"):
        run(tmp_path / "half.json", others)
    with pytest.raises(DataError, match="3 samples were counted before, and now there are only 2"):
        run(tmp_path / "half.json", feeds(6)[:2])
    others = feeds(6)
    others[3]["a"] += 1  # not counted yet
    assert run(tmp_path / "half.json", others)[1] == 3
    with pytest.raises(DataError, match="the calibration was over after 6 samples; now there are more"):
        run(tmp_path / "half.json", [*others, *feeds(1, seed=1)])


def test_other_statistics_are_refused() -> None:
    kept = {"a": MinMax(), "b": MinMax()}
    for number, statistic in enumerate(kept.values()):
        statistic.update(np.array([number, number + 2], np.float32))
    fresh: dict[str, Statistic] = {"a": MinMax(), "b": MinMax()}
    restore(fresh, {**state_of(kept), "counted": np.array(1)})
    assert [(one.lo, one.hi) for one in fresh.values()] == [(0, 2), (1, 3)]
    with pytest.raises(DataError, match="other statistics are kept \\(tensor 'b'\\)"):
        restore({"a": MinMax(), "b": Histogram()}, state_of(kept))


def test_the_digest_of_a_sample_is_that_of_its_arrays_whatever_their_order() -> None:
    one = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), np.int8)}
    assert of_arrays(one) == of_arrays(dict(reversed(one.items())))
    others = [
        {**one, "a": one["a"].reshape(2, 3)}, {**one, "a": one["a"].view(np.int32)}, {**one, "a": one["a"][::-1]},
        {"a": one["a"], "c": one["b"]}, {"a": one["a"]},
    ]  # fmt: skip
    digests = [of_arrays(one), of_arrays(one, b"before"), *map(of_arrays, others)]
    assert len(set(digests)) == len(digests)
