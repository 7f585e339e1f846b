"""AdaRound: learn for every weight whether it is rounded up or down.

    W̃ = s · clip(⌊W / s⌋ + h(V) + z, n, p) − s z        h(V) = clip(1.2 σ(V) − 0.1, 0, 1)
    minimize  ‖ f(W x) − f(W̃ x̂) ‖²  +  λ Σ (1 − |2 h(V) − 1|^β)

V starts where h is the fraction of W / s, so that W̃ is the float weight. β falls along a cosine from 20 to 2: first
only undecided weights feel the second term, in the end all are driven to 0 or 1. It is off during the warm start. At
the end h ≥ ½ rounds up. torch differentiates with respect to W̃ alone; the rest of the gradient is written out.

Early stopping ends a layer when every rounding is decided. Not when its error stops to fall: nearly all of the gain
comes at the end, where β drives weights that were undecided to one side, and before that the error of W̃ only grows.

Beyond the paper, the few samples of a wide layer do not decide alone (``shrinkage.py``). And with ``update_bias`` the
bias learns along, straight through its rounding, at a rate that is in units of the layer's error before (root mean
square) and falls along a line to zero.

Source: Nagel et al. 2020, "Up or Down? Adaptive Rounding for Post-Training Quantization", section 3.

Not handled: formats whose codes are not integers (AdaQuant trains those).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from quark.algorithms.reconstruction import (
    Data,
    Settings,
    Tensor,
    Trained,
    TrainedLayer,
    as_tensor,
    import_torch,
)
from quark.algorithms.training import Training
from quark.dataclass import dataclass

#: The stretched sigmoid of the paper.
ZETA, GAMMA = 1.1, -0.1
#: How often early stopping looks, where ``stretch`` does not say.
LOOKS = 50
_BETAS, _EPSILON = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class Codes:
    """The integer grid of a weight: ``scale`` and ``zero_point`` broadcast against it, codes run from low to high."""

    scale: np.ndarray
    zero_point: np.ndarray
    low: int
    high: int


#: Rounds a tensor to its format, on its device.
Round = Callable[[Tensor], Tensor]


def adaround(
    layer: TrainedLayer, codes: Codes, data: Data, settings: Settings, round_bias: Round | None = None
) -> Trained:
    """Train one layer.

    Args:
        round_bias: ``None`` where the bias stays float.

    Returns:
        Weights that lie on the grid, and the bias as it was, or as ``update_bias`` has trained it, before its rounding.

    Raises:
        ConfigError: torch is not there, or not the device.
    """
    torch = import_torch("AdaRound")
    training = Training(torch, layer, data, settings)
    rounding = Rounding(torch, layer.weight, codes, settings.device)
    bias = None if layer.bias is None else Bias(torch, layer.bias, round_bias, settings)
    with torch.no_grad():
        before = training.error(rounding.nearest(layer.weight), bias and bias.rounded)
    rate = training.rate(before)
    if bias is not None and bias.learns:
        bias.learn(rate * math.sqrt(before / bias.count))
    steps = _train(training, rounding, bias, rate)
    with torch.no_grad():
        weight = rounding.decided()
        after = training.error(weight, bias and bias.rounded)
    return training.settled(before, after, steps, weight.cpu().numpy(), bias and bias.value.cpu().numpy())


def _train(training: Training, rounding: Rounding, bias: Bias | None, rate: float) -> int:
    torch, settings, pull = training.torch, training.settings, training.pull
    warm = math.ceil(settings.warm_start * settings.iterations)
    adam, look = Adam(torch, rounding.v, rate), settings.stretch or max(1, settings.iterations // LOOKS)
    for step, batch in training.steps():
        with torch.no_grad():
            weight = rounding.soft()
        weight.requires_grad_()
        rounded = bias and bias.rounded
        loss = training.loss(batch, weight, rounded)
        gradient, *others = torch.autograd.grad(loss, [weight, *([rounded] if bias and bias.learns else [])])
        beta = None if step <= warm else annealed(step, warm, settings)
        with torch.no_grad():
            if pull is not None:
                gradient = pull.mixed(gradient, weight)
            adam.step(rounding.gradient(gradient, beta, settings.reg_param))
            if bias is not None and others:
                bias.step(others[0], 1 - (step - 1) / settings.iterations)
        training.log(step, loss.detach())
        if settings.early_stop and step > warm and not step % look and rounding.settled():
            return step
    return settings.iterations


def annealed(step: int, warm: int, settings: Settings) -> float:
    """β of a step: a cosine from the first of ``beta_range`` to the second."""
    start, end = settings.beta_range
    passed = (step - warm) / max(settings.iterations - warm, 1)
    return end + 0.5 * (start - end) * (1 + math.cos(passed * math.pi))


class Rounding:
    """V and what it makes of the weight. Buffers are reused, so that a step allocates little."""

    def __init__(self, torch: Any, weight: np.ndarray, codes: Codes, device: str) -> None:
        self._torch = torch
        scale = np.broadcast_to(codes.scale, weight.shape).astype(np.float32)
        self._compact = codes.scale.size == 1
        self.scale = as_tensor(torch, np.reshape(codes.scale, -1)[0] if self._compact else scale).to(device)
        steps = as_tensor(torch, weight).to(device) / self.scale
        floor = steps.floor()
        fraction = ((steps - floor) - GAMMA) / (ZETA - GAMMA)
        self.v = torch.log(fraction).sub_(torch.log1p(-fraction))
        zero_point = as_tensor(torch, np.asarray(codes.zero_point, np.float32)).to(device)
        self._floor, self._low, self._high = floor, codes.low - zero_point, codes.high - zero_point
        self._stuck = (floor < self._low) | (floor >= self._high)
        self._sigmoid = torch.empty_like(self.v)

    def settled(self) -> bool:
        """Whether every rounding is decided, so that no further step changes the result."""
        stretched = self._torch.sigmoid(self.v).mul_(ZETA - GAMMA).add_(GAMMA)
        return bool(((stretched <= 0) | (stretched >= 1) | self._stuck).all())

    def nearest(self, weight: np.ndarray) -> Tensor:
        """``weight`` rounded to nearest."""
        steps = as_tensor(self._torch, weight).to(self.scale.device) / self.scale
        return self._torch.clamp(steps.round_(), self._low, self._high).mul_(self.scale)

    def soft(self) -> Tensor:
        """W̃ of the current V."""
        torch = self._torch
        torch.sigmoid(self.v, out=self._sigmoid)
        steps = self._sigmoid.mul(ZETA - GAMMA).add_(GAMMA).clamp_(0, 1).add_(self._floor)
        return torch.clamp(steps, self._low, self._high).mul_(self.scale)

    def decided(self) -> Tensor:
        """The weight rounded as V has decided."""
        return self._torch.clamp(self._floor + (self.v >= 0), self._low, self._high) * self.scale

    def gradient(self, of_weight: Tensor, beta: float | None, reg: float) -> Tensor:
        """The gradient with respect to V, after ``soft``; ``of_weight`` is used up.

        With c = 2 h − 1 before the clip: dh/dV = 1.2 (¼ − (c / 2.4)²), and 0 where |c| ≥ 1.
        """
        torch, span = self._torch, ZETA - GAMMA
        centred = self._sigmoid.mul(2 * span).sub_(span)
        size = centred.abs()
        decided = size >= 1
        total = of_weight.mul_(self.scale)
        if beta is not None:
            power = size.log_().mul_(beta - 1).exp_()  # four times as fast as a power
            total.add_(torch.copysign(power, centred), alpha=-2 * beta * reg)
        total.mul_(centred.square_().mul_(-1 / (4 * span)).add_(span / 4))
        return total.masked_fill_(decided.logical_or_(self._stuck), 0)


class Bias:
    """The bias of a layer and what it is rounded to; with ``update_bias`` it learns, straight through its rounding."""

    def __init__(self, torch: Any, bias: np.ndarray, round_it: Round | None, settings: Settings) -> None:
        self._torch, self._round, self.learns = torch, round_it or (lambda tensor: tensor.clone()), settings.update_bias
        self.value = as_tensor(torch, bias.copy()).to(settings.device)
        self.count = bias.size
        self.rounded = self._round(self.value).requires_grad_(self.learns)
        self._adam: Adam | None = None

    def learn(self, rate: float) -> None:
        """Begin, at this rate of Adam."""
        self._adam = Adam(self._torch, self.value, rate)

    def step(self, gradient: Tensor, share: float) -> None:
        """One step against the gradient of what the bias is rounded to."""
        if self._adam is not None:
            self._adam.step(gradient.contiguous(), share)
        self.rounded = self._round(self.value).detach().requires_grad_()


class Adam:
    """Adam (Kingma and Ba 2015) on one tensor, in place."""

    def __init__(self, torch: Any, parameter: Tensor, rate: float) -> None:
        self._parameter, self._rate, self._steps = parameter, rate, 0
        self._mean, self._square = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def step(self, gradient: Tensor, share: float = 1.0) -> None:
        """One step against the gradient, which is used up; ``share``: this part of the rate."""
        self._steps += 1
        (b1, b2), t = _BETAS, self._steps
        self._mean.lerp_(gradient, 1 - b1)
        self._square.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        root = self._square.sqrt().div_(math.sqrt(1 - b2**t)).add_(_EPSILON)
        self._parameter.addcdiv_(self._mean, root, value=-share * self._rate / (1 - b1**t))
