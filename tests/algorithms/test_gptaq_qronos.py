"""GPTAQ against the recursion of its paper, Qronos against least squares, both against GPTQ on their objective."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from quark.algorithms.columns import Columns, columns_of
from quark.algorithms.gptaq import asymmetric_feedback
from quark.algorithms.gptq import gptq, round_columns
from quark.algorithms.qronos import largest_eigenvalue, qronos
from quark.errors import DataError
from quark.numerics.affine import Coding, Grid
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import Group

ROWS, COLUMNS = 16, 64


def problem(noise: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A weight, the float inputs and the inputs of the quantized model, [columns, n]."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((COLUMNS, COLUMNS)) / 5 + np.eye(COLUMNS)) @ rng.standard_normal((COLUMNS, 400))
    mix = np.eye(COLUMNS) + noise * rng.standard_normal((COLUMNS, COLUMNS)) / 8
    weight = rng.standard_normal((ROWS, COLUMNS))
    return tuple(a.astype(np.float32) for a in (weight, x, mix @ x))  # type: ignore[return-value]


def grid_for(weight: np.ndarray) -> tuple[Columns, np.ndarray]:
    granularity = Group(1, 16)
    tiles = granularity.tile(weight)
    scale, zero = Grid(FORMATS["int4"], narrow=False).parameters(tiles.min(-1), tiles.max(-1))
    return columns_of(weight, Coding(FORMATS["int4"], granularity), scale, zero), granularity.expand(
        scale, weight.shape
    )


def error(values: np.ndarray, weight: np.ndarray, x: np.ndarray, other: np.ndarray) -> float:
    return float(np.square(weight @ x - values @ other).sum())


def gptaq_paper(
    weight: np.ndarray, h: np.ndarray, d: np.ndarray, step: np.ndarray, alpha: float, damping: float
) -> np.ndarray:
    """The published loop, column by column in the given order, float64."""
    h = h + damping * np.diag(h).mean() * np.eye(len(h))
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    p = alpha * np.triu(d @ upper.T, 1) @ upper
    w, out = weight.astype(np.float64), np.empty(weight.shape)
    for j in range(w.shape[1]):
        column = w[:, j].copy()
        out[:, j] = np.clip(np.rint(column / step[:, j]), -8, 7) * step[:, j]
        w[:, j:] -= np.outer((column - out[:, j]) / upper[j, j], upper[j, j:]) - np.outer(column, p[j, j:])
    return out


@pytest.mark.parametrize("block_size", [1, 24, 128])
@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_gptaq_is_the_published_loop(alpha: float, block_size: int) -> None:
    weight, x, other = problem()
    grid, step = grid_for(weight)
    h, g = other @ other.T, x @ other.T
    feedback, drift = asymmetric_feedback(h, g, alpha, 0.01, act_order=False)
    found = round_columns(weight, feedback, grid, block_size, drift)
    expected = gptaq_paper(weight, h.astype(np.float64), (g - h).astype(np.float64), step, alpha, 0.01)
    assert np.mean(np.abs(found - expected) > 1e-4) < 0.02
    assert error(found, weight, x, other) == pytest.approx(error(expected, weight, x, other), rel=0.02)


def test_gptaq_without_mismatch_is_gptq() -> None:
    weight, x, _ = problem()
    grid, _ = grid_for(weight)
    feedback, drift = asymmetric_feedback(x @ x.T, x @ x.T)
    assert np.array_equal(round_columns(weight, feedback, grid, 128, drift), gptq(weight, x @ x.T, grid))


def test_both_beat_gptq_on_mismatched_inputs() -> None:
    weight, x, other = problem()
    grid, _ = grid_for(weight)
    h, g = other @ other.T, x @ other.T
    feedback, drift = asymmetric_feedback(h, g, 1.0)
    plain = error(gptq(weight, h, grid), weight, x, other)
    assert error(round_columns(weight, feedback, grid, 128, drift), weight, x, other) < 0.8 * plain
    assert error(qronos(weight, (h, g), grid), weight, x, other) < 0.7 * plain


def test_qronos_on_a_fine_grid_is_least_squares() -> None:
    weight, x, other = problem()
    fine = Columns(FORMATS["int16"], np.full_like(weight, 1e-3))  # type: ignore[arg-type]
    found = qronos(weight, (other @ other.T, x @ other.T), fine, alpha=1e-7)
    assert error(found, weight, x, other) < 1e-3 * error(weight, weight, x, other)  # 0 is possible


def test_numpy_and_torch_agree() -> None:
    weight, x, other = problem()
    grid, step = grid_for(weight)
    h, g = other @ other.T, x @ other.T
    found = qronos(weight, (h, g), grid)
    t_grid = Columns(FORMATS["int4"], torch.tensor(np.array(step)))  # type: ignore[arg-type]
    again = qronos(torch.tensor(weight), (torch.tensor(h), torch.tensor(g)), t_grid).numpy()
    assert np.mean(np.abs(found - again) > 1e-4) < 0.02


def test_largest_eigenvalue() -> None:
    _, x, _ = problem()
    assert largest_eigenvalue(x @ x.T) == pytest.approx(np.linalg.eigvalsh(x @ x.T)[-1], rel=0.02)
    assert largest_eigenvalue(np.zeros((3, 3), np.float32)) == 0


FORMS = {"one": (1, 1), "per row": (ROWS, 1), "per column": (1, COLUMNS)}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_grid_is_what_its_arrays_broadcast_to(form: tuple[int, int], library: str) -> None:
    rng, (weight, x, other) = np.random.default_rng(2), problem()
    parts = (np.full(form, 0.4) * rng.uniform(0.8, 1.2, form), rng.integers(-2, 3, form), rng.uniform(-0.1, 0.1, form))
    step, zero, offset = (np.asarray(part, np.float32) for part in parts)
    full = [np.array(np.broadcast_to(part, weight.shape)) for part in (step, zero, offset)]
    h, g = other @ other.T, x @ other.T
    if library == "torch":
        step, zero, offset, h, g, weight, *full = map(torch.from_numpy, (step, zero, offset, h, g, weight, *full))
    kind = FORMATS["int4"]
    small, large = Columns(kind, step, zero, offset), Columns(kind, *full)  # type: ignore[arg-type]
    for run in (partial(gptq, hessian=h), partial(qronos, sums=(h, g))):
        np.testing.assert_array_equal(np.asarray(run(weight, grid=small)), np.asarray(run(weight, grid=large)))


def test_a_grid_that_does_not_fit_is_refused() -> None:
    weight, x, _ = problem()
    with pytest.raises(DataError, match=r"steps of shape \(3, 1\) does not fit \(16, 64\)"):
        gptq(weight, x @ x.T, Columns(FORMATS["int4"], np.ones((3, 1), np.float32)))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 2, 5, 64, 200])
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e25])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("rank", [1, 3, 300])
def test_the_largest_eigenvalue_is_that_of_float64(size: int, factor: float, centred: bool, rank: int) -> None:
    x = np.random.default_rng(size).standard_normal((size, rank))
    x -= x.mean(0) if centred and size > 1 else 0  # the vector of ones is then an eigenvector of eigenvalue 0
    matrix = (x @ x.T * factor).astype(np.float32)
    exact = float(np.linalg.eigvalsh(matrix.astype(np.float64))[-1])
    for one in (matrix, torch.from_numpy(matrix)):
        assert largest_eigenvalue(one) == pytest.approx(exact, rel=0.05)


def test_a_hessian_of_nothing_has_the_eigenvalue_zero() -> None:
    assert largest_eigenvalue(np.zeros((4, 4), np.float32)) == 0.0
