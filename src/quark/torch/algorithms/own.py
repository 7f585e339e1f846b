"""Registered algorithms in the torch flow: the function gets NumPy arrays, whatever device the weight is on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from quark.errors import known
from quark.torch.algorithms.context import ModelContext
from quark.torch.algorithms.inputs import Sums
from quark.torch.algorithms.tune import RoundingTask, tune
from quark.torch.config.algo_base import AlgoConfig


def array(x: torch.Tensor) -> np.ndarray:
    """A tensor as NumPy."""
    return x.detach().cpu().numpy()


def run_own(context: ModelContext, config: AlgoConfig) -> None:
    """Round the weights of ``context.model`` by a function that was registered."""
    own = known(config.own, f"the function of {config.name!r}")
    values = {name: getattr(config, name) for name in own.settings}

    def rounder(sums: Sums) -> Callable[[RoundingTask], torch.Tensor]:
        hessian = array(sums.hessian)

        def rounding(task: RoundingTask) -> torch.Tensor:
            found = own.rounded(array(task.weight), hessian, task.grid.map(array), values)
            return torch.from_numpy(found).to(task.weight)

        return rounding

    tune(context, rounder, [])
