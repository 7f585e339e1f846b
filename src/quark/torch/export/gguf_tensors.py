"""The tensors of a GGUF file: names by the ``gguf`` package, types by the scheme of each layer, bytes when written.

    int4, int3, int2 symmetric    Q4_0        MXFP4                 MXFP4
    4 bits with zero points       Q4_1        other layers          a float type, norms F32
    int8 symmetric                Q8_0        a type of GGML                        itself

Experts are stacked. Scales of GGUF are float16: a tensor with scales that float16 has not (below 6e-5 it loses digits,
below 6e-8 all) is kept as F32 instead, and named. ``FileLoss`` adds up what the bytes, decoded by the ``gguf`` package,
differ from the values that were evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.dataclass import dataclass
from quark.errors import ModelError, as_a
from quark.numerics.ggml import Ggml
from quark.numerics.ggml_bytes import BLOCK, Fields, mxfp4_block
from quark.numerics.granularity import Group
from quark.torch.export.gguf_architectures import turned_rows
from quark.torch.export.gguf_bounds import beyond
from quark.torch.export.gguf_changes import Change
from quark.torch.export.gguf_size import type_of
from quark.torch.export.gguf_types import (
    EXPERT,
    KINDS,
    GGUFTarget,
    check_alike,
    check_heads,
    check_rows,
    coded_type,
    file_names,
    float_type_of,
)
from quark.torch.export.layout import (
    CODES,
    BlockLayout,
    ElementLayout,
    GgmlLayout,
    layout_of_quantizer,
    store,
)
from quark.torch.export.stored import StoredTensor
from quark.torch.fake_quantize import Quantizer, parts
from quark.torch.layers import own_parameter
from quark.torch.quantized_layer import QuantLayer, weight_quantizer

DIGITS = 2.0**-10  # relative error of a scale that float16 holds with all its digits
CODED = 2.0**-9  # relative error of a tensor whose scales float16 has; minima of Q4_1 too
FLOAT16 = 2.0**-10  # relative error of a tensor that is kept as float16
SMALLEST = float(np.finfo(np.float16).tiny)  # the smallest float16 with all its digits
SUMMED = 1 << 16  # terms of a float32 sum
WHOLE = 1 << 16  # numbers of a tensor that is decoded as a whole
PART = 8  # of the blocks of a larger one, one of so many is decoded
SEEN = 8  # rows, from the first to the last, that the quantizer of the model rounds once more under a type of GGML
PLAIN = "linear_attn.norm.weight"  # a norm that multiplies with its weight beside others that add 1
Values = Callable[[], np.ndarray]
Made = Callable[[], tuple[np.ndarray, Values]]
Turn = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file.

    Attributes:
        name: in the file.
        kind: GGML type.
        shape: of the numbers.
        make: the data: float arrays, or bytes of blocks [rows, bytes]; and what the numbers should be.
        coded: the data are the codes that the model has; only their scales are rounded.
        scaled: scales and minima of these are multiplied.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    make: Made
    coded: bool = False
    scaled: bool = False

    def beyond(self, values: np.ndarray, apart: np.ndarray) -> int:
        """How many numbers differ by more than they may; codes lose more where minima that were rounded cancel
        steps."""
        if not self.coded:
            return beyond(self.kind, values, apart)
        return (
            0
            if self.kind == "Q4_1" or self.scaled
            else int((np.abs(apart) > np.abs(values) * np.float32(DIGITS * 1.001)).sum())
        )


def squares(values: np.ndarray) -> float:
    """Sum of squares."""
    flat = values.reshape(-1).astype(np.float32, copy=False)
    return float(sum(np.dot(part, part) for part in np.array_split(flat, -(-flat.size // SUMMED) or 1)))


@dataclass
class FileLoss:
    """How far a file is from what was evaluated.

    Attributes:
        error, total: sums of squares of the differences, and of the values, over all matrices.
        rescued: names of the tensors whose scales float16 does not hold, and that are kept as F32.
    """

    error: float = 0.0
    total: float = 0.0
    rescued: list[str] = field(default_factory=list)

    @property
    def relative(self) -> float:
        """Norm of the differences over the norm of the values."""
        return float(np.sqrt(self.error / self.total)) if self.total else 0.0

    def add(self, entry: GGUFTensor, data: np.ndarray, wanted: np.ndarray) -> None:
        """Compare the bytes of a tensor, decoded by the ``gguf`` package, with its values; of a large one, of a part.

        Raises:
            ModelError: they are further away than the type can round.
        """
        import gguf

        kind = gguf.GGMLQuantizationType[entry.kind]
        data, wanted = compared(data, wanted, max(BLOCK, gguf.GGML_QUANT_SIZES[kind][0]))
        found = data if entry.kind in ("F32", "F16") else gguf.quants.dequantize(data, kind)
        apart = found.reshape(wanted.shape) - wanted
        over = entry.beyond(wanted, apart)
        error, total = squares(apart), squares(wanted)
        if over or not error <= (CODED**2 * total if entry.coded else np.inf):
            raise ModelError(
                f"{entry.name!r} reads back with {over} of {wanted.size} numbers further from what the model computes "
                f"with than {entry.kind} allows, {math.sqrt(error / total) if total else error:.2g} of its norm; "
                f"nothing was written. Please report this; verify=False (--no-verify) writes the file as it is"
            )
        if len(entry.shape) > 1:
            self.error, self.total = self.error + error, self.total + total


def compared(data: np.ndarray, wanted: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of ``size`` numbers that are decoded, as a row of data and rows of numbers.

    All of a small tensor; of a large one the first, the last, and one of every ``PART`` at a random place. That its
    other bytes are in the file, too, their checksum says.
    """
    count = wanted.size // size
    if wanted.size <= WHOLE or wanted.size % size:
        return data, wanted
    starts = np.arange(0, count - PART + 1, PART)
    chosen = np.r_[0, starts + np.random.default_rng(0).integers(PART, size=len(starts)), count - 1]
    return data.reshape(count, -1).take(chosen, 0).reshape(1, -1), wanted.reshape(count, size).take(chosen, 0)


