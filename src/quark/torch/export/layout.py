"""A quantized tensor as the tensors of a file, and back: ``store``, ``form`` (shapes and types only), ``restore``.

    (no suffix)   codes, packed as ``quark.torch.export.storage`` says
    scale         of the first stage, or of the blocks of a block format
    scale_2       of the second stage; above the blocks (NVFP4); bits that lower the exponents of pairs (MX6, MX9)
    zero_point    beside integers, packed like the codes; float32 where zero points are real

Scales are float32, or the type of the rule that chose them: E8M0 and E5M3 as bytes, E4M3, float16, bfloat16. Values
come back bit for bit as ``FakeQuantize`` makes them: the codes, the scales and the arithmetic are the same.

Two stages in a row (int4 on FP8): codes are those of the second stage. Where the first has one scale, that of the
second is stored relative to it (value = code * scale_2 * scale); else as it is.

The layouts are those of the peer where it has one that can be read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import torch

from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError, as_a
from quark.numerics.affine import Coding, axis_of
from quark.numerics.blocks import Block, Encoded
from quark.numerics.elements import ELEMENTS, Element, Int
from quark.numerics.ggml import Ggml
from quark.numerics.granularity import Granularity, Group, normal_axis
from quark.numerics.scales import SCALE_RULES
from quark.torch.export.storage import SHIFTS, Shape, Storage, storage_of
from quark.torch.fake_quantize import FakeQuantize, Quantizer, parts
from quark.torch.stage import Stage, Stages

Stored: TypeAlias = dict[str, torch.Tensor]
Form: TypeAlias = dict[str, tuple[Shape, torch.dtype]]
CODES = ""
FLOAT32_RULES = ("float32", "power_of_two", "int16")
BITS = ELEMENTS["uint8"]  # what the exponents of pairs are, once unpacked


@dataclass(frozen=True)
class Layout:
    """The stored form of one stage of one tensor.

    Attributes:
        stage: how the tensor is quantized.
        shape: of the tensor.
        pack_method: "reorder" or "order".
        index: number of its first scale: 1, or 2 behind another stage.
    """

    stage: Stage
    shape: Shape
    pack_method: str
    index: int

    @property
    def granularity(self) -> Granularity:
        """Which elements share a scale."""
        return self.stage.spec.granularity

    def name(self, kind: str, above: int = 0) -> str:
        """``scale``, ``scale_2``, ..; ``above`` counts further scales of the same stage."""
        number = self.index + above
        return kind if number == 1 else f"{kind}_{number}"

    def form(self) -> Form:
        """Shape and type of every stored tensor."""
        raise NotImplementedError

    def store(self, x: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None) -> Stored:
        """``x`` under the parameters of its ``FakeQuantize``."""
        raise NotImplementedError

    def restore(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 values of stored tensors."""
        raise NotImplementedError


