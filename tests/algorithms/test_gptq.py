"""GPTQ against the paper's own recursion (inverse Hessian, float64), and its properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quark.algorithms.columns import Columns, columns_of
from quark.algorithms.gptq import feedback_of, gptq, loss, round_columns
from quark.errors import ConfigError, DataError
from quark.numerics import replay
from quark.numerics.affine import Coding, Grid
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import Channel, Granularity, Group, Tensor

ROWS, COLUMNS = 24, 96


def problem(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight and the Hessian of correlated inputs of unlike size."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((COLUMNS, COLUMNS)) / 6 + np.diag(rng.uniform(0.3, 3, COLUMNS))
    x = rng.standard_normal((4 * COLUMNS, COLUMNS)) @ mix
    return rng.standard_normal((ROWS, COLUMNS)).astype(np.float32), (x.T @ x / len(x)).astype(np.float32)


def scales(
    weight: np.ndarray, name: str, granularity: Granularity, symmetric: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    tiles = granularity.tile(weight)
    return Grid(FORMATS[name], symmetric, narrow=False).parameters(tiles.min(-1), tiles.max(-1))


def grid_for(weight: np.ndarray, name: str = "int4", granularity: Granularity | None = None) -> Columns:
    granularity = granularity or Group(1, 32)
    return columns_of(weight, Coding(FORMATS[name], granularity), *scales(weight, name, granularity))


def paper(weight: np.ndarray, hessian: np.ndarray, step: np.ndarray, damping: float, act_order: bool) -> np.ndarray:
    """Algorithm 1 of Frantar et al. (2022), one column at a time."""
    order = np.argsort(-np.diag(hessian), kind="stable") if act_order else np.arange(len(hessian))
    h, w, s = (a.astype(np.float64) for a in (hessian[order][:, order], weight[:, order], step[:, order]))
    h = h + damping * np.diag(h).mean() * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    out = np.empty_like(w)
    for j in range(w.shape[1]):
        out[:, j] = np.clip(np.rint(w[:, j] / s[:, j]), -8, 7) * s[:, j]
        w[:, j:] -= ((w[:, j] - out[:, j]) / upper[j, j])[:, None] * upper[j, j:]
    back = np.empty_like(out)
    back[:, order] = out
    return back


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("block_size", [1, 20, 128])
def test_the_recursion_of_the_paper(block_size: int, act_order: bool) -> None:
    weight, hessian = problem()
    granularity = Group(1, 32)
    step = granularity.expand(scales(weight, "int4", granularity)[0], weight.shape)
    expected = paper(weight, hessian, step, 0.01, act_order)
    found = gptq(weight, hessian, grid_for(weight), block_size, 0.01, act_order)
    assert np.mean(np.abs(found - expected) > 1e-5) < 0.01  # ties of float32 and float64
    losses = [float(loss(values.astype(np.float32) - weight, hessian).sum()) for values in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@pytest.mark.parametrize("drifts", [False, True])
@pytest.mark.parametrize("name", ["int4", "uint4", "fp8_e4m3"])
def test_steps_that_are_recorded_have_the_same_bits(name: str, drifts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU takes them, in places that many matrices come through (on a GPU: tests/torch_flow/test_gpu.py)."""

    def found(seed: int) -> torch.Tensor:
        weight, hessian = problem(seed)
        weight = weight[: 8 + 4 * (seed % 2)]
        drift = torch.from_numpy(np.triu(problem(seed + 9)[1], 1) / 10) if drifts else None
        grid = columns_of(
            torch.from_numpy(weight), Coding(FORMATS[name], Group(1, 32)), *scales(weight, name, Group(1, 32))
        )
        return round_columns(torch.from_numpy(weight), feedback_of(torch.from_numpy(hessian)), grid, 16, drift)

    expected, again = [found(seed) for seed in range(4)], []
    monkeypatch.setattr(replay, "can_record", lambda x: True)
    monkeypatch.setattr(replay.Recording, "again", lambda self, steps: again.append(1) or steps(self.places))
    assert all(torch.equal(found(seed), expected[seed]) for seed in range(4))
    assert not again
    with replay.recordings():
        assert all(torch.equal(found(seed), expected[seed]) for seed in range(4))
    assert len(again) == 4 * COLUMNS // 16 - 2  # two kinds, each taken once before