def entries_of(
    model: nn.Module, tensors: Sequence[tuple[str, torch.Tensor]], choice: GGUFTarget, loss: FileLoss
) -> list[GGUFTensor]:
    """The tensors of a file, experts together.

    Raises:
        ConfigError: a scheme that no type holds, or that experts do not share; the tensor is named.
    """
    found: dict[str, list[GGUFTensor]] = {}
    experts = set()
    for name, value in tensors:
        for part in turned_parts(name, choice):
            entry = entry_of(name, part, value, model, choice, loss)
            found.setdefault(entry.name, []).append(entry)
            if EXPERT.search(name):
                experts.add(entry.name)
    return [together(name, entries) if name in experts else entries[0] for name, entries in found.items()]


def turned_parts(name: str, choice: GGUFTarget) -> list[tuple[str, Turn]]:
    """The tensors of the file that one of the model is, and what each makes of its rows."""
    names, changes = file_names(name, choice), choice.row.parts_of(name).values()
    turns: list[Turn] = [partial(turned, change, choice.config) for change in changes]
    return list(zip(names, turns or [turned_rows(name, choice.config, choice.row)], strict=True))


def turned(change: Change, config: Any, rows: np.ndarray) -> np.ndarray:
    """An array, changed by a configuration."""
    return change(rows, config)


def together(name: str, entries: list[GGUFTensor]) -> GGUFTensor:
    """One tensor of those that have a name in common: the experts of a layer, in order.

    Raises:
        ConfigError: experts of several types.
    """
    kinds = {entry.kind for entry in entries}
    if len(kinds) > 1 and "F32" in kinds:  # experts that were rescued take the others along
        entries = [replace(entry, kind="F32", make=partial(as_values, entry), coded=False) for entry in entries]
    else:
        check_alike(name, kinds)

    def stacked() -> tuple[np.ndarray, Values]:
        data, values = zip(*(entry.make() for entry in entries), strict=True)
        return np.stack(data), lambda: np.stack([one() for one in values])

    coded = all(entry.coded for entry in entries)
    return GGUFTensor(name, entries[0].kind, (len(entries), *entries[0].shape), stacked, coded)


