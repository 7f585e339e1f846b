"""What was written is read back, before the folder appears: every quantized tensor is decoded by the rules of its
format, from nothing but the file, and compared with the value that the model in memory computes with.

A difference is an error, and the folder does not appear. Tensors that stay float are compared as they are. Of large
matrices some windows of rows are decoded, so that the check costs little beside the export.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ModelError
from quark.numerics.granularity import Block2D
from quark.torch.export.checkpoint import opened, tensor_of, weight_files
from quark.torch.export.decoded import Foreign
from quark.torch.export.layout import layout_of_quantizer
from quark.torch.export.original import Names
from quark.torch.export.shards import MAKERS, Item
from quark.torch.export.state import named
from quark.torch.export.stored import StoredTensor
from quark.torch.fake_quantize import parts
from quark.torch.quantized_layer import OWN, QuantLayer, quantized_layers

WHOLE = 1 << 16  # elements of a tensor that is decoded as a whole
PART = 128  # of a larger one every window is this part of the rows
ROWS = 16  # windows are multiples of it: of words of codes


def verify(
    folder: Path,
    model: nn.Module,
    items: Iterable[Item],
    names: Names,
    pack_method: str,
    foreign: Mapping[str, Foreign] | None = None,
) -> None:
    """Compare the files of ``folder`` with ``model``.

    Args:
        folder: what was written.
        model: quantized.
        items: that were written; those of quantized weights are decoded, of others the tensors are compared.
        names: of the tensors outside.
        pack_method: order of 4-bit codes in a word.
        foreign: the weights of a format of another program, by the names in memory of their layers; others are
            compared as they are. None: quantized weights are codes of our own format.

    Raises:
        ModelError: a tensor that is not what the model computes with; it is named.
    """
    reader = Reader(folder)
    coded: set[str] = set()
    tasks: list[Callable[[], None]] = []
    for name, layer, slot in coded_slots(model) if foreign is None else ():
        prefix = f"{names.layer(name)}.{slot}"
        task = Decoded(reader, prefix, layer, slot, pack_method)
        coded |= set(task.wanted)
        tasks.append(task)
    for name, layer in quantized_layers(model) if foreign else ():
        if foreign is not None and name in foreign:
            tasks.append(OfForeign(reader, f"{names.layer(name)}.weight", layer, foreign[name]))
            coded |= set(foreign[name].parts.values())
    tasks += [Compared(reader, item) for item in items if not coded & set(item.form)]
    with ThreadPoolExecutor(max(1, min(torch.get_num_threads(), MAKERS))) as pool:
        for _ in pool.map(lambda task: task(), tasks):
            pass


def coded_slots(model: nn.Module) -> Iterator[tuple[str, QuantLayer, str]]:
    """(name, layer, "weight" or "bias") of everything that is stored as codes."""
    for name, layer in quantized_layers(model):
        yield from ((name, layer, slot) for slot in OWN if layer._modules[f"{slot}_quantizer"] is not None
                    and layer._parameters.get(slot) is not None)  # fmt: skip


class Reader:
    """Tensors of a folder by name."""

    def __init__(self, folder: Path) -> None:
        self.files = {name: folder / file for file, names in weight_files(folder).items() for name in names}

    def __call__(self, name: str) -> torch.Tensor:
        """One tensor, from its file."""
        if name not in self.files:
            raise ModelError(f"the tensor {name!r} is not in the files that were written")
        with opened(self.files[name]) as source:
            return tensor_of(source, self.files[name], name)


class InMemory:
    """One quantized tensor of a model, of which some rows can be had."""

    def __init__(self, reader: Reader, prefix: str, layer: QuantLayer, slot: str) -> None:
        held, value = layer._modules[f"{slot}_quantizer"], layer._parameters[slot]
        self.prefix, self.reader, self.value, self.held = prefix, reader, value.detach(), held  # type: ignore[union-attr]
        self.frozen = layer.frozen
        self.shape: tuple[int, ...] = held.layout.shape if isinstance(held, StoredTensor) else tuple(value.shape)  # type: ignore[union-attr]
        self.quantizer: Any = held.quantizer(value) if isinstance(held, StoredTensor) else held  # type: ignore[arg-type]
        own: Any = self.quantizer
        blocks = [part.granularity.rows for part in parts(own) if isinstance(part.granularity, Block2D)]
        self.windows = windows(self.shape, max([ROWS, *blocks]))

    def computed(self, start: int, count: int) -> torch.Tensor:
        """The values of some rows that the model computes with."""
        if isinstance(self.held, StoredTensor):
            return self.held(self.value)[start : start + count]
        rows = self.value[start : start + count]
        return rows if self.frozen else quantizer_of_rows(self.quantizer, self.shape[0], start, count)(rows)


class OfForeign(InMemory):
    """One weight in a format of another program, decoded by its rules."""

    def __init__(self, reader: Reader, prefix: str, layer: QuantLayer, foreign: Foreign) -> None:
        super().__init__(reader, prefix, layer, "weight")
        self.foreign = foreign

    def __call__(self) -> None:
        """Compare."""
        stored = {role: self.reader(name) for role, name in self.foreign.parts.items()}
        with torch.no_grad():
            for start, count in self.windows:
                cut = self.foreign.cut(stored, start, count, self.shape[0]) if count < self.shape[0] else stored
                found, wanted = self.foreign.decode(cut), self.computed(start, count)
                near = found.shape == wanted.shape and not self.foreign.exact
                if near and bool(torch.isclose(found.float(), wanted.float(), rtol=2**-8, atol=0).all()):
                    continue
                check(self.prefix, found.float(), wanted)


class Decoded(InMemory):
    """One quantized tensor, decoded from the file: all of it, or of a large one some windows of rows."""

    def __init__(self, reader: Reader, prefix: str, layer: QuantLayer, slot: str, pack_method: str) -> None:
        super().__init__(reader, prefix, layer, slot)
        self.pack_method = pack_method
        quantizer: Any = self.quantizer
        self.form = layout_of_quantizer(quantizer, self.shape, pack_method).form()
        self.wanted = {named(prefix, key): key for key in self.form}

    def __call__(self) -> None:
        """Compare."""
        stored = {key: self.reader(name) for name, key in self.wanted.items()}
        with torch.no_grad():
            for start, count in self.windows:
                check(self.prefix, self.found(stored, start, count), self.computed(start, count))

    def found(self, stored: Mapping[str, torch.Tensor], start: int, count: int) -> torch.Tensor:
        """The values of some rows, from the file."""
        layout = layout_of_quantizer(self.quantizer, (count, *self.shape[1:]), self.pack_method)
        form = layout.form()
        cut = {key: narrowed(stored[key], form[key][0], start / self.shape[0]) for key in form}
        return layout.restore(cut)


def windows(shape: tuple[int, ...], unit: int) -> list[tuple[int, int]]:
    """(first row, number of rows), in multiples of ``unit``: all, or of a large tensor three windows."""
    rows = shape[0]
    count = -(-rows // PART // unit) * unit
    if math.prod(shape) <= WHOLE or 3 * count >= rows or rows % unit:
        return [(0, rows)]
    return [(start, count) for start in (0, rows // 2 // unit * unit, rows - count)]


def narrowed(stored: torch.Tensor, shape: tuple[int, ...], share: float) -> torch.Tensor:
    """The part of a stored tensor that belongs to some rows: cut along the axis where it is longer than ``shape``."""
    for axis, (whole, part) in enumerate(zip(stored.shape, shape, strict=True)):
        if whole != part:
            return stored.narrow(axis, round(whole * share), part)
    return stored


def quantizer_of_rows(quantizer: Any, rows: int, start: int, count: int) -> Any:
    """A quantizer whose parameters are those of some rows."""
    own = copy.deepcopy(quantizer)
    for part in parts(own):
        for kind in ("scale", "zero_point"):
            value = getattr(part, kind)
            if value is not None and value.dim() and value.shape[0] > 1:
                first, length = value.shape[0] * start // rows, value.shape[0] * count // rows
                setattr(part, kind, value[first : first + length])
    return own


class Compared:
    """Tensors that are stored as they are."""

    def __init__(self, reader: Reader, item: Item) -> None:
        self.reader, self.item = reader, item

    def __call__(self) -> None:
        """Compare."""
        for name, value in self.item.make().items():
            check(name, self.reader(name), value.detach().cpu())


def check(name: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raise ``ModelError`` for a tensor that is not the one that was wanted."""
    wanted = wanted.detach().to(found.device)
    if found.shape == wanted.shape and found.dtype != wanted.dtype and found.is_floating_point():
        found = found.to(wanted.dtype)
    if found.shape == wanted.shape and torch.equal(as_bytes(found), as_bytes(wanted)):
        return
    same = found.shape == wanted.shape
    wrong = int((found != wanted).sum()) if same else found.numel()
    if same and not wrong:  # zeros of another sign
        return
    raise ModelError(
        f"{name!r} does not read back as what the model computes with: {wrong} of {wanted.numel()} values differ; "
        f"nothing was written. Please report this; verify=False (--no-verify) writes the folder as it is"
    )


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """A tensor that equals another one where all bits are the same, NaN too."""
    return value.contiguous().reshape(-1).view(torch.uint8)
