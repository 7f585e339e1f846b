"""The training of one layer: what AdaRound, AdaQuant and AutoRound share from step to step.

    error(W) = mean over samples and positions of ‖ f(W; x̂) − f(W_float; x) ‖²        (the norm runs along the channels)

x̂ is what the quantized model feeds the layer, x what the float model does. Source: Nagel et al. 2020, "Up or Down?
Adaptive Rounding for Post-Training Quantization", equation 21 (asymmetric reconstruction).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from quark.algorithms.reconstruction import Batches, Data, Settings, Tensor, Trained, TrainedLayer, check_device
from quark.algorithms.shrinkage import pull_of

Batch = tuple[Tensor, Tensor]
_log = logging.getLogger(__name__)


class Training:
    """A layer, its samples, how it is trained, and ``pull``, the term towards its float weights, if it has one.

    Args:
        torch: the module.
        floor: of the share of the pull.

    Raises:
        ConfigError: torch does not have the device.
    """

    def __init__(self, torch: Any, layer: TrainedLayer, data: Data, settings: Settings, floor: float = 0.0) -> None:
        check_device(torch, settings.device)
        self.torch, self.layer, self.settings = torch, layer, settings
        self._batches = Batches(torch, data, settings)
        self.pull = pull_of(torch, layer, data, settings.device, floor) if settings.shrinkage else None

    def steps(self) -> Iterator[tuple[int, Batch]]:
        """(number, from 1 on; input and target) of every step."""
        return zip(range(1, self.settings.iterations + 1), self._batches.random(), strict=False)

    def loss(self, batch: Batch, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The error on a batch."""
        inputs, target = batch
        found, axis = self.layer.forward(inputs, weight, bias), self.layer.channel_axis
        channels = target.shape[axis] if target.ndim > 1 else 1
        return (found - target).square().mean() * channels

    def error(self, weight: Tensor, bias: Tensor | None) -> float:
        """The error over all samples."""
        total, count = 0.0, 0
        with self.torch.no_grad():
            for batch in self._batches.all():
                total += float(self.loss(batch, weight, bias))
                count += 1
        return total / max(count, 1)

    def rate(self, before: float) -> float:
        """The learning rate, where the error before training is this."""
        adjust = self.settings.lr_adjust
        return adjust[1] if adjust is not None and before > adjust[0] else self.settings.learning_rate

    def log(self, step: int, loss: Tensor) -> None:
        """One line every ``log_period`` steps."""
        if self.settings.log_period and step % self.settings.log_period == 0:
            _log.info("%s: step %d, error %.6g", self.layer.name, step, float(loss))

    def settled(self, before: float, after: float, steps: int, weight: np.ndarray, bias: Any) -> Trained:
        """The result, put back where training made it worse."""
        layer = self.layer
        if not after < before:
            _log.info("%s: error %.6g before, %.6g after %d steps: put back", layer.name, before, after, steps)
            return Trained(layer.weight, layer.bias, before, before, steps, kept=False)
        _log.info("%s: error %.6g before, %.6g after %d steps", layer.name, before, after, steps)
        return Trained(weight, bias, before, after, steps)
