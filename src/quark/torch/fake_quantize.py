"""``FakeQuantize``: a tensor quantized and dequantized, in the type it came in; static or dynamic.

    y = (clip(round(x / s) + z) - z) s            gradient:  dy/dx = 1  (straight-through, Bengio et al. 2013)

Scales and zero points are float32 and int32 whatever the type of the model, and stay so under ``model.half()``: a
scale in bfloat16 would be wrong by up to 0.4 %. Where the configuration asks for scales in the half type that a tensor
has, x / s + z is computed in that type, as torch and ONNX QuantizeLinear (opset 23) do; not of weights, whose codes
readers find in files. A real zero point (``ZeroPointType.float32``) puts the smallest value on the lowest code:
y = lo + (code - lowest) s  with  s = (hi - lo) / (highest - lowest).

The arithmetic is ``quark.numerics``; this is the only place of the flow that knows about gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn

from quark.errors import DataError, known
from quark.numerics.affine import Coding
from quark.numerics.elements import Element
from quark.numerics.formats import Block
from quark.numerics.granularity import Granularity, Tensor, Token
from quark.torch.memo import remembered
from quark.torch.observer import ObserverBase
from quark.torch.stage import Stage, Stages

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # by the name of the rule of scales
Parameters = tuple[torch.Tensor | None, torch.Tensor | None]


class Quantizer(nn.Module):
    """What quantizes one tensor of a layer: here in one stage or two, in a loaded model from codes of a file."""

    def settled(self) -> Quantizer:
        """The quantizer that has the stages and their parameters: itself, but where a file gives them other names."""
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Move to another device; codes, scales and zero points keep their types."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            value = self._buffers[name]
            if old is not None and value is not None and value.dtype != old.dtype:
                self._buffers[name] = old.to(value.device)
        return self


class FakeQuantize(Quantizer):
    """One stage of one tensor.

    Attributes:
        stage: how.
        tensor_name: what error messages call the tensor.
        constant: the tensor is a weight or a bias, whose stored codes may be narrow.
        scale, zero_point: of a static range, once it is known; None otherwise.
        observer: collects while a static range is being found; None before and after.
        enabled: False lets tensors through as they are.
        axes: numbers of axes of the tensors that had a scale per token, which readers may find otherwise.
    """

    scale: torch.Tensor | None
    zero_point: torch.Tensor | None

    def __init__(self, stage: Stage, name: str = "", constant: bool = False) -> None:
        super().__init__()
        self.stage = stage
        self.tensor_name = name
        self.constant = constant
        self.observer: ObserverBase | None = None
        self.enabled = True
        self.axes: set[int] = set()
        self.register_scale()
        self.register_buffer("zero_point", None)

    @property
    def granularity(self) -> Granularity:
        """Which elements share a scale."""
        return self.stage.spec.granularity

    def register_scale(self) -> None:
        """A place for the scale that moves and is saved with the model."""
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` quantized, or only looked at while its range is being found."""
        if not x.is_floating_point():
            return x
        if self.observer is not None:
            self.look(self.observer, x)
            return x
        if not (self.enabled and x.numel()):
            return x
        if torch.is_grad_enabled() and x.requires_grad:
            return straight_through(x, self.laid_out)
        key = self.key
        return self.laid_out(x) if key is None else remembered(x, key, self.laid_out)

    def laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` quantized, and laid out in memory as it is: by that torch chooses how a layer adds its bias, before a
        product is rounded to a half type or after, and every reader computes with what it was given."""
        made = self.quantized(x)
        return made if made.stride() == x.stride() else torch.empty_like(x, dtype=made.dtype).copy_(made)

    @property
    def key(self) -> tuple[Hashable, ...] | None:
        """Equal for quantizers that make the same of one tensor; None where finding out costs more than it saves."""
        if not self.stage.calibrated:
            return (self.stage,)
        if self.scale is None or self.scale.numel() != 1 or self.scale.device.type != "cpu":
            return None
        return self.stage, self.scale.item(), 0 if self.zero_point is None else self.zero_point.item()

    def look(self, observer: ObserverBase, x: torch.Tensor) -> None:
        """Show ``x`` to an observer; what it cannot take is an error that names the tensor."""
        try:
            observer(x)
        except DataError as error:
            raise DataError(f"{self.tensor_name}: {error}") from error

    @torch.no_grad()
    def quantized(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` quantized, without gradient.

        Raises:
            DataError: a dynamic range of values that are not finite.
        """
        if isinstance(self.granularity, Token):
            self.axes.add(x.dim())
        return self.quantized_under(
            x, (self.scale, self.zero_point) if self.stage.calibrated else self.parameters_from(x)
        )

    def quantized_under(self, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """``x`` quantized under a scale and a zero point (a format that needs no range: as it is), without gradient."""
        (scale, zero_point), spec, format = parameters, self.stage.spec, self.stage.format
        if not self.stage.needs_range and not isinstance(format, Block):
            return format.round(x, spec.rounding)
        if zero_point is None and scale is not None:  # a file of a format without zero points has none
            zero_point = torch.zeros_like(scale)
        if not self.stage.real_zero:
            narrow = spec.narrow_codes and self.constant
            if isinstance(format, Element) and HALVES.get(spec.scale_rule) is x.dtype and not self.constant:
                known_scale, known_zero = known(scale, self.tensor_name), known(zero_point, self.tensor_name)
                return self.quantized_in_half(x, known_scale, known_zero, format)
            coding = Coding(format, self.granularity, spec.rounding, narrow, self.stage.grid.scale_rule)
            return coding.fake_quantize(x, scale, zero_point)
        shape = tuple(x.shape)
        scale, zero_point = known(scale, self.tensor_name), known(zero_point, self.tensor_name)
        lowest = torch.full_like(scale, format.min, dtype=torch.int32)
        offset = self.granularity.expand((format.min - zero_point) * scale, shape)
        above = Coding(format, self.granularity, spec.rounding).fake_quantize(x.float() - offset, scale, lowest)
        return (above + offset).to(x.dtype)

    def quantized_in_half(
        self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, format: Element
    ) -> torch.Tensor:
        """``x`` quantized with every step rounded to its type; codes are counted from the middle, as signed ones."""
        steps, shifts = (
            self.granularity.expand(value.to(x.dtype), tuple(x.shape)) for value in (scale, zero_point - format.middle)
        )
        one, middle = scale.new_ones(()), zero_point.new_full((), format.middle)
        placed = Coding(format, Tensor(), self.stage.spec.rounding).fake_quantize(x / steps + shifts, one, middle)
        return (placed - shifts) * steps

    def parameters_of(self, lo: torch.Tensor, hi: torch.Tensor) -> Parameters:
        """Scale (float32) and zero point (int32, or float32 where it is real) of a range, on its device."""
        low, high = (host_or_cuda(bound.detach()) for bound in (lo, hi))
        if self.stage.real_zero:
            scale = torch.as_tensor(self.stage.grid.parameters(0 * low, high - low)[0])
            return scale.to(lo.device), (self.stage.format.min - torch.as_tensor(low) / scale).float().to(lo.device)
        scale, zero_point = (torch.as_tensor(value).to(lo.device) for value in self.stage.grid.parameters(low, high))
        return (1 / (1 / scale) if self.stage.is_block else scale), zero_point  # some files hold the reciprocal

    def parameters_from(self, x: torch.Tensor) -> Parameters:
        """Scale and zero point for the values of ``x``."""
        if not self.stage.needs_range:
            return None, None
        observer = self.new_observer(x.device)
        self.look(observer, x)
        return self.parameters_of(*observer.range())

    def new_observer(self, device: torch.device) -> ObserverBase:
        """A fresh observer of this stage."""
        observer = self.stage.observer(self.stage.observed, device)
        observer.of_weight = observer.of_weight or self.constant
        return observer

    def start(self, device: torch.device) -> None:
        """Collect from now on what the static range is found from; tensors pass as they are."""
        self.observer = self.new_observer(device) if self.stage.calibrated else None
        self.enabled = False

    def finish(self) -> bool:
        """Fix the range from what was collected, and quantize from now on.

        Returns:
            False if no value was seen: the tensor then stays float.
        """
        observer, self.observer = self.observer, None
        self.enabled = observer is None or observer.count > 0
        if observer is not None and self.enabled:
            self.scale, self.zero_point = self.parameters_of(*observer.range())
            if not self.stage.format.has_zero_point:
                self.zero_point = torch.zeros_like(zero_point_of(self))
        return self.enabled

    def extra_repr(self) -> str:
        """The spec in one line."""
        return self.stage.spec.describe()


def host_or_cuda(bound: torch.Tensor) -> Any:
    """A bound for arithmetic in float64: where it is on CUDA, elsewhere (not every device has the type) for NumPy."""
    return bound.double() if bound.is_cuda else bound.cpu().double().numpy()


class SequentialQuantize(nn.Sequential, Quantizer):
    """Two stages in a row: the second quantizes the values that the first has made."""


def quantizer_at(layer: nn.Module, name: str) -> Quantizer | None:
    """The quantizer that a layer holds as ``name``; None where the tensor stays float."""
    found = layer._modules[name]
    if found is not None and not isinstance(found, Quantizer):
        raise TypeError(f"{name} is a {type(found).__name__}, not a quantizer")
    return found


def make_quantizer(stages: Stages, name: str, constant: bool = False) -> Quantizer:
    """The module that runs ``stages`` on the tensor called ``name``.

    Args:
        constant: the tensor is a weight or a bias.
    """
    quantizers = [FakeQuantize(stage, name, constant) for stage in stages]
    return quantizers[0] if len(quantizers) == 1 else SequentialQuantize(*quantizers)


def scale_of(part: FakeQuantize) -> torch.Tensor:
    """The static scale of a stage, which must be known."""
    return known(part.scale, f"the scale of {part.tensor_name}")


def zero_point_of(part: FakeQuantize) -> torch.Tensor:
    """The static zero point of a stage, which must be known."""
    return known(part.zero_point, f"the zero point of {part.tensor_name}")


def parts(quantizer: nn.Module) -> Iterator[FakeQuantize]:
    """The stages of a quantizer, first to last; of a model, those of all of its quantizers."""
    for module in quantizer.modules():
        if isinstance(module, FakeQuantize):
            yield module
        elif isinstance(module, Quantizer) and (own := module.settled()) is not module:
            yield from parts(own)


@torch.no_grad()
def calibrate_with(quantizer: nn.Module, x: torch.Tensor) -> None:
    """Fix the static ranges of a quantizer from one tensor (a weight), each stage on what the one before it makes.

    Raises:
        DataError: values that are not finite.
    """
    x, stages = x.detach(), list(parts(quantizer))
    if not is_finite(x):
        nans, infinities = int(x.isnan().sum()), int(x.isinf().sum())
        raise DataError(f"{stages[0].tensor_name}: {nans} NaN and {infinities} infinite values among {x.numel()}")
    for part in stages:
        part.start(x.device)
        part(x)
        part.finish()
        x = x if part is stages[-1] else part.quantized(x)
    if len(stages) == 2 and stages[0].scale is not None and stages[1].scale is not None:
        stages[1].scale = stages[1].scale / stages[0].scale.max() * stages[0].scale.max()  # files hold the quotient


def is_finite(x: torch.Tensor) -> bool:
    """Whether there is neither NaN nor infinity; by the extremes, which is fifteen times faster than each element."""
    if not x.numel():
        return True
    lo, hi = torch.aminmax(x)
    return bool(torch.isfinite(lo) & torch.isfinite(hi))


class _StraightThrough(torch.autograd.Function):
    """The identity to gradients, something else to values."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
        return quantized.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def straight_through(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``function(x)``, through which the gradient of ``x`` passes unchanged."""
    if not (torch.is_grad_enabled() and x.requires_grad):
        return function(x)
    return _StraightThrough.apply(x, function(x.detach()))
