"""GPTQ, GPTAQ, Qronos and registered algorithms for the torch flow: on every linear layer of the decoder blocks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from quark.algorithms.gptq import feedback_of, round_columns
from quark.algorithms.rounders import rounder_of
from quark.torch.algorithms.context import ModelContext
from quark.torch.algorithms.grids import refit_of
from quark.torch.algorithms.inputs import Sums
from quark.torch.algorithms.tune import RoundingTask, tune
from quark.torch.config.algorithms import GPTQConfig

log = logging.getLogger(__name__)


def run_columns(context: ModelContext, config: Any) -> None:
    """Tune the weights of ``context.model`` by the algorithm of ``config``, whose row says what it needs."""
    row = rounder_of(config)

    def rounder(sums: Sums) -> Callable[[RoundingTask], torch.Tensor]:
        rounding = row.prepare(sums, config)
        return lambda task: rounding(task.weight, task.grid)

    inside, path = getattr(config, "inside_layer_modules", []), getattr(config, "model_decoder_layers", "")
    told(config.name, tune(context, rounder, inside, path, row.paired))


def run_gptq(context: ModelContext, config: GPTQConfig) -> None:
    """``run_columns``; without ``static_groups``, groups get new scales when their turn comes."""
    if config.static_groups:
        return run_columns(context, config)

    def rounder(sums: Sums) -> Callable[[RoundingTask], torch.Tensor]:
        feedback = feedback_of(sums.hessian, config.damp_percent, config.desc_act)

        def rounding(task: RoundingTask) -> torch.Tensor:
            size, refit = refit_of(task.quantizer, task.transposed) or (config.block_size, None)
            return round_columns(task.weight, feedback, task.grid, size, refit=refit)

        return rounding

    return told(config.name, tune(context, rounder, config.inside_layer_modules, config.model_decoder_layers))


def told(name: str, moved: bool) -> None:
    """Say where an algorithm had nothing to do, as behind another one that rounds."""
    if not moved:
        log.warning("%s changes no weight: as they are, and rounded to nearest, they lose no more on the samples", name)