class ElementLayout(Layout):
    """Codes with scales from outside, or none."""

    @property
    def element(self) -> Element:
        """The format of the codes."""
        if isinstance(self.stage.format, Block):
            raise TypeError(f"{self.stage.format.name} has blocks, and is not an element format")
        return self.stage.format

    @property
    def codes(self) -> Storage:
        """How codes are stored."""
        return storage_of(self.element)

    @property
    def transposed(self) -> bool:
        """Whether codes, scales and zero points are stored [in, out]."""
        grouped = isinstance(self.granularity, Group) and len(self.shape) == 2 and self.codes.transposes
        return grouped and normal_axis(axis_of(self.granularity), self.shape) == 1

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor as it is stored, and back."""
        return x.T if self.transposed and x.dim() == 2 else x

    def turned(self, shape: Shape) -> Shape:
        """A shape as it is stored."""
        return shape[::-1] if self.transposed else shape

    @property
    def parameter_shape(self) -> Shape:
        """Shape of scales and zero points."""
        return self.granularity.parameter_shape(self.shape)

    @property
    def has_zero_point(self) -> bool:
        """Whether zero points are stored."""
        return isinstance(self.element, Int)

    def form(self) -> Form:
        """Shape and type of every stored tensor."""
        form: Form = {CODES: (self.codes.shape(self.turned(self.shape)), self.codes.dtype)}
        if self.stage.needs_range:
            shape = self.turned(self.parameter_shape)
            form[self.name("scale")] = shape, scale_dtype(self.stage)
            if self.stage.real_zero:
                form[self.name("zero_point")] = shape, torch.float32
            elif self.has_zero_point:
                form[self.name("zero_point")] = self.codes.shape(shape), self.codes.dtype
        return form

    def store(self, x: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None) -> Stored:
        """``x`` under its parameters."""
        if scale is None or zero_point is None:
            codes = self.element.encode(self.element.round(x.float(), self.stage.spec.rounding))
            return {CODES: self.codes.put(codes, self.pack_method)}
        shape = self.parameter_shape
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
        stored = {
            CODES: self.codes.put(self.turn(self.encode(x, scale, zero_point)), self.pack_method),
            self.name("scale"): put_scale(self.turn(scale), self.stage).contiguous(),
        }
        if self.has_zero_point:
            stored[self.name("zero_point")] = self.put_zeros(self.turn(zero_point))
        return stored

    def encode(self, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        """The codes of ``x``."""
        if self.stage.real_zero:
            x, zero_point = x.float() - self.offset(scale, zero_point), self.lowest(scale)
        spec = self.stage.spec
        coding = Coding(self.element, self.granularity, spec.rounding, spec.narrow_codes)
        return coding.quantize(x, scale, zero_point)

    def offset(self, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        """The value of the lowest code, under real zero points, per element."""
        return self.granularity.expand((self.element.min - zero_point) * scale, self.shape)

    def lowest(self, scale: torch.Tensor) -> torch.Tensor:
        """The lowest code, per scale."""
        return torch.full_like(scale, self.element.min, dtype=torch.int32)

    def put_zeros(self, zero_point: torch.Tensor) -> torch.Tensor:
        """Zero points as they are stored."""
        if self.stage.real_zero:
            return zero_point.float().contiguous()
        return self.codes.put(zero_point.to(getattr(torch, self.element.code_dtype)), self.pack_method)

    def restore(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 values."""
        shape = self.turned(self.shape)
        codes = self.turn(self.codes.get(stored[CODES], self.element, shape, self.pack_method))
        if not self.stage.needs_range:
            return self.element.decode(codes).float()
        return self.values(codes, self.scale(stored), self.zero_point(stored))

    def values(self, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        """float32 values of codes."""
        if not self.stage.real_zero:
            rule = self.stage.grid.scale_rule
            return Coding(self.element, self.granularity, scale_rule=rule).dequantize(codes, scale, zero_point)
        above = Coding(self.element, self.granularity).dequantize(codes, scale, self.lowest(scale))
        return above + self.offset(scale, zero_point)

    def scale(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 scales of stored tensors."""
        return self.turn(get_scale(stored[self.name("scale")], self.stage))

    def zero_point(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Zero points of stored tensors: int32, or float32 where they are real."""
        if not self.has_zero_point:
            return torch.zeros(self.parameter_shape, dtype=torch.int32, device=stored[CODES].device)
        kept = stored[self.name("zero_point")]
        if self.stage.real_zero:
            return self.turn(kept)
        shape = self.turned(self.parameter_shape)
        return self.turn(self.codes.get(kept, self.element, shape, self.pack_method)).to(torch.int32)


class BlockLayout(Layout):
    """Codes with the scales of their blocks."""

    @property
    def block(self) -> Block:
        """The format."""
        return as_a(Block, self.stage.format)

    @property
    def codes(self) -> Storage:
        """How codes are stored."""
        return storage_of(self.block.element)

    def grid(self, length: int) -> Shape:
        """Number of runs of ``length`` elements on each axis."""
        return Group(axis_of(self.granularity), length).grid(self.shape)

    def form(self) -> Form:
        """Shape and type of every stored tensor."""
        form: Form = {
            CODES: (self.codes.shape(self.shape), self.codes.dtype),
            self.name("scale"): (self.grid(self.block.size), storage_of(self.block.storage).dtype),
        }
        if self.block.sub_block:
            form[self.name("scale", 1)] = SHIFTS.shape(self.grid(self.block.sub_block)), SHIFTS.dtype
        if self.block.tensor_scale:
            form[self.name("scale", 1)] = (), torch.float32
        return form

    def store(self, x: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None) -> Stored:
        """``x`` under the scale of the tensor, if the format has one."""
        encoded = self.block.encode(x, axis_of(self.granularity), self.stage.spec.rounding, scale)
        stored = {
            CODES: self.codes.put(encoded.codes, self.pack_method),
            self.name("scale"): storage_of(self.block.storage).put(encoded.scale, self.pack_method),
        }
        if encoded.shift is not None:
            stored[self.name("scale", 1)] = SHIFTS.put(encoded.shift, self.pack_method)
        if scale is not None:
            stored[self.name("scale", 1)] = scale.float().reshape(())
        return stored

    def restore(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 values."""
        above = stored[self.name("scale", 1)] if self.block.tensor_scale else None
        return self.block.decode(self.encoded(stored), axis_of(self.granularity), above)

    def encoded(self, stored: Mapping[str, torch.Tensor]) -> Encoded:
        """Codes, block scales and shifts."""
        codes = self.codes.get(stored[CODES], self.block.element, self.shape, self.pack_method)
        shift = None
        if self.block.sub_block:
            shift = SHIFTS.get(stored[self.name("scale", 1)], BITS, self.grid(self.block.sub_block), self.pack_method)
        return Encoded(codes, stored[self.name("scale")].view(torch.uint8), shift)


class GgmlLayout(Layout):
    """Bytes of GGML; they are written to GGUF files alone, so only their size is asked for here."""

    @property
    def row(self) -> Ggml:
        """The type."""
        return as_a(Ggml, self.stage.format)

    def form(self) -> Form:
        """Shape and type of the bytes."""
        *rows, length = self.shape
        return {CODES: ((*rows, length // self.row.size * self.row.nbytes), torch.uint8)}

    def store(self, x: torch.Tensor, scale: torch.Tensor | None, zero_point: torch.Tensor | None) -> Stored:
        """Refused."""
        raise ConfigError(f"{self.row.kind} is a type of GGUF, and no other format has it: write it with --format gguf")


class PairLayout:
    """Two stages in a row; ``second`` has the codes, ``first`` its scale."""

    def __init__(self, first: Layout, second: Layout) -> None:
        self.first, self.second = first, second

    @property
    def relative(self) -> bool:
        """Whether the scale of the second stage is stored relative to that of the first."""
        scale, stages = self.first.form().get("scale"), (self.first.stage, self.second.stage)
        return (
            scale is not None
            and scale[0] == ()
            and all(stage.calibrated and scale_element(stage) is None for stage in stages)
        )

    @property
    def shape(self) -> Shape:
        """Of the tensor."""
        return self.second.shape

    @property
    def pack_method(self) -> str:
        """Of the codes."""
        return self.second.pack_method

    def form(self) -> Form:
        """Shape and type of every stored tensor."""
        return {**self.first.form(), **self.second.form()}

    def restore(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """float32 values."""
        return self.second.restore(self.absolute(stored))

    def absolute(self, stored: Mapping[str, torch.Tensor]) -> Stored:
        """The stored tensors with the scale of the second stage as it is."""
        if not self.relative:
            return dict(stored)
        name = self.second.name("scale")
        return {**stored, name: stored[name] * get_scale(stored["scale"], self.first.stage)}


def layouts_of(layout: Layout | PairLayout) -> tuple[Layout, ...]:
    """Of each stage."""
    return (layout.first, layout.second) if isinstance(layout, PairLayout) else (layout,)


def layout_of(stages: Stages, shape: Shape, pack_method: str = "reorder") -> Layout | PairLayout:
    """The stored form of a tensor of ``shape`` under ``stages``."""
    layouts: list[Layout] = []
    for stage in stages:
        kinds = {Ggml: GgmlLayout, Block: BlockLayout}
        cls = next((one for kind, one in kinds.items() if isinstance(stage.format, kind)), ElementLayout)
        levels = [name for layout in layouts for name in layout.form() if name.startswith("scale")]
        index = 1 if not layouts else max(len(levels), 1) + 1
        layouts.append(cls(stage, tuple(shape), pack_method, index))
    return layouts[0] if len(layouts) == 1 else PairLayout(*layouts)


def layout_of_quantizer(
    quantizer: Quantizer, shape: Shape, pack_method: str = "reorder", rounding: str | None = None
) -> Layout | PairLayout:
    """The stored form of a tensor of ``shape`` under a quantizer; with another ``rounding`` for values on its grid."""
    return layout_of(tuple(nearest(part.stage, rounding) for part in parts(quantizer)), shape, pack_method)


def nearest(stage: Stage, rounding: str | None) -> Stage:
    """``stage`` with another rounding, unless it is None."""
    return stage if rounding is None else replace(stage, spec=replace(stage.spec, rounding=rounding))


@torch.no_grad()
def store(x: torch.Tensor, quantizer: Quantizer, pack_method: str = "reorder", frozen: bool = False) -> Stored:
    """``x`` as ``quantizer`` makes it, in the tensors of a file.

    Args:
        x: float values; NaN and infinities are errors.
        quantizer: with its ranges (static ones are there after ``calibrate_with``; dynamic ones are found here).
        pack_method: "reorder" or "order".
        frozen: ``x`` holds quantized values already.

    Returns:
        Stored tensors by suffix: ``""`` for the codes, ``scale``, ``zero_point``, ``scale_2``, ...

    Raises:
        ModelError: frozen values that the format would round again.
    """
    x, stages = x.detach(), list(parts(quantizer))
    layout = layout_of_quantizer(quantizer, tuple(x.shape), pack_method, "half_even" if frozen else None)
    if isinstance(layout, PairLayout):
        return store_pair(x, layout, stages, frozen)
    stored = layout.store(x, *parameters_of(stages[0], x))
    if frozen and isinstance(layout, BlockLayout) and not torch.equal(layout.restore(stored).to(x.dtype), x):
        raise ModelError(
            f"{stages[0].tensor_name}: the frozen values do not lie on the grid of {layout.block.name} that they ask "
            f"for; export before freeze, or freeze with quantize=False"
        )
    return stored


def parameters_of(part: FakeQuantize, x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scale and zero point of a stage, found in ``x`` where they are not fixed."""
    return (part.scale, part.zero_point) if part.scale is not None else part.parameters_from(x)


def store_pair(x: torch.Tensor, layout: PairLayout, stages: list[FakeQuantize], frozen: bool) -> Stored:
    """``x`` under two stages."""
    first, second = stages
    made = layout.first.store(x, *parameters_of(first, x))
    within = x if frozen else first.quantized(x)
    stored = {**made, **layout.second.store(within, *parameters_of(second, within))}
    if layout.relative:
        name = layout.second.name("scale")
        stored[name] = quotient(stored[name], get_scale(stored["scale"], first.stage))
    return stored


def quotient(product: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The float32 that times ``factor`` gives ``product``; it lies within two steps of their ratio."""
    best = low = high = product / factor
    for _ in range(2):
        low, high = (torch.nextafter(x, torch.full_like(x, to)) for x, to in ((low, 0.0), (high, torch.inf)))
        for near in (low, high):
            best = torch.where(near * factor == product, near, best)
    return best


def scale_element(stage: Stage) -> Element | None:
    """The format of stored scales, or None for float32."""
    rule = stage.spec.scale_rule
    return None if rule in FLOAT32_RULES else SCALE_RULES[rule].storage


def scale_dtype(stage: Stage) -> torch.dtype:
    """The type of stored scales of a stage without blocks."""
    element = scale_element(stage)
    return torch.float32 if element is None else storage_of(element).dtype


def put_scale(scale: torch.Tensor, stage: Stage) -> torch.Tensor:
    """Scales as they are stored."""
    element = scale_element(stage)
    return scale.float() if element is None else element.encode(scale.float()).view(storage_of(element).dtype)


def get_scale(stored: torch.Tensor, stage: Stage) -> torch.Tensor:
    """float32 scales of stored ones."""
    element = scale_element(stage)
    return stored if element is None else element.decode(stored.view(getattr(torch, element.code_dtype))).float()