@pytest.mark.parametrize(
    "granularity", [Tensor(), Channel(0), Channel(1), Group(1, 32), Group(1, 40), Group(0, 8)], ids=str
)
@pytest.mark.parametrize("name", ["int4", "uint4", "int3", "fp4_e2m1", "fp8_e4m3"])
def test_values_lie_on_the_grid_and_beat_rounding(name: str, granularity: Granularity) -> None:
    weight, hessian = problem(1)
    scale, zero = scales(weight, name, granularity, symmetric=name != "uint4")
    grid = columns_of(weight, Coding(FORMATS[name], granularity), scale, zero)
    nearest = Coding(FORMATS[name], granularity).fake_quantize(weight, scale, zero)
    assert np.array_equal(grid.round(weight), nearest)
    tuned = gptq(weight, hessian, grid)
    assert np.array_equal(Coding(FORMATS[name], granularity).fake_quantize(tuned, scale, zero), tuned)
    assert loss(tuned - weight, hessian).sum() < 0.8 * loss(nearest - weight, hessian).sum()


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_even", "mxint8", "mxfp6_e2m3", "bfp16", "mx6", "mx9", "mxfp8_e4m3"])
def test_block_formats(name: str) -> None:
    weight, hessian = problem(2)
    format = FORMATS[name]
    tuned = gptq(weight, hessian, columns_of(weight, Coding(format, Group(-1, format.size))))
    assert np.array_equal(format.round(tuned), tuned)
    assert loss(tuned - weight, hessian).sum() < loss(format.round(weight) - weight, hessian).sum()


@pytest.mark.parametrize("act_order", [True, False])
def test_numpy_and_torch_agree(act_order: bool) -> None:
    weight, hessian = problem(3)
    found = gptq(weight, hessian, grid_for(weight), act_order=act_order)
    scale, zero = scales(weight, "int4", Group(1, 32))
    grid = columns_of(torch.tensor(weight), Coding(FORMATS["int4"], Group(1, 32)), scale, zero)
    other = gptq(torch.tensor(weight), torch.tensor(hessian), grid, act_order=act_order)
    assert np.mean(np.abs(other.numpy() - found) > 1e-6) < 0.01


def test_uncorrelated_inputs_are_rounded_to_nearest() -> None:
    weight, _ = problem(4)
    grid = grid_for(weight)
    assert np.array_equal(gptq(weight, np.diag(np.arange(1, COLUMNS + 1)).astype(np.float32), grid), grid.round(weight))


def test_inputs_that_were_always_zero_leave_their_columns() -> None:
    weight, hessian = problem(5)
    dead = [3, 50]
    hessian[dead], hessian[:, dead] = 0, 0
    grid = grid_for(weight)
    tuned = gptq(weight, hessian, grid)
    assert np.array_equal(tuned[:, dead], grid.round(weight)[:, dead])
    assert np.array_equal(gptq(weight, 0 * hessian, grid), grid.round(weight))


def test_refitted_groups_see_the_corrected_weights() -> None:
    """The weights handed to ``refit`` are those that the paper's recursion holds at that point."""
    weight, hessian = problem(6)
    grid, seen = grid_for(weight), []

    def refit(corrected: np.ndarray, start: int, stop: int) -> Columns:
        seen.append(corrected)
        return grid.take(slice(start, stop))

    tuned = round_columns(weight, feedback_of(hessian, act_order=False), grid, 32, refit=refit)
    assert np.array_equal(tuned, gptq(weight, hessian, grid, 32, act_order=False))
    h = hessian.astype(np.float64) + 0.01 * np.diag(hessian).mean() * np.eye(COLUMNS)
    error = (weight - tuned)[:, :32].astype(np.float64)
    best = weight[:, 32:] + error @ h[:32, 32:] @ np.linalg.inv(h[32:, 32:])  # least squares over all that is left
    assert np.allclose(seen[0], weight[:, :32])
    assert np.allclose(seen[1], best[:, :32], atol=1e-3)


def test_what_does_not_fit_is_refused() -> None:
    weight, hessian = problem()
    grid = grid_for(weight)
    with pytest.raises(DataError, match="does not fit"):
        gptq(weight, hessian[1:, 1:], grid)
    with pytest.raises(DataError, match="not finite"):
        gptq(weight, hessian * np.float32(np.nan), grid)
    with pytest.raises(ConfigError, match="block_size"):
        gptq(weight, hessian, grid, block_size=0)
    with pytest.raises(ConfigError, match="chance"):
        columns_of(weight, Coding(FORMATS["int4"], Tensor(), "stochastic"))


def test_a_singular_hessian_gets_more_damping() -> None:
    weight, _ = problem(7)
    x = np.random.default_rng(1).standard_normal((5, COLUMNS)).astype(np.float32)
    tuned = gptq(weight, x.T @ x, grid_for(weight), damping=0.0)
    assert loss(tuned - weight, x.T @ x).sum() < loss(grid_for(weight).round(weight) - weight, x.T @ x).sum()
