"""AWQ for the torch flow: scales at every place of a model, then clips of the layers that read it (``algorithms/awq``).

Both searches run on statistics collected once; the model is not run again.
"""

from __future__ import annotations

from functools import partial

import torch

from quark.algorithms.awq import GRID, best_clips, clipped, is_clipped
from quark.errors import known
from quark.numerics.granularity import Channel, Group
from quark.torch.algorithms.context import ModelContext, matrix, new_quantizer, set_matrix
from quark.torch.algorithms.judge import judge_of, row_by_row
from quark.torch.algorithms.rows import by_scale
from quark.torch.algorithms.scaling import Finisher, PlaceInputs, ReadPlace, scale_places
from quark.torch.algorithms.smooth import Family, best_of_families, weight_ranges
from quark.torch.algorithms.trial import rounding_of
from quark.torch.config.algorithms import AWQConfig
from quark.torch.fake_quantize import parts
from quark.torch.matching import Match

PIECES = {"cpu": 1 << 18}  # values of a weight that are clipped and rounded together, by the kind of device
PIECE = 1 << 24  # on any other, where each call costs more than its arithmetic


def run_awq(context: ModelContext, config: AWQConfig) -> None:
    """Scales at every place, then clips of the layers that read it."""

    def family(one: ReadPlace) -> Family:
        items, inputs = one.items, one.inputs
        return Family(judge_of(items, inputs), inputs.mean, weight_ranges(items), GRID)

    choose = partial(best_of_families, family)
    clips = Finisher(clips_of, clip)
    scale_places(context, config.scaling_layers, config.model_decoder_layers, choose, clips, squares=True)


def clips_of(
    context: ModelContext, items: list[Match], inputs: PlaceInputs, s: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """How the weights that read one place, which have its scales, are best clipped, by the names of their layers."""
    hessian = inputs.hessian
    if hessian is None:
        return {}
    if s is not None:
        hessian = hessian / s / s[:, None]
    names = {item.layer.name: item for item in items if is_clipped(item.layer.name.rsplit(".", 1)[-1])}
    found = {name: steps_of(item, hessian) for name, item in names.items()}
    return {name: steps for name, steps in found.items() if steps is not None}


def clip(context: ModelContext, item: Match, steps: torch.Tensor) -> None:
    """Clip each group of a weight by ``steps`` [rows, groups]."""
    weight = matrix(item.layer.module, item.layer.kind)
    set_matrix(context, item, clipped(weight, steps, group_size(item, weight) or weight.shape[1]))


def steps_of(item: Match, hessian: torch.Tensor) -> torch.Tensor | None:
    """How far each group of a weight is best clipped; None where clips mean nothing, or nothing is gained."""
    weight = matrix(item.layer.module, item.layer.kind)
    size = group_size(item, weight)
    if size is None:
        return None
    most = PIECES.get(weight.device.type, PIECE) if row_by_row(item) else None
    rounding = by_scale(item) if row_by_row(item) and weight.shape[1] % size == 0 else None
    return best_clips(weight, rounding_of(item), hessian, size, most, None if rounding is None else rounding.limited)


def group_size(item: Match, weight: torch.Tensor) -> int | None:
    """Columns that share a scale in a row; None where rows share scales, or the format finds them itself."""
    part, *_ = parts(known(new_quantizer(item, "weight"), item.layer.name))
    if not part.stage.calibrated or len(item.stages["weight"]) > 1:
        return None
    written = item.written(item.stages["weight"][0])
    if isinstance(written, Group) and written.axis % 2 == 1:
        return min(written.size, weight.shape[1])
    return weight.shape[1] if isinstance(written, Channel) and written.axis % 2 == 0 else None