def as_values(entry: GGUFTensor) -> tuple[np.ndarray, Values]:
    """What the numbers of a tensor should be, in the place of its data."""
    values = entry.make()[1]()
    return values, lambda: values


def entry_of(
    name: str, part: tuple[str, Turn], value: torch.Tensor, model: nn.Module, choice: GGUFTarget, loss: FileLoss
) -> GGUFTensor:
    """One tensor of the file: a tensor of the model, turned, or a part of it."""
    layer_name, _, slot = name.rpartition(".")
    layer = model.get_submodule(layer_name)
    coded = isinstance(layer, QuantLayer) and layer._modules[f"{slot}_quantizer"] is not None
    (target, turn), own = part, shape_of(layer, value, slot)
    shape = turn(np.broadcast_to(np.float32(0), [size for size in own if size != 1] if len(own) > 1 else own)).shape
    factor = choice.row.factor_of(name, choice.config)
    shift = 1.0 if choice.row.shifted and name.endswith("norm.weight") and not name.endswith(PLAIN) else 0.0

    def values() -> np.ndarray:
        return multiplied(turn(values_of(layer, slot)).reshape(shape), factor) + np.float32(shift)

    def as_type(kind: str) -> GGUFTensor:
        return GGUFTensor(target, kind, shape, partial(made_of, values, kind))

    float_linear = isinstance(layer, nn.Linear) and choice.is_float and "lm_head" not in name
    wanted = choice.type_of(layer_name) if slot == "weight" and len(shape) == 2 and (coded or float_linear) else None
    if wanted is not None:
        check_rows(name, wanted, shape[-1])
        check_heads(name, wanted, choice)
        lost = wanted in KINDS and not KINDS[wanted].held(values())
        return rescue(as_type("F32"), name, loss) if lost else as_type(wanted)
    if coded and slot == "weight":
        entry = coded_entry(name, target, as_a(QuantLayer, layer), turn, values, factor) or as_type("F32")
        check_heads(name, entry.kind, choice)
        return rescue(entry, name, loss) if entry.kind == "F32" else entry
    kind = float_type_of(slot, target, shape, choice)
    return rescue(as_type("F32"), name, loss) if kind == "F16" and not near_float16(values()) else as_type(kind)


def multiplied(rows: np.ndarray, factor: np.ndarray | None) -> np.ndarray:
    """Rows times their factors."""
    return rows if factor is None else rows * factor


def rescue(entry: GGUFTensor, name: str, loss: FileLoss) -> GGUFTensor:
    """A tensor kept whole, and named."""
    loss.rescued.append(name)
    return entry


def holds(scale: np.ndarray, tolerance: float) -> bool:
    """Whether float16 has scales to within ``tolerance``; what is 0 stays 0."""
    with np.errstate(over="ignore"):
        kept = scale.astype(np.float16).astype(np.float64)
    return bool((np.abs(kept - scale) <= tolerance * np.abs(scale)).all())


def near_float16(values: np.ndarray) -> bool:
    """Whether float16 has a matrix to within what it rounds, of its norm."""
    with np.errstate(over="ignore"):
        lost = values.astype(np.float16).astype(np.float32) - values
    return bool(np.isfinite(lost).all()) and squares(lost) <= FLOAT16**2 * squares(values)


def shape_of(layer: nn.Module, value: torch.Tensor, slot: str = "weight") -> tuple[int, ...]:
    """The shape of a parameter, whatever form it is kept in."""
    quantizer = layer._modules.get(f"{slot}_quantizer")
    return quantizer.layout.shape if isinstance(quantizer, StoredTensor) else tuple(value.shape)


@torch.no_grad()
def values_of(layer: nn.Module, slot: str) -> np.ndarray:
    """float32 values of a parameter as the model computes with it, but for rounding to the model's own type."""
    value: Any = layer._parameters[slot] if slot in layer._parameters else layer._buffers[slot]  # of a router
    if isinstance(layer, QuantLayer):
        quantizer = layer._modules[f"{slot}_quantizer"]
        if isinstance(quantizer, StoredTensor):
            value = quantizer.layout.restore({**quantizer.stored, CODES: value.detach()})
        elif isinstance(quantizer, Quantizer) and (not layer.frozen or is_fixed(quantizer)):
            value = quantizer(value.detach().float())
    return value.detach().float().cpu().numpy()


