"""Quantizers whose parameters are those of a file: of weights kept as codes, and of static activations.

Their buffers are named as ``quark.torch.export.layout`` names stored tensors: the key ``fc.weight_scale`` of a file is
the buffer ``scale`` of ``fc.weight_quantizer``, which is what transformers makes of the key. It leaves numbered keys as
they are, so those are buffers of the layer: ``weight_scale_2`` of ``fc``.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from quark.numerics.blocks import Block
from quark.numerics.elements import Int
from quark.numerics.granularity import Channel
from quark.torch.export.layout import CODES, ElementLayout, Form, Layout, PairLayout, Stored, layouts_of
from quark.torch.fake_quantize import FakeQuantize, Quantizer, parts

PREFIXES = {"input_tensors": "input", "output_tensors": "output", "weight": "weight", "bias": "bias"}
NUMBERED = re.compile(r"(scale|zero_point)_\d+$")


class StoredParameters(Quantizer):
    """Buffers of a given form, that keep their types whatever the model is cast to."""

    def __init__(self, form: Form, device: torch.device) -> None:
        super().__init__()
        for name, (shape, dtype) in form.items():
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device=device))

    def settle(self, layer: nn.Module, prefix: str) -> None:
        """Give ``layer`` the numbered parameters, as ``<prefix>_<name>``."""
        self.__dict__["owner"], self.__dict__["prefix"] = layer, prefix
        for name in [name for name in self._buffers if NUMBERED.search(name)]:
            layer.register_buffer(f"{prefix}_{name}", self._buffers.pop(name))

    def release(self) -> None:
        """Take the numbered parameters away from the layer."""
        layer, prefix = self.__dict__["owner"], self.__dict__["prefix"]
        for name in [name for name in layer._buffers if NUMBERED.search(name) and name.startswith(f"{prefix}_")]:
            del layer._buffers[name]

    @property
    def numbered(self) -> dict[str, str]:
        """Names of the numbered parameters: in this module's form, and in the layer."""
        layer, prefix = self.__dict__.get("owner"), f"{self.__dict__.get('prefix')}_"
        names = [] if layer is None else [name for name in layer._buffers if NUMBERED.search(name)]
        return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}

    @property
    def stored(self) -> Stored:
        """All parameters by name."""
        own = {name: value for name, value in self._buffers.items() if value is not None}
        return {**own, **{key: self.__dict__["owner"]._buffers[name] for key, name in self.numbered.items()}}


class StoredTensor(StoredParameters):
    """Decodes a weight or bias from its codes.

    Attributes:
        layout: how it is stored.
        dtype: of the values.
        fake: makes the quantizer of the float tensor that was stored, without its parameters.
    """

    def __init__(
        self,
        layout: Layout | PairLayout,
        dtype: torch.dtype,
        device: torch.device,
        fake: Callable[[], Quantizer],
    ) -> None:
        super().__init__({name: entry for name, entry in layout.form().items() if name != CODES}, device)
        self.layout, self.dtype, self.fake = layout, dtype, fake

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """The values of ``codes``."""
        return self.layout.restore({**self.stored, CODES: codes.detach()}).to(self.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return super()._apply(fn, recurse)

    def quantizer(self, codes: torch.Tensor) -> Quantizer:
        """The quantizer of the float tensor, with its parameters."""
        made, stored = self.fake(), {**self.stored, CODES: codes}
        pair = self.layout if isinstance(self.layout, PairLayout) else None
        for part, layout in zip(parts(made), layouts_of(self.layout), strict=True):
            part.scale, part.zero_point = parameters(layout, stored)
            if pair is not None and layout is pair.second and pair.relative and part.scale is not None:
                part.scale = part.scale * stored["scale"]
        return made


def parameters(layout: Layout, stored: Stored) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scale and zero point of a ``FakeQuantize``; None where the format finds them itself."""
    if isinstance(layout, ElementLayout) and layout.stage.needs_range:
        zero_point = layout.zero_point(stored) if layout.has_zero_point else None
        scale = layout.scale(stored)
        return scale, torch.zeros_like(scale, dtype=torch.int32) if zero_point is None else zero_point
    block = layout.stage.format
    above = stored[layout.name("scale", 1)] if isinstance(block, Block) and block.tensor_scale else None
    return above, None if above is None else torch.zeros_like(above, dtype=torch.int32)


class StoredScales(StoredParameters):
    """Quantizes an activation under static parameters that have the names of a file.

    Needed where a ``FakeQuantize`` would call them otherwise: two stages, and scales above blocks (``scale_2``).
    """

    def __init__(self, quantizer: Quantizer, form: Form, device: torch.device) -> None:
        super().__init__(form, device)
        self.__dict__["quantizer"] = quantizer  # not a child: its parameters are the buffers of this module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` quantized."""
        return self.settled()(x)

    def settled(self) -> Quantizer:
        """The quantizer that was stored, with its parameters."""
        quantizer: Quantizer = self.__dict__["quantizer"]
        stored = self.stored
        for number, part in enumerate(parts(quantizer), 1):
            for kind in ("scale", "zero_point"):
                name = activation_name(part, kind, number)
                setattr(part, kind, stored.get(name))
        return quantizer


def activation_name(part: FakeQuantize, kind: str, number: int) -> str:
    """The name of a static parameter of an activation: behind ``input_`` or ``output_``."""
    above = number + (isinstance(part.stage.format, Block) and part.stage.format.tensor_scale)
    return kind if above == 1 else f"{kind}_{above}"


def activation_form(quantizer: Quantizer, features: int) -> Form:
    """Shape and type of the static parameters of an activation.

    Args:
        quantizer: of the activation.
        features: length of the axis that per-channel scales run along.
    """
    form: Form = {}
    for number, part in enumerate(parts(quantizer), 1):
        if part.stage.calibrated:
            shape = (features,) if isinstance(part.granularity, Channel) and not part.stage.is_block else ()
            form[activation_name(part, "scale", number)] = shape, torch.float32
            if part.stage.real_zero:
                form[activation_name(part, "zero_point", number)] = shape, torch.float32
            elif isinstance(part.stage.format, Int):
                dtype = getattr(torch, part.stage.format.code_dtype)
                form[activation_name(part, "zero_point", number)] = shape, zero_dtype(dtype)
    return form


def zero_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that zero points of activations are stored in."""
    return torch.int32 if dtype in (torch.uint16, torch.uint32) else dtype


def stored_activation(quantizer: Quantizer) -> Stored:
    """The static parameters of an activation, by name; empty where they are dynamic, or no sample reached it."""
    stored: Stored = {}
    if isinstance(quantizer, StoredScales):
        return quantizer.stored
    for number, part in enumerate(parts(quantizer), 1):
        if part.stage.calibrated and part.scale is not None and part.enabled:
            stored[activation_name(part, "scale", number)] = part.scale.float()
            if part.zero_point is not None and isinstance(part.stage.format, Int):
                dtype = torch.float32 if part.stage.real_zero else getattr(torch, part.stage.format.code_dtype)
                stored[activation_name(part, "zero_point", number)] = part.zero_point.to(zero_dtype(dtype))
    return stored
