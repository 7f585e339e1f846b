"""Every calibration method: what it counts may be stored, restored and merged, and finds the same range."""

from __future__ import annotations

import numpy as np
import pytest

from quark.numerics.affine import Grid
from quark.numerics.formats import FORMATS
from quark.observers import SEARCHES, Statistic
from quark.observers.registry import RangeMethod

GRIDS = {
    "symmetric": Grid(FORMATS["int8"], True),
    "narrow": Grid(FORMATS["int8"], True, True),
    "free": Grid(FORMATS["uint8"], False),
    "positions": Grid(FORMATS["int8"], True, True, "power_of_two"),
    "free positions": Grid(FORMATS["uint8"], False, False, "power_of_two"),
    "floats": Grid(FORMATS["fp8_e4m3"], True),
}
FITS = {"mse_most_common": ("positions", "free positions"), "distribution": ("floats",)}
CASES = [(name, grid) for name in SEARCHES for grid in FITS.get(name, GRIDS) if grid != "floats" or name in FITS]


def settings_of(row: RangeMethod, grid: Grid) -> dict[str, object]:
    """As a flow gives them: the grid and the number of samples where the method asks."""
    told = {"grid": grid, "samples": 3, "symmetric": grid.symmetric}
    return {name: value for name, value in told.items() if name in row.settings}


def samples() -> list[np.ndarray]:
    """Three of one layer, not of the same spread, of more values than are counted one by one."""
    draw = np.random.default_rng(0)
    made = [draw.standard_normal(70_000) * scale + 0.3 for scale in (1.0, 3.0, 0.2)]
    return [part.astype(np.float32) for part in made]


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_the_range_is_the_same_after_a_stop_and_by_parts(name: str, grid: str) -> None:
    row, parts = SEARCHES[name], samples()
    settings = settings_of(row, GRIDS[grid])

    def seen(statistic: Statistic, some: list[np.ndarray]) -> Statistic:
        for part in some:
            statistic.update(part)
        return statistic

    whole = seen(row.observe(settings), parts)
    begun = seen(row.observe(settings), parts[:1])
    stored = {key: np.asarray(value) for key, value in begun.state().items()}
    resumed = seen(type(begun).from_state(stored), parts[1:])
    joined = seen(row.observe(settings), parts[:2])
    if "moving" not in name:
        joined.merge(seen(row.observe(settings), parts[2:]))
    else:
        seen(joined, parts[2:])
    wanted = row.find(whole, GRIDS[grid], settings)
    assert wanted[0] <= 0 < wanted[1]
    assert row.find(resumed, GRIDS[grid], settings) == wanted
    assert row.find(joined, GRIDS[grid], settings) == pytest.approx(wanted, rel=1e-12)
    assert (whole.count, whole.lo, whole.hi) == (resumed.count, resumed.lo, resumed.hi)
