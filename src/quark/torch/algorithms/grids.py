"""The grid of a layer's weight, as its quantizer fixes it, for the algorithms that round column by column."""

from __future__ import annotations

from dataclasses import replace

import torch

from quark.algorithms.columns import Columns, columns_of
from quark.algorithms.gptq import Refit
from quark.errors import known
from quark.numerics.affine import Coding
from quark.numerics.granularity import Group
from quark.torch.fake_quantize import FakeQuantize, Parameters, Quantizer, parts


def grid_of(quantizer: Quantizer, weight: torch.Tensor) -> Columns:
    """The grid of the last stage of ``quantizer`` for a weight as it is stored (two-dimensional)."""
    *before, last = parts(quantizer)
    with torch.no_grad():
        for part in before:
            weight = part.quantized(weight)
        return grid_of_part(last, weight)


def grid_of_part(part: FakeQuantize, weight: torch.Tensor) -> Columns:
    """The grid of one stage."""
    return grid_under(
        part, weight, (part.scale, part.zero_point) if part.stage.calibrated else part.parameters_from(weight)
    )


def grid_under(part: FakeQuantize, weight: torch.Tensor, parameters: Parameters) -> Columns:
    """The grid of one stage under a scale and a zero point."""
    (scale, zero_point), stage, granularity = parameters, part.stage, part.granularity
    spec = stage.spec
    if not stage.real_zero:
        return columns_of(
            weight, Coding(stage.format, granularity, spec.rounding, spec.narrow_codes), scale, zero_point
        )
    lowest = int(stage.format.min)
    scale, zero = known(scale, "the scale of a weight"), known(zero_point, "its zero point")
    offset = granularity.expand((lowest - zero) * scale, tuple(weight.shape))
    grid = columns_of(weight, Coding(stage.format, granularity, spec.rounding), scale, None)
    return replace(grid, zero=lowest, offset=offset)


def refit_of(quantizer: Quantizer, transposed: bool) -> tuple[int, Refit] | None:
    """Group size, and the function that gives some columns of a changed weight new scales, in the quantizer too.

    None where scales are not static scales of groups of inputs: they do not depend on when a column is rounded.
    """
    *before, part = parts(quantizer)
    granularity = part.granularity
    inputs = 0 if transposed else 1
    if before or not part.stage.calibrated or not isinstance(granularity, Group) or granularity.axis % 2 != inputs:
        return None
    size = granularity.size

    def refit(weights: torch.Tensor, start: int, stop: int) -> Columns:
        stored = weights.T if transposed else weights
        parameters = part.parameters_from(stored)
        groups = slice(start // size, -(-stop // size))
        for whole, values in zip((part.scale, part.zero_point), parameters, strict=True):
            if whole is not None and values is not None:
                whole[(groups,) if transposed else (slice(None), groups)] = values
        grid = grid_under(part, stored, parameters)
        return grid.transposed if transposed else grid

    return size, refit
