"""How far numbers may come back from a GGUF file: what rounding to its type allows, block by block.

A block of a type with offset codes rounds by half of its step, range / codes; one with signed codes by a step, for the
largest magnitude takes the lowest code, and what lies opposite is cut by one. float16 rounds steps and minima too, by
2^-11 of them or 2^-25; K-quants round the steps of their sub-blocks to multiples of one. The codes that are written
have the least squares, so the mean square of a block is at most that of plain rounding; single numbers may be off more.
"""

from __future__ import annotations

import numpy as np

from quark.numerics.ggml import GGML, Ggml

HALF, SMALL = 2.0**-11, 2.0**-25  # float16: relative, and where it has no exponents left
SLACK = 1e-3  # of the bound, for float32 arithmetic
FLOATS = {"F32": (0.0, 0.0), "F16": (HALF, SMALL), "BF16": (2.0**-8, 1e-38)}
GRIDS = {row.kind: row for row in GGML.values()}


def beyond(kind: str, values: np.ndarray, apart: np.ndarray) -> int:
    """How many of ``values`` [.., n] are ``apart`` from what a file has by more than its type may round.

    Of a type of blocks: how many lie in sub-blocks whose root of the mean square is.
    """
    if kind in FLOATS:
        relative, least = FLOATS[kind]
        return int((np.abs(apart) > np.abs(values) * np.float32(relative * (1 + SLACK)) + np.float32(least)).sum())
    row = GRIDS[kind]
    apart = apart.reshape(-1, row.sub)
    means = np.sqrt(np.einsum("ij,ij->i", apart, apart) / np.float32(row.sub))
    return int((means > allowed(row, values.reshape(-1, row.sub))).sum()) * row.sub


def allowed(row: Ggml, blocks: np.ndarray) -> np.ndarray:
    """The largest root of the mean square of what sub-blocks [n, numbers] may be off."""
    lanes = np.ascontiguousarray(blocks.T)  # along long rows numpy finds the largest in half of the time
    least, most = lanes.min(0), lanes.max(0)
    if row.signed:
        low, span = np.zeros(len(blocks), np.float32), np.maximum(-least, most)
    else:  # K-quants have no minimum above 0
        low = np.minimum(least, 0) if row.units > 1 else least
        span = (np.maximum(most, 0) if row.units > 1 else most) - low
    step = span / row.largest
    bound = step * (1.0 if row.signed and row.kind != "Q8_0" else 0.5) + of_steps(row, step) + of_minima(row, low)
    return np.asarray(bound * (1 + SLACK))


def of_steps(row: Ggml, step: np.ndarray) -> np.ndarray:
    """What rounded steps take from the largest code, and add to half of themselves."""
    if row.units == 1:
        return np.asarray((row.largest + 1) * (step * HALF + SMALL))
    unit = largest(step, row) / row.units
    moved = unit * (1.0 if row.signed else 0.5)  # a signed step that lies opposite the largest is cut by one
    return np.asarray((row.largest + 1) * (moved + step * HALF + row.units * SMALL))


def of_minima(row: Ggml, low: np.ndarray) -> np.ndarray:
    """What rounded minima are off."""
    if row.units == 1 or row.signed:
        return np.asarray(np.abs(low) * HALF + SMALL)
    return np.asarray(largest(-low, row) * (0.5 / row.units + HALF) + row.units * SMALL)


def largest(parts: np.ndarray, row: Ggml) -> np.ndarray:
    """Of the sub-blocks of each block the largest, once for each of these."""
    together = parts.reshape(-1, row.size // row.sub)
    return np.repeat(together.max(-1), together.shape[1])
