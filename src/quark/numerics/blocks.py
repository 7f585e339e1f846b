"""Formats whose scale comes from the data: blocks of elements along one axis that share an exponent or a small scale.

    step  = scale(largest magnitude of the block) * unit        x is stored as the element  e = round(x / step)

    MX          OCP Microscaling v1.0: 32 elements, E8M0 scale; ``unit`` of MXINT8 is 2**-6
    BFP16       block floating point: 8 elements of 8 bits (codes -127..127) and a shared exponent, unit 2**-6
    MX4/6/9     two levels (Rouhani et al., "With Shared Microexponents", ISCA 2023): 16 elements share an exponent and
                each pair one bit that lowers it; m = 2, 4, 7 mantissa bits, unit 2**(1 - m)
    NVFP4       16 elements FP4, E4M3 scale, under one float32 scale per tensor (largest / (448 * 6))
    AMD FP4     16 or 32 elements FP4, unsigned E5M3 scale

Infinities and NaN do not count for the scale and are copied (``nonfinite="copy"``, what the block operators do; OCP MX
leaves it open), or make their block NaN. A short last block is a block. A block of zeros stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from math import inf, nan, prod
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError
from quark.numerics.array import (
    INFINITY,
    MAGNITUDE,
    Array,
    Operand,
    Same,
    as_array,
    as_parameter,
    block_max,
    cast,
    chunk_size,
    empty,
    float32,
    from_bits,
    is_torch,
    maybe,
    namespace,
    pow2,
    repeat,
    shared,
    spread,
    to_bits,
)
from quark.numerics.chunks import Index, chunks, like_input, quiet
from quark.numerics.elements import ELEMENTS, Element, Int
from quark.numerics.granularity import Group, normal_axis, pad
from quark.numerics.rounding import Rounding, Rule, noise_of, rule_of
from quark.numerics.scales import SCALE_RULES

SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
SHORT_LOOP = 64  # values that NumPy handles in about the time it takes to start
BLOCK_AXIS = 2  # the elements of a block, in the view [outer, blocks, elements, inner]


class Encoded(NamedTuple):
    """A tensor in a block format.

    Attributes:
        codes: element codes, of the shape of the tensor.
        scale: codes of the block scales (E8M0, E4M3 or E5M3; uint8), the axis divided by the block and rounded up.
        shift: how far each sub-block lowers the exponent (uint8), or None for one-level formats.
    """

    codes: Same
    scale: Same
    shift: Same | None


@dataclass(frozen=True)
class Block:
    """A format of blocks along one axis.

    Attributes:
        name: its name in ``FORMATS``.
        element: format of the elements.
        size: elements per block.
        rule: name of the row of ``SCALE_RULES`` that gives a block's scale.
        unit: value of the element 1 at scale 1.
        narrow: the lowest integer code is not used.
        carry: a block whose largest element rounds beyond the codes doubles its scale instead of clipping.
        sub_block, shift_bits: elements per sub-block and bits of its own shift (two-level formats).
        tensor_scale: the format sits under one float32 scale per tensor.
        nonfinite: "copy" or "nan".
    """

    name: str
    element: Element
    size: int
    rule: str = "e8m0_floor"
    unit: float = 1.0
    narrow: bool = False
    carry: bool = False
    sub_block: int = 0
    shift_bits: int = 0
    tensor_scale: bool = False
    nonfinite: str = "copy"

    onnx_type = torch_dtype = ml_dtype = None
    has_nan = has_zero_point = False
    middle = 0
    work_dtype, zero_dtype = "float32", "int32"

    @property
    def bits(self) -> float:
        """Bits per value, the shares of scale and shift included."""
        return self.element.bits + 8 / self.size + (self.shift_bits / self.sub_block if self.shift_bits else 0)

    @property
    def max(self) -> float:
        """The largest value: that of the element at the largest scale."""
        storage = SCALE_RULES[self.rule].storage
        return self.element.max * self.unit * (storage.max if storage is not None else 1.0)

    @property
    def min(self) -> float:
        """The lowest value at the largest scale."""
        return -self.max

    @property
    def unit_scale(self) -> bool:
        """Whether the format needs no scale from outside."""
        return not self.tensor_scale

    @property
    def code_dtype(self) -> str:
        """The type of element codes."""
        return self.element.code_dtype

    @property
    def rounding_bits(self) -> int:
        """Those of the element."""
        return self.element.rounding_bits

    def divisor(self, symmetric: bool, narrow: bool) -> float:
        """The largest value: amax / divisor is the scale of the tensor."""
        return self.max

    def round(
        self, x: Array, axis: int = -1, rounding: Rounding = "half_even", tensor_scale: Operand | None = None
    ) -> Same:
        """``x`` quantized and dequantized, in the type of ``x``.

        Args:
            x: any shape; a scalar is a block of one.
            axis: along which blocks are taken.
            rounding: of the elements.
            tensor_scale: the scale above the block scales, for a format that has one; None takes it from ``x``.
        """
        array = folded(x, axis)
        above = shared(self.above(array, tensor_scale))
        out = empty(tuple(array.shape), "float32", array)
        with quiet():
            for run, index, rule in walk(array, self.size, rounding):
                part = gathered(float32(shared(run.view(array)[index])))
                target = shared(run.view(out)[index])
                values = target if part.shape == target.shape else empty(part.shape, "float32", part)
                self.fill(values, part, self.levels(part, rule, above), rule)
                scatter(values, target)
        return like_input(out.reshape(tuple(as_array(x).shape)), x)

    def encode(
        self, x: Array, axis: int = -1, rounding: Rounding = "half_even", tensor_scale: Operand | None = None
    ) -> Encoded:
        """``x`` as codes of elements, scales and shifts; arguments as in ``round``.

        Raises:
            DataError: ``x`` has an infinity or a NaN, which a block cannot store beside numbers.
        """
        array, shape = folded(x, axis), tuple(as_array(x).shape) or (1,)
        above = shared(self.above(array, tensor_scale))
        out = self.empty_codes(array)
        with quiet():
            for run, index, rule in walk(array, self.size, rounding):
                part = gathered(float32(shared(run.view(array)[index])))
                levels = self.levels(part, rule, above)
                if levels.special and bool((levels.raw >= INFINITY).any()):
                    raise DataError(f"{self.name} cannot store an infinity or a NaN, and the tensor has one")
                if self.carry and bool((levels.scale > self.storage.max).any()):
                    raise DataError(f"{self.name}: a block near the largest float32 needs a scale above 2**127")
                scatter(self.element.encode(self.snap(part, levels, rule)), shared(run.view(out.codes)[index]))
                scatter(self.storage.encode(levels.scale), shared(run.view(out.scale, self.size)[index]))
                if out.shift is not None:
                    scatter(cast(levels.shift, "uint8"), shared(run.view(out.shift, self.sub_block)[index]))
        scale = out.scale.reshape(Group(axis, self.size).grid(shape))
        shift = None if out.shift is None else out.shift.reshape(Group(axis, self.sub_block).grid(shape))
        return Encoded(out.codes.reshape(shape), scale, shift)

    def decode(self, encoded: Encoded, axis: int = -1, tensor_scale: Operand | None = None) -> Same:
        """float32 values of ``encoded``; ``axis`` and ``tensor_scale`` as they were encoded with."""
        shape = tuple(encoded.codes.shape)
        with quiet():
            step = float32(self.storage.decode(encoded.scale)) * self.unit
            if tensor_scale is not None:
                step = step * cast(as_parameter(tensor_scale, step), "float32")
            step = Group(axis, self.size).expand(step, shape)
            if encoded.shift is not None:
                step = step * pow2(-Group(axis, self.sub_block).expand(cast(encoded.shift, "int32"), shape))
            return float32(self.element.decode(encoded.codes)) * step

    def steps(self, x: Array, axis: int = -1, tensor_scale: Operand | None = None) -> Same:
        """The value of the element 1 at each element of ``x``: what ``round`` divides by; float32 of the same shape."""
        array = folded(x, axis)
        above = self.above(array, tensor_scale)
        out = empty(tuple(array.shape), "float32", array)
        with quiet():
            for run, index, rule in walk(array, self.size, "half_even"):
                run.view(out)[index] = self.levels(float32(run.view(array)[index]), rule, above).step
        return out.reshape(tuple(as_array(x).shape))

    @property
    def storage(self) -> Element:
        """The format of the block scales."""
        storage = SCALE_RULES[self.rule].storage
        if storage is None:
            raise ConfigError(f"{self.name}: block scales of rule {self.rule!r} have no 8-bit format")
        return storage

    def above(self, x: Array, tensor_scale: Operand | None) -> Same:
        """The scale over all blocks: as given, or largest finite magnitude / ``max``; None for a one-scale format."""
        if not self.tensor_scale:
            return None
        if tensor_scale is not None:
            return cast(as_parameter(tensor_scale, x), "float32").reshape(())
        xp = namespace(x)
        scale = largest_finite(x) / as_parameter(self.max, x)
        return cast(xp.where(scale < SMALLEST_NORMAL, xp.ones_like(scale), scale), "float32")

    def levels(self, x: Array, rule: Rule, above: Array | None) -> Levels:
        """Scales, shifts and steps of the blocks of float32 ``x`` [outer, blocks, elements, ..]."""
        sizes = to_bits(x) & MAGNITUDE
        tops = sub_max(sizes, self.sub_block)
        raw = amax = block_max(tops, BLOCK_AXIS)
        special = maybe(amax >= INFINITY)
        if special:
            sizes = namespace(x).where(sizes >= INFINITY, 0 * sizes, sizes)
            tops = sub_max(sizes, self.sub_block)
            amax = block_max(tops, BLOCK_AXIS)
        scale = self.scale(from_bits(amax), above)
        step = scale * self.unit if above is None else scale * above
        if self.carry:
            finite = namespace(x).where(from_bits(sizes) == abs(x), x, 0.0) if special else x
            raised = 1 + cast(block_max(rule(finite / step), BLOCK_AXIS) > self.element.max, "float32")
            scale, step = scale * raised, step * raised
        if not self.sub_block:
            return Levels(scale, None, spread(step, tuple(x.shape)), raw, special, False)
        shift, step = self.second_level(amax, tops)
        step = repeat(step, self.sub_block, BLOCK_AXIS)[:, :, : x.shape[BLOCK_AXIS]]
        return Levels(scale, shift, step, raw, special, maybe((amax > 0) & (amax < 32 << 23)))

    def second_level(self, amax: Array, tops: Array) -> tuple[Same, Same]:
        """Shifts and steps of the sub-blocks whose largest magnitudes have the bits ``tops``."""
        xp = namespace(tops)
        block = amax & INFINITY
        lowest = xp.clip(block - ((1 << self.shift_bits) - 1 << 23), 1 << 23, INFINITY)
        own = xp.maximum(tops & INFINITY, spread(lowest, tuple(tops.shape)))
        return xp.clip(block - own, 0, INFINITY) >> 23, from_bits(own) * self.unit

    def scale(self, amax: Array, above: Array | None) -> Same:
        """The block scales for largest magnitudes ``amax``."""
        rule, largest = SCALE_RULES[self.rule], self.element.max * self.unit
        return rule.of(amax, largest if above is None else largest * above, self.element.rounding_bits)

    def snap(self, x: Same, levels: Levels, rule: Rule) -> Same:
        """Elements of float32 ``x``."""
        if levels.tiny:
            x = namespace(x).where(abs(x) < SMALLEST_NORMAL, 0 * x, x)
        return self.element.snap(x / levels.step, 0, rule, self.narrow)

    def fill(self, out: Array, x: Array, levels: Levels, rule: Rule) -> None:
        """float32 ``x`` quantized and dequantized into ``out``, infinities and NaN by ``nonfinite``."""
        xp = namespace(x)
        elements = self.snap(x, levels, rule)
        xp.multiply(elements, levels.step, out=out)
        if levels.special and self.nonfinite == "nan":
            out[...] = xp.where(levels.raw >= INFINITY, nan, out)
        elif levels.special:
            out[...] = xp.where(xp.isfinite(x), out, x)

    def empty_codes(self, x: Array) -> Encoded:
        """Arrays for the codes of folded ``x``."""
        shape = tuple(x.shape)
        shift = empty(Group(1, self.sub_block).grid(shape), "uint8", x) if self.sub_block else None
        return Encoded(empty(shape, self.code_dtype, x), empty(Group(1, self.size).grid(shape), "uint8", x), shift)


class Levels(NamedTuple):
    """What the blocks of a chunk share."""

    scale: Same  # per block
    shift: Same  # per sub-block
    step: Same  # broadcasts to the elements
    raw: Same  # bits of the largest magnitude, infinity and NaN included
    special: bool  # whether there may be an infinity or a NaN
    tiny: bool  # whether subnormal inputs, which count as 0, could give another code


class Run(NamedTuple):
    """Equally long blocks of a folded tensor: ``number`` of ``length`` elements from ``start`` on."""

    start: int
    number: int
    length: int

    def view(self, array: Array, every: int = 1) -> Same:
        """That part of ``array``, one value per ``every`` elements, as [outer, number, length / every, ..]."""
        per_block = -(-self.length // every)
        begin = self.start // every
        part = array[:, begin : begin + self.number * per_block]
        return part.reshape((array.shape[0], self.number, per_block, *array.shape[2:]))


def walk(x: Array, size: int, rounding: Rounding) -> Iterator[tuple[Run, Index, Rule]]:
    """Chunks of folded ``x`` that cut no block, each as blocks, an index into their view, and its rounding rule."""
    count, rest = divmod(x.shape[1], size)
    noise = noise_of(rounding, tuple(x.shape), x)
    for run in (Run(0, count, size),) * (count > 0) + (Run(count * size, 1, rest),) * (rest > 0):
        shape = tuple(run.view(x).shape)
        for index in chunks(shape, chunk_size(x), BLOCK_AXIS):
            yield run, index, rule_of(rounding, None if noise is None else gathered(shared(run.view(noise)[index])))


def gathered(part: Array) -> Same:
    """Blocks [outer, blocks, elements, inner] as [1, 1, elements, all the rest] where NumPy would loop over few values.

    The 3x3 positions of a kernel are such an inner axis: half of the time goes into starting loops of nine.
    """
    if is_torch(part) or part.ndim < 4 or part.shape[-1] >= SHORT_LOOP:
        return part
    return np.ascontiguousarray(part.transpose(2, 0, 1, 3)).reshape((1, 1, part.shape[2], -1))


def scatter(values: Same, target: Same) -> None:
    """``values``, computed from ``gathered`` blocks (or from ungathered ones), into the view ``target``."""
    if values is target:
        return
    if values.shape != target.shape:
        outer, blocks, elements, inner = target.shape
        values = values.reshape((elements, outer, blocks, inner)).transpose(1, 2, 0, 3)
    target[...] = values


def largest_finite(x: Array) -> Same:
    """The largest finite magnitude of ``x`` (any shape; 0 of nothing), as a scalar beside it."""
    tops = [as_parameter(0.0, x)]
    for index in chunks(tuple(x.shape), chunk_size(x)) if len(x.reshape(-1)) else ():
        sizes = abs(float32(shared(x[index])))
        top = sizes.max()
        if maybe(~(top < inf)):
            xp = namespace(sizes)
            top = xp.where(sizes < inf, sizes, xp.zeros_like(sizes)).max()
        tops.append(as_parameter(top, x))
    return max(tops) if len(tops) != 2 else tops[1]  # one chunk: nothing to compare, so a GPU need not be waited for


def folded(x: Array, axis: int) -> Same:
    """``x`` with ``axis`` as axis 1: [outer, n], or [outer, n, inner] where axes follow that are not all 1."""
    x = as_array(x)
    shape = tuple(x.shape) or (1,)
    axis = normal_axis(axis, shape)
    inner = prod(shape[axis + 1 :])
    return x.reshape((prod(shape[:axis]), shape[axis], *([inner] if inner != 1 else [])))


def sub_max(sizes: Array, length: int) -> Same:
    """Maxima of runs of ``length`` elements (0: ``sizes`` itself) of [outer, blocks, elements, ..]."""
    if not length:
        return sizes
    outer, blocks, elements, *inner = sizes.shape
    runs = -(-elements // length)
    full = pad(sizes, (outer, blocks, runs * length, *inner)).reshape((outer, blocks, runs, length, *inner))
    return block_max(full, BLOCK_AXIS + 1).reshape((outer, blocks, runs, *inner))


INT8, INT5, INT3 = ELEMENTS["int8"], Int("int5", 5), Int("int3", 3)
FP4, E3M2, E2M3 = ELEMENTS["fp4_e2m1"], ELEMENTS["fp6_e3m2"], ELEMENTS["fp6_e2m3"]
E4M3, E5M2 = ELEMENTS["fp8_e4m3"], ELEMENTS["fp8_e5m2"]

MX = (
    Block("mxint8", INT8, 32, unit=2.0**-6),
    Block("mxfp8_e4m3", E4M3, 32),
    Block("mxfp8_e5m2", E5M2, 32),
    Block("mxfp6_e3m2", E3M2, 32),
    Block("mxfp6_e2m3", E2M3, 32),
    Block("mxfp4", FP4, 32),
)
ROWS = (
    *MX,
    *(replace(row, name=f"{row.name}_even", rule="e8m0_even") for row in MX),
    *(replace(row, name=f"{row.name}_ceil", rule="e8m0_ceil") for row in MX),
    Block("bfp16", INT8, 8, unit=2.0**-6, narrow=True),
    Block("mx4", INT3, 16, unit=2.0**-1, narrow=True, sub_block=2, shift_bits=1),
    Block("mx6", INT5, 16, unit=2.0**-3, narrow=True, sub_block=2, shift_bits=1),
    Block("mx9", INT8, 16, unit=2.0**-6, narrow=True, sub_block=2, shift_bits=1),
    Block("nvfp4", FP4, 16, "e4m3", tensor_scale=True),
    Block("amdfp4", FP4, 16, "e5m3"),
    Block("amdfp4_g32", FP4, 32, "e5m3"),
)

BLOCKS: dict[str, Block] = {row.name: row for row in ROWS}
#: Rules that scales of blocks follow; any other rule is one for the scale above the blocks.
BLOCK_RULES = tuple(sorted({row.rule for row in ROWS}))


#: What makes a row of a block, but for its name and length.
_WHAT = attrgetter(*(one.name for one in fields(Block) if one.name not in ("name", "size")))


def named(block: Block) -> Block:
    """The row of ``BLOCKS`` that ``block`` is one of: everything equal but, where no row has it, the block length.

    Raises:
        ConfigError: no row has such scales.
    """
    what = _WHAT(block)
    kin = [row for row in BLOCKS.values() if _WHAT(row) == what]
    if not kin:
        raise ConfigError(f"no block format has the elements of {block.name!r} under {block.rule} scales")
    return min(kin, key=lambda row: (row.size != block.size, row.name != block.name))
