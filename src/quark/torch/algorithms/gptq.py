"""GPTQ, GPTAQ and Qronos for the torch flow: on every linear layer of the decoder blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quark.algorithms.gptaq import asymmetric_feedback
from quark.algorithms.gptq import feedback_of, round_columns
from quark.algorithms.qronos import qronos
from quark.torch.algorithms.context import ModelContext
from quark.torch.algorithms.grids import refit_of
from quark.torch.algorithms.inputs import Sums
from quark.torch.algorithms.tune import RoundingTask, tune
from quark.torch.config.algorithms import GPTAQConfig, GPTQConfig, QronosConfig


def run_gptq(context: ModelContext, config: GPTQConfig) -> None:
    """Tune the weights of ``context.model``."""

    def rounder(sums: Sums) -> Callable[[RoundingTask], torch.Tensor]:
        feedback = feedback_of(sums.hessian, config.damp_percent, config.desc_act)

        def rounding(job: RoundingTask) -> torch.Tensor:
            groups = None if config.static_groups else refit_of(job.quantizer, job.transposed)
            size, refit = groups or (config.block_size, None)
            return round_columns(job.weight, feedback, job.grid, size, refit=refit)

        return rounding

    tune(context, rounder, config.inside_layer_modules, config.model_decoder_layers)


def run_gptaq(context: ModelContext, config: GPTAQConfig) -> None:
    """Tune the weights of ``context.model`` towards what the float model computes."""

    def rounder(sums: Sums) -> Callable[[RoundingTask], torch.Tensor]:
        cross = sums.hessian if sums.cross is None else sums.cross
        feedback, drift = asymmetric_feedback(sums.hessian, cross, config.alpha, config.damp_percent, config.desc_act)
        return lambda job: round_columns(job.weight, feedback, job.grid, config.block_size, drift)

    tune(context, rounder, config.inside_layer_modules, config.model_decoder_layers, paired=True)


def run_qronos(context: ModelContext, config: QronosConfig) -> None:
    """Tune the weights of ``context.model`` towards what the float model computes."""

    def rounder(sums: Sums) -> Callable[[RoundingTask], torch.Tensor]:
        cross = sums.hessian if sums.cross is None else sums.cross
        return lambda job: qronos(
            job.weight, sums.hessian, cross, job.grid, config.block_size, config.alpha, config.desc_act
        )

    tune(context, rounder, config.inside_layer_modules, config.model_decoder_layers, paired=True)