def is_fixed(quantizer: Quantizer) -> bool:
    """Whether values on the grid stay where they are, as those of a frozen layer do that bfloat16 has rounded."""
    return all(part.scale is not None for part in parts(quantizer))


def made_of(values: Values, kind: str) -> tuple[np.ndarray, Values]:
    """Values as the data of a type, beside them."""
    found = values()
    return rounded(found, kind), lambda: found


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """Values as the data of a type."""
    import gguf

    if kind in KINDS:
        return KINDS[kind].data(values)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def coded_entry(
    name: str, target: str, layer: QuantLayer, turn: Turn, values: Values, factor: np.ndarray | None = None
) -> GGUFTensor | None:
    """A weight whose codes go into the file; None where float16 does not hold its scales.

    Where scales were rounded to float16 before, and codes are lost by it, the weight that they come from goes there.

    Raises:
        ConfigError: a scheme that no type holds.
        ModelError: codes are lost, and what they come from is not there.
    """
    quantizer: Any = layer.weight_quantizer
    if isinstance(quantizer, StoredTensor):
        quantizer = quantizer.quantizer(own_parameter(layer))
    shape = shape_of(layer, own_parameter(layer))
    layout = layout_of_quantizer(quantizer, shape, "order")
    kind, rows = coded_type(name, layout), turn(np.broadcast_to(np.float32(0), shape)).shape
    if isinstance(layout, GgmlLayout):
        return ggml_entry(name, target, layer, layout.row, turn, factor)
    if isinstance(layout, BlockLayout):
        return GGUFTensor(
            target, kind, rows, partial(coded_data, layer, turn, None, mxfp4_data, quantizer, layout), True
        )
    layout = as_a(ElementLayout, layout)
    scale = (
        quantizer.scale if quantizer.scale is not None else quantizer.parameters_from(layer._parameters["weight"])[0]
    )
    steps = scale.double().cpu().numpy()
    if not all(holds(steps * more, DIGITS) for more in np.unique([1.0] if factor is None else factor)):
        return None
    if wastes_codes(layer, scale, layout):
        source = source_of(layer)
        if source is None:
            raise ModelError(
                f"the scales of {name!r} are as small as float16 has them, and larger than its weights need: most of "
                f"its codes are unused. Leave it float (--exclude {name.removesuffix('.weight')}), or quantize the "
                f"float model in memory (quark torch quantize), which keeps such tensors whole"
            )
        whole = multiplied(turn(source.float().detach().cpu().numpy()).reshape(values().shape), factor)
        return GGUFTensor(target, "F32", whole.shape, lambda: (whole, lambda: whole))
    make = partial(coded_data, layer, turn, factor, integer_data, quantizer, layout)
    return GGUFTensor(target, kind, rows, make, True)


def wastes_codes(layer: QuantLayer, scale: torch.Tensor, layout: ElementLayout) -> bool:
    """Whether a scale stopped at the smallest that float16 has, above the one that its weights need.

    Such a scale leaves a group half of its codes or fewer; of weights of 1e-7, one or two.
    """
    if not bool((scale < SMALLEST).any()):
        return False
    source = source_of(layer)
    weights = torch.from_numpy(values_of(layer, "weight")) if source is None else source.float()
    steps = layout.granularity.expand(scale.to(weights), layout.shape)
    size = layout.granularity.size if isinstance(layout.granularity, Group) else layout.shape[-1]
    size = size if layout.shape[-1] % size == 0 else layout.shape[-1]
    groups, steps = (tensor.reshape(-1, size) for tensor in (weights.reshape(layout.shape), steps))
    least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    symmetric, levels = layout.stage.spec.symmetric, 2**layout.element.bits
    span = 2 * torch.maximum(-least, most) if symmetric else most - least
    small = steps[:, 0] < SMALLEST
    return bool((small & (span > 0) & (span < levels / 2 * steps[:, 0])).any())


