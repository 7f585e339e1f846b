"""AutoRound: learn which way each weight is rounded, and how far each scale group is clipped (Cheng et al. 2023).

    w~ = s f ( clip( round(w / (s f) + v) + z ) - z ),        v in [-1/2, 1/2],  f in [1/2, 1]

v and f follow the sign of their gradients (straight through the rounding) with a learning rate that falls to 0; what
had the least loss on the way is kept. ``Learned`` is one weight's part of it; the loss belongs to who knows the block.
``autoround`` is a single layer by the loss of AdaRound and AdaQuant, at scales that stay (f = 1).

Not handled: scales that a block format finds itself (v is learned, f stays 1).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quark.algorithms.columns import Columns
from quark.algorithms.reconstruction import Data, Settings, Stopper, Trained, TrainedLayer, as_tensor
from quark.algorithms.training import Training
from quark.dataclass import dataclass
from quark.numerics.elements import Int

SMALLEST_CLIP = 0.5
Expand = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Learned:
    """What is learned of one weight.

    Attributes:
        weight: [rows, columns], float32.
        grid: its grid.
        offset: v, of the shape of the weight.
        clip: f, of the shape of the scales, or None.
        expand: from the shape of the scales to that of the weight.
    """

    weight: torch.Tensor
    grid: Columns
    offset: torch.Tensor
    clip: torch.Tensor | None
    expand: Expand

    @classmethod
    def start(cls, weight: torch.Tensor, grid: Columns, scale: torch.Tensor | None, expand: Expand) -> Learned:
        """Rounding to nearest; ``scale`` is None where clips are not learned."""
        offset = torch.zeros_like(weight, requires_grad=True)
        clip = None if scale is None else torch.ones_like(scale, dtype=torch.float32, requires_grad=True)
        return cls(weight, grid, offset, clip, expand)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What has gradients."""
        return [self.offset] if self.clip is None else [self.offset, self.clip]

    def value(self) -> torch.Tensor:
        """w~, through which gradients pass."""
        grid = self.grid
        step = grid.step if self.clip is None else grid.step * self.expand(self.clip)
        base = self.weight if grid.offset is None else self.weight - grid.offset
        wanted = base / step + self.offset
        if isinstance(grid.element, Int):
            wanted = torch.clamp(wanted, grid.element.min - grid.zero, grid.element.max - grid.zero)
        with torch.no_grad():
            snapped = grid.element.snap(wanted.detach().clone(), grid.zero, grid.rule, grid.narrow)
        value = (wanted + (snapped - wanted).detach()) * step
        return value if grid.offset is None else value + grid.offset

    @torch.no_grad()
    def move(self, rate: float, clip_rate: float) -> None:
        """One step along the signs of the gradients."""
        for parameter, size in zip(self.parameters, (rate, clip_rate), strict=False):
            if parameter.grad is not None:
                parameter.sub_(size * parameter.grad.sign())
                parameter.grad = None
        self.offset.clamp_(-0.5, 0.5)
        if self.clip is not None:
            self.clip.clamp_(SMALLEST_CLIP, 1.0)

    def snapshot(self) -> list[torch.Tensor]:
        """The values of what is learned."""
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def restore(self, values: list[torch.Tensor]) -> None:
        """Put values of ``snapshot`` back."""
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


def autoround(layer: TrainedLayer, grid: Columns, bias: torch.Tensor | None, data: Data, settings: Settings) -> Trained:
    """Learn the rounding of one layer.

    Args:
        layer: its weight of any shape.
        grid: of the weight, arrays of tensors that broadcast to its shape, on the device of the settings.
        bias: as the quantized layer has it.

    Returns:
        The weight on its grid; the bias is that of ``layer``.
    """
    weight = as_tensor(torch, layer.weight).to(settings.device)
    training, learned = Training(torch, layer, data, settings), Learned.start(weight, grid, None, lambda scale: scale)

    def error() -> float:
        with torch.no_grad():
            return training.error(learned.value(), bias)

    before = error()
    least, steps = _learn(training, learned, bias, training.rate(before))
    last = error()
    ended = learned.snapshot()
    learned.restore(least)
    after = error()
    if last < after:
        learned.restore(ended)
    value = learned.value().detach().cpu().numpy()
    return training.settled(before, min(last, after), steps, value, layer.bias)


def _learn(
    training: Training, learned: Learned, bias: torch.Tensor | None, rate: float
) -> tuple[list[torch.Tensor], int]:
    """What had the least loss on the way, and the number of steps; ``learned`` is left at the last one."""
    settings, pull, stop = training.settings, training.pull, Stopper(training.settings)
    least, lowest = learned.snapshot(), float("inf")
    for step, batch in training.steps():
        with torch.enable_grad():
            value = learned.value()
            leaf = value.detach().requires_grad_()
            loss = training.loss(batch, leaf, bias)
            (gradient,) = torch.autograd.grad(loss, leaf)
        if float(loss.detach()) < lowest:
            least, lowest = learned.snapshot(), float(loss.detach())
        if pull is not None:
            gradient = pull.mixed(gradient.contiguous(), learned.weight + learned.offset.detach() * learned.grid.step)
        value.backward(gradient)
        learned.move(rate * (1 - (step - 1) / settings.iterations), 0.0)
        training.log(step, loss.detach())
        if stop.ends(loss.detach()):
            return least, step
    return least, settings.iterations
