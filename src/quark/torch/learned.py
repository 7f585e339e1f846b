"""Scales that training learns: LSQ (Esser et al., "Learned Step Size Quantization", ICLR 2020) and TQT (Jain et al.,
"Trained Quantization Thresholds", MLSys 2020). With v = x / s, codes n..p around the zero point, y = s round(clip(v)):

    LSQ   dy/ds      = round(v) - v   n < v < p            dy/dx = 1   n < v < p
                       n, p           below, above                 0   elsewhere
          times g    = 1 / sqrt(N p),  N elements per scale (of an activation: per sample)
    TQT   s          = 2^ceil(log2 t) / 2^(b-1)
          dy/dlog2 t = s ln 2 (round(v) - v),   or s ln 2 n, s ln 2 p where round(v) lies beyond n, p
          dy/dx      = 1 where round(v) lies in n..p, 0 elsewhere

The values are those of ``fake_quantize`` at the scale of the moment, in training and out of it. The learned number is a
parameter of the model: it starts at what calibration found, is saved with the model and changes only by an optimizer.
The zero point stays what calibration found. Not handled: formats other than integers, dynamic ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from quark.errors import known
from quark.numerics.affine import Coding
from quark.torch.fake_quantize import FakeQuantize, Quantizer, make_quantizer, zero_point_of
from quark.torch.observer import LSQObserver, ObserverBase, TQTObserver
from quark.torch.stage import Stages

TINIEST = float(torch.finfo(torch.float32).tiny)


class _Quantize(torch.autograd.Function):
    """y = s round(clip(x / s)), with gradients for x and s."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, coding: Coding, reach: float
    ) -> torch.Tensor:
        y: torch.Tensor = coding.fake_quantize(x.float(), scale, zero_point)
        ctx.save_for_backward(x, y, scale, zero_point)
        ctx.coding, ctx.reach = coding, reach
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, y, scale, zero_point = ctx.saved_tensors
        shape, granularity, format = tuple(x.shape), ctx.coding.granularity, ctx.coding.format
        full = granularity.expand(scale, shape)
        lowest = granularity.expand(format.min - zero_point.float(), shape) - ctx.reach
        highest = granularity.expand(format.max - zero_point.float(), shape) + ctx.reach
        v, code = x.float() / full, y / full
        inside = (v > lowest) & (v < highest)
        upstream = gradient.float()
        of_scale = granularity.tile(upstream * torch.where(inside, code - v, code)).sum(-1)
        return (upstream * inside).to(x.dtype), of_scale.reshape(scale.shape), None, None, None


class LearnedScale(FakeQuantize):
    """A static quantizer with a scale that is a parameter; the base of the two below.

    Attributes:
        learned: what is trained, once calibration has found where it starts.
        constant: the tensor is a weight, so that all of it counts; of an activation one sample does.
    """

    learned: nn.Parameter | None
    constant = False
    reach = 0.0

    def register_scale(self) -> None:
        """A parameter, in the place of the buffer."""
        self.register_parameter("learned", None)

    @property
    def scale(self) -> torch.Tensor | None:
        """The scale of the moment, without gradient."""
        return None if self.learned is None else self.step(self.learned.detach())

    @scale.setter
    def scale(self, value: torch.Tensor | None) -> None:
        started = None if value is None else self.inverse(value.detach().float())
        with torch.inference_mode(False):
            self.learned = None if started is None else nn.Parameter(started.clone())

    def step(self, learned: torch.Tensor) -> torch.Tensor:
        """The scale that the learned number stands for, differentiable."""
        raise NotImplementedError

    def inverse(self, scale: torch.Tensor) -> torch.Tensor:
        """The learned number of a scale."""
        raise NotImplementedError

    def weighed(self, learned: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``learned`` with a gradient that is to be weighed for a tensor such as ``x``."""
        return learned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` quantized; with gradients for the scale where they are asked for."""
        possible = self.enabled and torch.is_grad_enabled() and x.is_floating_point() and x.numel()
        if self.observer is not None or self.learned is None or not possible:
            return super().forward(x)
        scale, spec = self.step(self.weighed(self.learned, x)), self.stage.spec
        coding = Coding(self.stage.format, self.granularity, spec.rounding)
        return _Quantize.apply(x, scale, self.zero_point, coding, self.reach)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FakeQuantize:
        """As ``FakeQuantize``: another device, the same type."""
        super()._apply(fn, recurse)
        if self.learned is not None and self.learned.dtype != torch.float32:
            self.learned.data = self.learned.data.float()
        return self


class LearnedStep(LearnedScale):
    """LSQ: the learned number is the scale itself."""

    def step(self, learned: torch.Tensor) -> torch.Tensor:
        """Its magnitude: an optimizer may step over zero."""
        return learned.abs().clamp_min(TINIEST)

    def inverse(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale."""
        return scale

    def weighed(self, learned: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The gradient of the paper's section 2.2: as large beside the scale as that of a weight is beside a weight."""
        highest = float(self.stage.format.max - zero_point_of(self).min())
        count = x.numel() if self.constant or not x.dim() else x[0].numel()
        factor = 1 / math.sqrt(max(count / learned.numel(), 1) * max(highest, 1))
        return learned * factor + (learned - learned * factor).detach()


class LearnedThreshold(LearnedScale):
    """TQT: the learned number is log2 t."""

    reach = 0.5

    @property
    def levels(self) -> float:
        """2^(b-1): the codes below the middle."""
        return float(self.stage.format.middle - self.stage.format.min)

    def step(self, learned: torch.Tensor) -> torch.Tensor:
        """2^ceil(log2 t) / 2^(b-1); the gradient of ceil is 1."""
        exact = (2.0 ** learned.detach().double().ceil() / self.levels).float()
        return exact * (1 + math.log(2) * (learned - learned.detach()))

    def inverse(self, scale: torch.Tensor) -> torch.Tensor:
        """log2 of the threshold that the codes of a scale reach."""
        return (scale.double() * self.levels).log2().float()

    def finish(self) -> bool:
        """Start at the threshold itself, where ``FakeQuantize`` has the power of two above it."""
        observer = self.observer
        if super().finish() and observer is not None:
            lo, hi = (bound.double() for bound in observer.range())
            with torch.no_grad():
                known(self.learned, "what is learned").copy_(torch.maximum(-lo, hi).clamp_min(TINIEST).log2())
        return self.enabled


LEARNED: dict[type[ObserverBase], type[LearnedScale]] = {LSQObserver: LearnedStep, TQTObserver: LearnedThreshold}


def learning_quantizer(stages: Stages, name: str, constant: bool) -> Quantizer:
    """As ``make_quantizer``, but with a scale that training changes where the observer says so.

    Args:
        stages, name: as there.
        constant: the tensor is a weight or a bias.
    """
    cls = next((LEARNED[base] for base in stages[0].observer.__mro__ if base in LEARNED), None)
    if cls is None:
        return make_quantizer(stages, name, constant)
    made = cls(stages[0], name)
    made.constant = constant
    return made


def learned_scales(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of the scales and thresholds that training learns, for an optimizer's parameter groups.

    Args:
        model: a model that was quantized with learned scales; of any other model, nothing comes.
    """
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, LearnedScale) and module.learned is not None and module.learned not in seen:
            seen.add(module.learned)
            yield f"{name}.learned", module.learned