def ggml_entry(
    name: str, target: str, layer: QuantLayer, row: Ggml, turn: Turn, factor: np.ndarray | None
) -> GGUFTensor | None:
    """A weight under a type of GGML; None where float16 does not hold its scales, and it was not rounded.

    The codes are searched for once. What they stand for is what the quantizer of the model makes of these weights by
    the same search; some rows it has to make itself, which shows other weights and another type.

    Raises:
        ModelError: only what the codes stand for is left, which would be rounded again.
    """
    source = source_of(layer)
    if source is None:
        raise ModelError(f"{name!r} is frozen, and {row.kind} would round its values again; export before freeze")
    weight = turn(source.float().detach().cpu().numpy())
    if not (row.held(weight) and row.held(multiplied(weight, factor))):
        return None

    @torch.no_grad()
    def make() -> tuple[np.ndarray, Values]:
        data, values = row.both(weight, None, factor)
        rows = np.unique(np.linspace(0, len(values) - 1, SEEN).astype(int))
        seen = turn(np.broadcast_to(np.arange(len(source))[:, None], (len(source), weight.shape[1] // BLOCK)))[rows, 0]
        again = weight_quantizer(layer)(own_parameter(layer).detach()[seen].float()).cpu().numpy()
        values[rows] = again if factor is None else again * np.broadcast_to(factor, (len(values), 1))[rows]
        return data, lambda: values

    return GGUFTensor(target, row.kind, weight.shape, make, True, factor is not None)


def source_of(layer: QuantLayer) -> torch.Tensor | None:
    """The float weight that the codes come from; None where only codes are left."""
    if layer.frozen or layer.compact or isinstance(layer.weight_quantizer, StoredTensor):
        return None
    return own_parameter(layer).detach()


def coded_data(
    layer: QuantLayer, turn: Turn, factor: np.ndarray | None, encode: Callable[..., Any], *how: Any
) -> tuple[np.ndarray, Values]:
    """The bytes of a weight that is on its grid, and the values that they stand for."""
    values = values_of(layer, "weight")
    return encode(torch.from_numpy(values), *how, turn, factor), lambda: multiplied(turn(values), factor)


def integer_data(
    values: torch.Tensor, quantizer: Any, layout: ElementLayout, turn: Turn, factor: np.ndarray | None = None
) -> np.ndarray:
    """Codes, scales and minima of a weight as bytes."""
    kind, stored = type_of((layout.stage,)), store(values, quantizer, "order", frozen=True)
    codes = layout.turn(layout.codes.get(stored[""], layout.element, layout.turned(layout.shape), "order"))
    scale, zero_point = layout.scale(stored), layout.zero_point(stored)
    tensors = (
        codes.to(torch.int32),
        layout.granularity.expand(scale, layout.shape)[:, ::BLOCK],
        layout.granularity.expand(zero_point, layout.shape)[:, ::BLOCK],
    )
    rows, steps, zeros = (turn(tensor.detach().cpu().numpy()) for tensor in tensors)
    steps = multiplied(steps, factor)
    lowest = int(layout.element.min) if kind == "Q4_1" else layout.element.middle
    return in_blocks(kind, rows - lowest, steps, -steps * (zeros - lowest))


def in_blocks(kind: str, codes: np.ndarray, steps: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Codes [rows, n] with a step and a minimum for each 32 as bytes; a type without minima takes none."""
    ones = np.ones((steps.size, 1), np.float32)
    found = Fields(steps.reshape(-1), minima.reshape(-1), ones, -ones, codes.reshape(steps.size, 1, BLOCK))
    return KINDS[kind].write(found).reshape(len(codes), -1)


def mxfp4_data(values: torch.Tensor, quantizer: Any, layout: BlockLayout, turn: Turn, _: None = None) -> np.ndarray:
    """Codes and exponents of a weight as bytes; exponents hold no factor (``check_heads``)."""
    stored = store(values, quantizer, "order", frozen=True)
    codes = layout.codes.get(stored[""], layout.block.element, layout.shape, "order")
    return mxfp4_block(turn(codes.detach().cpu().numpy()), turn(stored["scale"].detach().cpu().numpy()))
