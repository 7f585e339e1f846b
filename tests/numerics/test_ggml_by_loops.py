"""What blocks of GGML hold, against the same search written as loops over sub-blocks in float64.

The loops know nothing of arrays of blocks: least squares come from ``numpy.linalg.lstsq``, errors from sums. Quotients
alone are of float32: the largest value of a block lies just between two codes under half of the steps that are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from quark.numerics import ggml_fit
from quark.numerics.ggml import GGML, Ggml, value_of

TRIED = (-1.0, -0.5, 0.0, 0.5, 1.0)
SIGNED = ("q3_k", "q6_k")
Sub = tuple[int, int, np.ndarray]  # multiples of the scale and of the minimum, codes


def error(x: np.ndarray, values: np.ndarray, w: np.ndarray) -> float:
    return float((w * (x - values) ** 2).sum())


def nearest(x: np.ndarray, step: float, first: int, last: int) -> np.ndarray:
    codes = np.rint(x.astype(np.float32) / np.float32(step)) if step else np.zeros_like(x)
    return np.clip(codes, first, last).astype(float)


def half(value: float) -> float:
    return float(np.float16(value))


def outward(value: float) -> float:
    """The float16 beside a number that is no closer to zero."""
    near = np.float16(value)
    return float(near if abs(float(near)) >= abs(value) else np.nextafter(near, np.float16(np.copysign(np.inf, value))))


def least_squares(columns: Iterable[np.ndarray], x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Factors of columns under which their sum comes nearest to ``x``."""
    root = np.sqrt(w)
    return np.linalg.lstsq(np.stack([one * root for one in columns], 1), x * root, rcond=None)[0]


def signed_step(x: np.ndarray, w: np.ndarray, middle: int) -> float:
    top = x[np.abs(x).argmax()]
    found = []
    for more in TRIED:
        codes = nearest(x, -top / (middle + more), -middle, middle - 1)
        step = float(least_squares([codes], x, w)[0]) if codes.any() else 0.0
        found.append((error(x, step * codes, w), step))
    return min(found)[1]


def affine_line(x: np.ndarray, codes: np.ndarray, w: np.ndarray, below: bool) -> tuple[float, float]:
    """Slope (0 or more) and intercept (0 or less where ``below``)."""
    level = float((w * x).sum() / w.sum())
    if np.ptp(codes) == 0:
        slope, low = 0.0, level
    else:
        slope, low = map(float, least_squares([codes, np.ones_like(x)], x, w))
        slope, low = (slope, low) if slope > 0 else (0.0, level)
    if below and low > 0:
        return (max(float(least_squares([codes], x, w)[0]), 0.0) if codes.any() else 0.0), 0.0
    return slope, low


def affine_step(x: np.ndarray, w: np.ndarray, largest: int, below: bool) -> tuple[float, float]:
    low, high = (min(x.min(), 0.0), max(x.max(), 0.0)) if below else (x.min(), x.max())
    found = []
    for more in TRIED:
        pair = (high - low) / (largest + more), low
        for _ in range(2):
            codes = nearest(x - pair[1], pair[0], 0, largest)
            pair = affine_line(x, codes, w, below)
            found.append((error(x, codes * pair[0] + pair[1], w), *pair))
    return min(found)[1:]


