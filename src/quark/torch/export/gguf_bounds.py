"""How far a number may come back from a GGUF file: what rounding to its type allows, number by number.

A block of a type with offset codes rounds by half of its step, range / codes; one with signed codes by a step, for the
largest magnitude takes the lowest code, and what lies opposite is cut by one. float16 rounds steps and minima too, by
2^-11 of them or 2^-25; K-quants round the steps of their sub-blocks to multiples of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quark.torch.export.ggml_blocks import BLOCK, SUPER

HALF, SMALL = 2.0**-11, 2.0**-25  # float16: relative, and where it has no exponents left
SLACK = 1e-3  # of the bound, for float32 arithmetic
FLOATS = {"F32": (0.0, 0.0), "F16": (HALF, SMALL), "BF16": (2.0**-8, 1e-38)}


@dataclass(frozen=True)
class BlockGrid:
    """The codes of a type.

    Attributes:
        levels: the range of a block over its step: of offset codes the largest; of signed ones that of magnitudes.
        signed: codes around 0.
        size: numbers under one step.
        steps: of a K-quant, the largest multiple that a step is; 0: steps are float16 themselves.
    """

    levels: int
    signed: bool
    size: int = BLOCK
    steps: int = 0


GRIDS = {
    "Q4_0": BlockGrid(8, True), "Q5_0": BlockGrid(16, True), "Q8_0": BlockGrid(127, True),
    "Q4_1": BlockGrid(15, False), "Q5_1": BlockGrid(31, False),
    "Q2_K": BlockGrid(3, False, 16, 15), "Q4_K": BlockGrid(15, False, 32, 63), "Q5_K": BlockGrid(31, False, 32, 63),
    "Q3_K": BlockGrid(4, True, 16, 32), "Q6_K": BlockGrid(32, True, 16, 128),
}  # fmt: skip


def allowed(kind: str, values: np.ndarray) -> np.ndarray:
    """The largest difference of every number of ``values`` [.., n] in a type that they are rounded to."""
    if kind in FLOATS:
        relative, least = FLOATS[kind]
        return np.abs(values) * np.float32(relative * (1 + SLACK)) + np.float32(least)
    grid = GRIDS[kind]
    blocks = values.reshape(-1, grid.size)
    if grid.signed:
        low, span = np.zeros(len(blocks), np.float32), np.abs(blocks).max(-1)
    else:  # K-quants have no minimum above 0
        low = np.minimum(blocks.min(-1), 0) if grid.steps else blocks.min(-1)
        span = (np.maximum(blocks.max(-1), 0) if grid.steps else blocks.max(-1)) - low
    step = span / grid.levels
    bound = step * (1.0 if grid.signed and kind != "Q8_0" else 0.5) + of_steps(grid, step) + of_minima(grid, low)
    return np.broadcast_to((bound * (1 + SLACK))[:, None], blocks.shape).reshape(values.shape)


def of_steps(grid: BlockGrid, step: np.ndarray) -> np.ndarray:
    """What rounded steps take from the largest code, and add to half of themselves."""
    if not grid.steps:
        return (grid.levels + 1) * (step * HALF + SMALL)
    unit = largest(step, grid) / grid.steps
    moved = unit * (1.0 if grid.signed else 0.5)  # a signed step that lies opposite the largest is cut by one
    return (grid.levels + 1) * (moved + step * HALF + grid.steps * SMALL)


def of_minima(grid: BlockGrid, low: np.ndarray) -> np.ndarray:
    """What rounded minima are off."""
    if not grid.steps or grid.signed:
        return np.abs(low) * HALF + SMALL
    return largest(-low, grid) * (0.5 / grid.steps + HALF) + grid.steps * SMALL


def largest(parts: np.ndarray, grid: BlockGrid) -> np.ndarray:
    """Of each 256 numbers the largest of their sub-blocks, once for each of these."""
    together = parts.reshape(-1, SUPER // grid.size)
    return np.repeat(together.max(-1), together.shape[1])
