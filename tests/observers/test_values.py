"""The exact mode: quantiles by sorting, errors on the values, the stored ranges of the reference's raw modes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from tests.observers.test_golden import GOLDEN, NAMES, TYPES, grid, stored

from quark.errors import ConfigError
from quark.numerics.affine import Coding, Grid
from quark.numerics.formats import get_format
from quark.observers import SEARCHES, Histogram, Memory, Values, mse


def series(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.maximum(rng.standard_t(3, 5000), -1).astype(np.float32).reshape(50, 100) for _ in range(4)]


def filled(statistic: Histogram, data: list[np.ndarray]) -> Histogram:
    for part in data:
        statistic.update(part)
    return statistic


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.37, 0.5, 0.9, 0.999, 1.0])
def test_quantiles_are_the_sorted_values(share: float) -> None:
    values = filled(Values(bins=16), series())
    flat = np.sort(np.concatenate(series()).ravel())
    assert values.quantile(share) == flat[int(np.ceil(share * flat.size - 1e-6)) - 1]
    magnitudes = np.sort(np.abs(flat))
    assert values.magnitude_quantile(share) == magnitudes[int(np.ceil(share * flat.size - 1e-6)) - 1]


def test_parts_merge_and_come_back_from_their_state() -> None:
    whole = filled(Values(), series())
    first, second = filled(Values(), series()[:2]), filled(Values(), series()[2:])
    first.merge(copy.deepcopy(second))
    again = Values.from_state(first.state())
    for one in (first, again):
        np.testing.assert_array_equal(np.concatenate(list(one.parts())), np.concatenate(series()).ravel())
        assert one.quantile(0.4) == whole.quantile(0.4) and one.count == whole.count
    with pytest.raises(ConfigError, match="keeps its values"):
        first.merge(Histogram())


def test_more_bins_come_nearer() -> None:
    flat = np.sort(np.concatenate(series()).ravel())
    exact = flat[int(np.ceil(0.8 * flat.size)) - 1]
    off = [abs(filled(Histogram(bins), series()).quantile(0.8) - exact) for bins in (16, 256, 8192)]
    assert off[0] > off[1] > off[2]
    assert off[2] < exact / 8192
    with pytest.raises(ConfigError, match="NumBins is 4; a histogram has 16 to 65536"):
        Histogram(4)


def test_bins_are_remembered_and_rounded_up() -> None:
    one = filled(Histogram(300), series())
    assert one.per_octave == 512 and Histogram.from_state(one.state()).quantile(0.3) == one.quantile(0.3)


def error(x: np.ndarray, span: tuple[float, float], target: object) -> float:
    scale, zero_point = target.parameters(*span)
    return float(np.mean((x - Coding(target.format).fake_quantize(x, scale, zero_point)).astype(np.float64) ** 2))


@pytest.mark.parametrize("kind", TYPES)
def test_the_second_look_is_no_worse_than_the_first(kind: str) -> None:
    target, x = grid(kind), np.concatenate(series())
    first = SEARCHES["mse"].find(filled(Histogram(32), series()), target, {})
    second = SEARCHES["mse"].find(filled(Values(32), series()), target, {"keep": Memory})
    assert error(x, second, target) <= error(x, first, target)
    assert (second != first) == (kind != "int8_sym")  # there the first is the best already


@pytest.mark.parametrize("wanted", [True, False])
def test_one_threshold_is_one_after_the_second_look(wanted: bool) -> None:
    """Of values that lie otherwise above 0 than below; both sides are found on their own where nothing asks for one."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(4000), 9 * rng.random(6), -5 * rng.random(3)]).astype(np.float32)
    low, high = mse.search(filled(Values(128, Memory()), [x]), Grid(get_format("int4"), False, False), wanted)
    assert x.min() < low < 0 < high < x.max() and (low == -high) is wanted


@pytest.mark.golden
@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden vectors beside the repository")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", NAMES)
def test_raw_modes_equal_the_reference(name: str, kind: str) -> None:
    data, oracle = stored()[1][name], stored()[0][name]
    settings = {"metric": "mse", "keep": Memory}
    method = SEARCHES["layerwise_percentile"]
    statistic = method.observe(settings)
    for batch in data:
        statistic.update(batch)
    target = grid(kind)
    ours = error(data, method.find(statistic, target, settings), target)
    assert (
        ours <= error(data, oracle["LayerwisePercentile mse raw"][kind]["range"], target) * 1.005 + 1e-20
    )  # its percentiles end at left bin edges
    power = grid(kind, "power_of_two")
    span = SEARCHES["mse"].find(statistic, power, {"keep": Memory})
    theirs = oracle["pow2 MinMSE NumBins 0"][kind]["x"]
    if name != "tiny":  # kept as float16 there, which has no such numbers
        assert (power.parameters(*span)[0], power.parameters(*span)[1]) == (theirs["scale"], theirs["zero_point"])