def drawn(seed: int, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((count, size)) * 10.0 ** draw.uniform(-2, 2, (count, 1))
    x += draw.choice([0, 0, 3, -3], (count, 1)) * np.abs(x).max(1, keepdims=True)
    w = draw.lognormal(0, 1, (count, size))
    return x.astype(np.float32), w.astype(np.float32)


@pytest.mark.parametrize("middle", [4, 8, 16, 32])
def test_signed_steps_explain_most(middle: int) -> None:
    x, w = drawn(middle, 64, 32)
    found = ggml_fit.fit_signed(x, w, middle)
    expected = [signed_step(*pair, middle) for pair in zip(x.astype(float), w.astype(float), strict=True)]
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("largest", [3, 15, 31])
def test_steps_above_a_minimum_lose_least(largest: int, below: bool) -> None:
    x, w = drawn(largest, 64, 32)
    steps, lows = ggml_fit.fit_affine(x, w, largest, below)
    for one, weight, step, low in zip(x.astype(float), w.astype(float), steps, lows, strict=True):
        expected = affine_step(one, weight, largest, below)
        scale = np.abs(one).max()
        assert abs(step - expected[0]) <= 1e-4 * scale and abs(low - expected[1]) <= 1e-4 * scale


def searched(x: np.ndarray, w: np.ndarray, start: Sub, tries: Callable[[Sub, int], list[Sub]], value: Callable) -> Sub:
    """The best of what is tried around a sub-block's multiples, each from the best so far."""
    best = start
    for more in (0, -1, 1):
        for one in tries(best, more):
            best = one if error(x, value(one), w) < error(x, value(best), w) else best
    return best


def signed_block(row: Ggml, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Values of one block whose sub-blocks are ``x`` [k, n], all multiples of one scale."""
    steps = np.array([signed_step(a, b, row.largest) for a, b in zip(x, w, strict=True)])
    d = outward(-steps[np.abs(steps).argmax()] / row.units)

    def codes(k: int, s: int) -> np.ndarray:
        return nearest(x[k], d * s, -row.largest, row.largest - 1)

    units = []
    for k in range(len(x)):
        s = int(nearest(steps[k : k + 1], d, -row.units, row.units - 1)[0])
        start = s, 0, codes(k, s)

        def tries(best: Sub, more: int, k: int = k) -> list[Sub]:
            one = int(np.clip(best[0] + more, -row.units, row.units - 1))
            return [(one, 0, codes(k, one))]

        found = searched(x[k], w[k], start, tries, lambda one: one[2] * one[0] * d)
        units.append(found)
    values = np.stack([s * d * q for s, _, q in units])
    whole = np.stack([s * q for s, _, q in units])
    again = half(float((w * x * whole).sum() / (w * whole * whole).sum())) if whole.any() else 0.0
    other = np.stack([again * s * nearest(x[k], again * s, -row.largest, row.largest - 1) for k, (s, _, _) in
                      enumerate(units)])  # fmt: skip
    return other if error(x, other, w) < error(x, values, w) else values


def affine_block(row: Ggml, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Values of one block whose sub-blocks are ``x`` [k, n], scales and minima multiples of two numbers."""
    pairs = np.array([affine_step(a, b, row.largest, True) for a, b in zip(x, w, strict=True)])
    d, dmin = outward(pairs[:, 0].max() / row.units), outward(-pairs[:, 1].min() / row.units)

    def multiple(value: float, of: float) -> int:
        return int(nearest(np.array([value]), of, 0, row.units)[0])

    def coded(k: int, s: int, m: int, d: float = d, dmin: float = dmin) -> Sub:
        return s, m, nearest(x[k] + m * dmin, d * s, 0, row.largest)

    found = []
    for k in range(len(x)):
        start = coded(k, multiple(pairs[k, 0], d), multiple(-pairs[k, 1], dmin))

        def tries(best: Sub, more: int, k: int = k) -> list[Sub]:
            one = coded(k, int(np.clip(best[0] + more, 0, row.units)), best[1])
            off = float((w[k] * (one[2] * one[0] * d - x[k])).sum() / w[k].sum())
            return [one, coded(k, one[0], multiple(off, dmin))]

        found.append(searched(x[k], w[k], start, tries, lambda one: one[2] * one[0] * d - one[1] * dmin))
    values = np.stack([s * d * q - m * dmin for s, m, q in found])
    a = np.stack([s * q for s, _, q in found]).ravel()
    b = np.repeat([-m for _, m, _ in found], x.shape[1]).astype(float)
    both = least_squares([a, b], x.ravel(), w.ravel())
    if not b.any():
        both = np.array([least_squares([a], x.ravel(), w.ravel())[0], dmin])
    elif both[0] <= 0 or both[1] < 0:
        return values
    new, low = map(half, both)
    other = np.stack([s * new * coded(k, s, m, new, low)[2] - m * low for k, (s, m, _) in enumerate(found)])
    return other if error(x, other, w) < error(x, values, w) else values


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", [name for name, row in GGML.items() if row.units > 1])
def test_blocks_of_multiples_lose_what_the_loops_lose(name: str, weighted: bool) -> None:
    row = GGML[name]
    draw = np.random.default_rng(len(name) + weighted)
    x = (draw.standard_normal((24, 256)) * np.repeat(10.0 ** draw.uniform(-1, 1, (24, 8)), 32, 1)).astype(np.float32)
    x[-8:] = np.abs(x[-8:]) + 1
    x[-4:] *= -1
    w = draw.lognormal(0, 1, x.shape).astype(np.float32) if weighted else np.ones_like(x)
    parts = [value_of(one).reshape(-1, 256) for one in row.fields(x, w)]
    block = signed_block if name in SIGNED else affine_block
    ratios = []
    for one, weight, values in zip(x.astype(float), w.astype(float), np.concatenate(parts), strict=True):
        expected = block(row, *(side.reshape(-1, row.sub) for side in (one, weight))).ravel()
        ratios.append(error(one, values, weight) / error(one, expected, weight))
    same = np.isclose(ratios, 1, rtol=1e-4)  # others have two multiples, or two values, that come as near
    assert same.mean() > 0.75 and np.isclose(ratios, 1, rtol=0.04).all(), ratios


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_plain_blocks_lose_what_the_loops_lose(name: str) -> None:
    row = GGML[name]
    x, w = drawn(5, 40, 32)
    (found,) = row.fields(x, w)
    for one, weight, values in zip(x.astype(float), w.astype(float), value_of(found)[:, 0], strict=True):
        if name == "q8_0":
            step = half(np.float32(np.abs(one).max()) / np.float32(127))
            expected = step * nearest(one, step, -127, 127)
        elif row.signed:
            step = half(signed_step(one, weight, row.largest))
            expected = step * nearest(one, step, -row.largest, row.largest - 1)
        else:
            step, low = map(half, affine_step(one, weight, row.largest, False))
            expected = step * nearest(one - low, step, 0, row.largest) + low
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=2e-3 * np.abs(one).max())
        assert error(one, values, weight) == pytest.approx(error(one, expected, weight), rel=1e-2)


def test_what_is_divided_by_zero_is_zero() -> None:
    x, by = np.array([[3.0, -2.0], [1.0, 0.0]], np.float32), np.array([[2.0], [0.0]], np.float32)
    np.testing.assert_array_equal(ggml_fit.divided(x, by), [[1.5, -1.0], [0.0, 0.0]])
    np.testing.assert_array_equal(ggml_fit.codes_of(x, by, -8, 7), [[2, -1], [0, 0]])
