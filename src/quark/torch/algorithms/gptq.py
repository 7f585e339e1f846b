"""GPTQ for the torch flow: ``quark.algorithms.gptq`` on every linear layer of the decoder blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quark.algorithms.gptq import feedback_of, round_columns
from quark.torch.algorithms.context import Context
from quark.torch.algorithms.grids import refit_of
from quark.torch.algorithms.inputs import Sums
from quark.torch.algorithms.tune import Job, tune
from quark.torch.config.algorithms import GPTQConfig


def run_gptq(context: Context, config: GPTQConfig) -> None:
    """Tune the weights of ``context.model``."""

    def rounder(sums: Sums) -> Callable[[Job], torch.Tensor]:
        feedback = feedback_of(sums.hessian, config.damp_percent, config.desc_act)

        def rounding(job: Job) -> torch.Tensor:
            groups = None if config.static_groups else refit_of(job.quantizer, job.transposed)
            size, refit = groups or (config.block_size, None)
            return round_columns(job.weight, feedback, job.grid, size, refit=refit)

        return rounding

    tune(context, rounder, config.inside_layer_modules, config.model_decoder_layers)
