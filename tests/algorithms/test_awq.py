"""AWQ's mathematics against loops, and NumPy against torch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from quark.algorithms import awq

torch = pytest.importorskip("torch")
RNG = np.random.default_rng(3)
WEIGHT = RNG.standard_normal((5, 20)).astype(np.float32)
WEIGHT[::2, 3] *= 8  # outliers: their groups are best clipped
ROWS = RNG.standard_normal((64, 20)).astype(np.float32) @ RNG.standard_normal((20, 20)).astype(np.float32)
HESSIAN = ROWS.T @ ROWS
SIZE = 8  # the last group has 4 columns


def coarse(weight: np.ndarray) -> np.ndarray:
    """Three levels a side, for each row and group."""
    out = np.empty_like(np.asarray(weight))
    for row, start in product(range(5), range(0, 20, SIZE)):
        part = np.asarray(weight)[row, start : start + SIZE]
        scale = np.abs(part).max() / 3
        out[row, start : start + SIZE] = np.clip(np.rint(part / scale), -3, 3) * scale
    return out


def test_clips_are_the_best_of_each_group_alone() -> None:
    """Written out: of ten clips, the one of least quadratic error under the group's own block of the Hessian."""
    steps = awq.best_clips(WEIGHT, coarse, HESSIAN, SIZE)
    assert steps is not None and steps.any() and steps.dtype == np.uint8
    wanted, values = np.zeros((5, 3), np.uint8), WEIGHT.copy()
    for row, (group, start) in product(range(5), enumerate(range(0, 20, SIZE))):
        part = slice(start, min(start + SIZE, 20))
        block, amax, errors = HESSIAN[part, part], np.abs(WEIGHT[row, part]).max(), []
        for step in range(10):
            trial = WEIGHT.copy()
            trial[row, part] = np.clip(trial[row, part], -amax * (1 - 0.05 * step), amax * (1 - 0.05 * step))
            error = coarse(trial)[row, part] - WEIGHT[row, part]
            errors.append(error @ block @ error)
        wanted[row, group] = int(np.argmin(errors))
        limit = amax * (1 - 0.05 * wanted[row, group])
        values[row, part] = np.clip(WEIGHT[row, part], -limit, limit)
    for row in range(5):  # a row whose whole error does not fall keeps its weights
        before, after = (e @ HESSIAN @ e for e in ((coarse(v) - WEIGHT)[row] for v in (WEIGHT, values)))
        wanted[row] *= after < before
    np.testing.assert_array_equal(steps, wanted)
    np.testing.assert_allclose(awq.clipped(WEIGHT, steps, SIZE)[wanted.any(1)], values[wanted.any(1)], rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 2, 5, 9])
def test_rows_are_clipped_alike_a_few_at_a_time(rows: int) -> None:
    seen: list[int] = []

    def counted(weight: np.ndarray) -> np.ndarray:
        seen.append(len(weight))
        level = np.abs(weight).max(1, keepdims=True) / 3
        return np.clip(np.rint(weight / level), -3, 3) * level

    few = awq.best_clips(WEIGHT, counted, HESSIAN, 20, 20 * rows)
    assert max(seen) == min(rows, 5)
    np.testing.assert_array_equal(few, awq.best_clips(WEIGHT, counted, HESSIAN, 20))
    assert few is not None and few.any()


@pytest.mark.parametrize("most", [None, 2 * 5])
def test_groups_are_clipped_alike_by_themselves(most: int | None) -> None:
    def alone(weight: np.ndarray, limits: np.ndarray) -> Iterator[np.ndarray]:
        for limit in limits:
            scale = np.minimum(np.abs(weight).max(1, keepdims=True), limit) / 3
            yield np.clip(np.rint(np.clip(weight, -limit, limit) / scale), -3, 3) * scale

    def rounded(weight: np.ndarray) -> np.ndarray:
        parts = [weight[:, k : k + 5] for k in range(0, 20, 5)]
        return np.concatenate([next(alone(part, np.abs(part).max((1,), keepdims=True)[None])) for part in parts], 1)

    together = awq.best_clips(WEIGHT, rounded, HESSIAN, 5)
    assert together is not None and together.any()
    np.testing.assert_array_equal(awq.best_clips(WEIGHT, rounded, HESSIAN, 5, most, alone), together)


def test_nothing_is_clipped_where_nothing_is_gained() -> None:
    assert awq.best_clips(WEIGHT, lambda weight: weight, HESSIAN, SIZE) is None


def test_numpy_and_torch_agree() -> None:
    rounded = torch.from_numpy(coarse(WEIGHT))
    steps = awq.best_clips(torch.from_numpy(WEIGHT), lambda w: torch.from_numpy(coarse(w.numpy())), *map(
        torch.from_numpy, [HESSIAN]), SIZE)  # fmt: skip
    np.testing.assert_array_equal(steps.numpy(), awq.best_clips(WEIGHT, coarse, HESSIAN, SIZE))
    blocks = awq.diagonal_blocks(torch.from_numpy(HESSIAN), SIZE)
    found = awq.group_losses(rounded - torch.from_numpy(WEIGHT), blocks, SIZE)
    wanted = awq.group_losses(coarse(WEIGHT) - WEIGHT, awq.diagonal_blocks(HESSIAN, SIZE), SIZE)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4)
    amax, ranges = np.abs(ROWS).mean(0), np.abs(WEIGHT).max(0)
    s = awq.scale_of(torch.from_numpy(amax), torch.from_numpy(ranges), (0.6, 0.25))
    np.testing.assert_allclose(s.numpy(), awq.scale_of(amax, ranges, (0.6, 0.25)), rtol=1e-6)


def test_scales_are_the_quotient_of_powers_balanced_around_one() -> None:
    s = awq.scale_of(np.array([1.0, 16.0, 0.0]), np.array([4.0, 1.0, 1.0]), (0.5, 0.5))
    raw = np.array([1 / 2, 4.0, np.sqrt(1e-4)])
    np.testing.assert_allclose(s, raw / np.sqrt(raw.max() * raw.min()))
    assert s.max() * s.min() == pytest.approx(1)


@pytest.mark.parametrize("target", [(0.5, 0.1), (0.0, 0.0), (1.0, 0.5), (0.3, 0.4)])
def test_exponents_are_the_best_of_the_grid_then_of_its_neighbours(target: tuple[float, float]) -> None:
    asked = []

    def errors(pairs: list[tuple[float, float]]) -> list[float]:
        asked.extend(pairs)
        return [(a - target[0]) ** 2 + (b - target[1]) ** 2 for a, b in pairs]

    found = awq.best_exponents(errors)
    coarsely = min(product(*awq.GRID), key=lambda pair: (pair[0] - target[0]) ** 2 + (pair[1] - target[1]) ** 2)
    near = [
        (a, b)
        for a, b in product(*([x - s, x, x + s] for x, s in zip(coarsely, (0.1, 0.125), strict=True)))
        if a >= 0 and b >= 0
    ]
    best = min(near, key=lambda pair: (pair[0] - target[0]) ** 2 + (pair[1] - target[1]) ** 2)
    assert found == pytest.approx(best) and len(asked) == len(set(asked)) <= 18 + 9
    assert awq.best_exponents(lambda pairs: [(a - 0.5) ** 2 for a, _ in pairs], ((0.0, 1.0), (0.25,)))[1] == 0.25


@pytest.mark.parametrize(("name", "clips"), [("q_proj", False), ("Wqkv", False), ("v_proj", True), ("down_proj", True)])
def test_queries_and_keys_are_not_clipped(name: str, clips: bool) -> None:
    assert awq.is_clipped(name) == clips
