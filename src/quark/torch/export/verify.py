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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ModelError
from quark.numerics.granularity import Block2D, Channel, Granularity, Group
from quark.torch.export.checkpoint import opened, row_of, tensor_of, weight_files
from quark.torch.export.decoded import ROUNDED, Foreign, Windows
from quark.torch.export.in_turn import Pairs, half_of, halves_in, pairs_of
from quark.torch.export.layout import Stored, layout_of_quantizer
from quark.torch.export.original import FileNames
from quark.torch.export.shards import MAKERS, Item
from quark.torch.export.state import named
from quark.torch.export.stored import StoredTensor
from quark.torch.fake_quantize import FakeQuantize, parts
from quark.torch.layers import name_in, own_parameter
from quark.torch.quantized_layer import OWN, QuantLayer, quantized_layers

WHOLE = 1 << 16  # elements of a tensor that is decoded as a whole
PART = 256  # of a larger one every window is this part of the rows
FEW = 12  # three windows are less than a quarter of the rows
ROWS = 16  # windows are multiples of it: of words of codes


def verify(
    folder: Path,
    model: nn.Module,
    items: Iterable[Item],
    names: FileNames,
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
    with ExitStack() as undo:
        tasks = list(
            tasks_of(FolderReader(folder, undo, pairs_of(model, names)), model, items, names, pack_method, foreign)
        )
        with ThreadPoolExecutor(max(1, min(torch.get_num_threads(), MAKERS))) as pool:
            for _ in pool.map(lambda task: task(), tasks):
                pass


def tasks_of(
    reader: FolderReader,
    model: nn.Module,
    items: Iterable[Item],
    names: FileNames,
    pack_method: str,
    foreign: Mapping[str, Foreign] | None,
) -> Iterator[Callable[[], None]]:
    """What there is to compare; arguments as those of ``verify``."""
    coded: set[str] = set()
    tasks: list[CodedSlot] = []
    for name, layer, slot in coded_slots(model) if foreign is None else ():
        task = Decoded(reader, name_in(names.layer(name), slot), layer, slot, pack_method)
        coded |= set(task.wanted)
        tasks.append(task)
    for name, layer in quantized_layers(model) if foreign else ():
        if foreign is not None and name in foreign:
            tasks.append(OfForeign(reader, f"{names.layer(name)}.weight", layer, foreign[name]))
            coded |= set(foreign[name].parts.values())
    yield from grouped(tasks)
    yield from (Compared(reader, item) for item in items if not coded & set(item.form))


def coded_slots(model: nn.Module) -> Iterator[tuple[str, QuantLayer, str]]:
    """(name, layer, "weight" or "bias") of everything that is stored as codes."""
    for name, layer in quantized_layers(model):
        yield from ((name, layer, slot) for slot in OWN if layer._modules[f"{slot}_quantizer"] is not None
                    and layer._parameters.get(slot) is not None)  # fmt: skip


class FolderReader:
    """Tensors of a folder by name, those of ``pairs`` that are joined there too; every file is opened once."""

    def __init__(self, folder: Path, undo: ExitStack, pairs: Pairs) -> None:
        found = weight_files(folder)
        sources = {file: undo.enter_context(opened(folder / file)) for file in found}
        self.files = {name: (sources[file], folder / file) for file, names in found.items() for name in names}
        self.halves = halves_in(self.files, pairs)

    def __call__(self, name: str, index: int | None = None) -> torch.Tensor:
        """One tensor, from its file; of a stack one element."""
        if name in self.halves:
            whole, start = self.halves[name]
            return half_of(self(whole), start)
        if name not in self.files:
            raise ModelError(f"the tensor {name!r} is not in the files that were written")
        return tensor_of(*self.files[name], name) if index is None else row_of(*self.files[name], name, index)


class CodedSlot:
    """One quantized weight or bias, of which some rows are compared.

    Attributes:
        prefix: its name in the file.
        key: equal for tensors that can be quantized and decoded together, one below the other; None: alone.
    """

    def __init__(self, reader: FolderReader, prefix: str, layer: QuantLayer, slot: str) -> None:
        held, value = layer._modules[f"{slot}_quantizer"], own_parameter(layer, slot)
        self.prefix, self.reader, self.value, self.held = prefix, reader, value.detach(), held
        self.frozen = layer.frozen
        self.shape: tuple[int, ...] = held.layout.shape if isinstance(held, StoredTensor) else tuple(value.shape)
        self.quantizer: Any = held.quantizer(value) if isinstance(held, StoredTensor) else held
        own: Any = self.quantizer
        stages = list(parts(own))
        unit = math.lcm(ROWS, unit_of(self.quantizer, len(self.shape)))
        self.windows = windows(self.shape, unit)
        self.key: Any = None
        whole = not self.windows.count % unit  # no word or block is cut
        if not isinstance(held, StoredTensor) and all(map(goes_along_rows, stages)) and len(self.shape) == 2 and whole:
            known = tuple((part.stage, part.granularity) for part in stages)
            self.key = known, self.shape[1:], self.value.dtype, self.frozen, type(self)

    @property
    def size(self) -> int:
        """Elements that are compared."""
        return self.windows.count * math.prod(self.shape[1:])

    def compare(self, wanted: torch.Tensor) -> None:
        """Compare the file with the values of the rows that the model computes with."""
        raise NotImplementedError


class OfForeign(CodedSlot):
    """One weight in a format of another program, decoded by its rules."""

    def __init__(self, reader: FolderReader, prefix: str, layer: QuantLayer, foreign: Foreign) -> None:
        super().__init__(reader, prefix, layer, "weight")
        self.foreign = foreign

    def compare(self, wanted: torch.Tensor) -> None:
        """Compare."""
        stored = {role: self.reader(name, self.foreign.index) for role, name in self.foreign.parts.items()}
        found = self.foreign.decode(self.foreign.cut(stored, self.windows))
        near = found.shape == wanted.shape and not self.foreign.exact
        if not (near and bool(torch.isclose(found.float(), wanted.float(), rtol=ROUNDED, atol=0).all())):
            check(self.prefix, found.float(), wanted)


class Decoded(CodedSlot):
    """One quantized tensor in our own format: all of it, or of a large one some windows of rows."""

    def __init__(self, reader: FolderReader, prefix: str, layer: QuantLayer, slot: str, pack_method: str) -> None:
        super().__init__(reader, prefix, layer, slot)
        self.pack_method = pack_method
        self.cut = self.layout(self.windows.count)
        self.form = self.cut.form()
        self.wanted = {named(prefix, key): key for key in self.form}

    def layout(self, rows: int) -> Any:
        """That of so many rows."""
        return layout_of_quantizer(self.quantizer, (rows, *self.shape[1:]), self.pack_method)

    def stored(self) -> Stored:
        """What lies in the file of the rows that are compared."""
        return {key: narrowed(self.reader(name), self.form[key][0], self.windows) for name, key in self.wanted.items()}

    def compare(self, wanted: torch.Tensor) -> None:
        """Compare."""
        check(self.prefix, self.cut.restore(self.stored()), wanted)


class Together:
    """Coded tensors of one key: what they are computed with is found at once, and so is what our own format holds."""

    def __init__(self, tasks: list[CodedSlot]) -> None:
        self.tasks = tasks

    @torch.no_grad()
    def __call__(self) -> None:
        """Compare."""
        wanted = computed(self.tasks).cpu()  # files are read there
        counts = [task.windows.count for task in self.tasks]
        own = [task for task in self.tasks if isinstance(task, Decoded)]
        if len(own) > 1:
            found = restored(own, sum(counts))
            if found.shape == wanted.shape and torch.equal(found.to(wanted.dtype), wanted):
                return
        for task, rows in zip(self.tasks, torch.split(wanted, counts), strict=True):
            task.compare(rows)


def grouped(tasks: Iterable[CodedSlot]) -> Iterator[Together]:
    """Tensors that go together, at most ``WHOLE`` elements at once."""
    waiting: dict[Any, list[CodedSlot]] = {}
    for task in tasks:
        if task.key is None:
            yield Together([task])
            continue
        found = waiting.setdefault(task.key, [])
        if found and sum(one.size for one in found) + task.size > 4 * WHOLE:
            yield Together(waiting.pop(task.key))
        waiting.setdefault(task.key, []).append(task)
    yield from map(Together, waiting.values())


def goes_along_rows(part: FakeQuantize) -> bool:
    """Whether every scale of a stage of a matrix belongs to some rows."""
    if type(part) is not FakeQuantize or not rows_of_a_scale(part.granularity, 2):
        return False
    return part.stage.is_block and not part.stage.needs_range if part.scale is None else part.scale.dim() > 0


def rows_of_a_scale(granularity: Granularity, dims: int) -> int:
    """Rows of a tensor of so many axes that share a scale of their own; 0: scales have nothing to do with rows."""
    if isinstance(granularity, Block2D):
        return granularity.rows
    if isinstance(granularity, Channel):
        return int(granularity.axis % dims == 0)
    if isinstance(granularity, Group):
        return 1 if granularity.axis % dims else granularity.size
    return 0


def computed(tasks: list[CodedSlot]) -> torch.Tensor:
    """The values that the model computes with, of the rows of all tasks."""
    first = tasks[0]
    if isinstance(first.held, StoredTensor):
        return first.windows.cut(first.held(first.value))
    rows = joined([view for task in tasks for view in task.windows.views(task.value)])
    if first.frozen:
        return rows
    return quantizer_of_rows([(task.quantizer, task.windows) for task in tasks], len(first.shape))(rows)


def restored(tasks: list[Decoded], rows: int) -> torch.Tensor:
    """The values that lie in the file, of the rows of all tasks."""
    layout, stored = tasks[0].layout(rows), [task.stored() for task in tasks]
    made = {}
    for key, (shape, _) in layout.form().items():
        values = [one[key] for one in stored]
        axis = next((k for k, (a, b) in enumerate(zip(values[0].shape, shape, strict=True)) if a != b), 0)
        made[key] = joined(values, axis)
    return layout.restore(made)


def joined(values: list[torch.Tensor], axis: int = 0) -> torch.Tensor:
    """Tensors one behind the other."""
    return values[0] if len(values) == 1 else torch.cat(values, axis)


def windows_of(quantizer: Any, shape: tuple[int, ...], part: int = PART) -> Windows:
    """The rows of a quantized tensor that are decoded; a window is one of so many parts of them."""
    return windows(shape, math.lcm(ROWS, unit_of(quantizer, len(shape))), part)


def unit_of(quantizer: Any, dims: int) -> int:
    """Rows that share their scales, of a tensor of so many axes."""
    return math.lcm(*(max(1, rows_of_a_scale(one.granularity, max(dims, 1))) for one in parts(quantizer)))


def windows(shape: tuple[int, ...], unit: int, part: int = PART) -> Windows:
    """The rows that are decoded, in multiples of ``unit``: all, of a large tensor three windows, or the last one."""
    rows = shape[0] if shape else 1
    count = -(-rows // part // unit) * unit
    if math.prod(shape) <= WHOLE or rows % unit or count >= rows:
        return Windows(rows, ((0, rows),))
    starts = (0, rows // 2 // unit * unit, rows - count) if FEW * count <= rows else (rows - count,)
    return Windows(rows, tuple((start, count) for start in starts))


def narrowed(stored: torch.Tensor, shape: tuple[int, ...], windows: Windows) -> torch.Tensor:
    """The part of a stored tensor that belongs to some rows: cut along the axis where it is longer than ``shape``."""
    for axis, (whole, part) in enumerate(zip(stored.shape, shape, strict=True)):
        if whole != part:
            return windows.cut(stored, axis)
    return stored


def quantizer_of_rows(rows: list[tuple[Any, Windows]], dims: int) -> Any:
    """A quantizer whose parameters are those of some rows of each of several quantizers, of tensors of so many axes."""
    first, chosen = rows[0]
    if len(rows) == 1 and chosen.count == chosen.rows:
        return first
    own = shallow(first)
    for part, *others in zip(parts(own), *(parts(quantizer) for quantizer, _ in rows), strict=True):
        for kind in ("scale", "zero_point"):
            value = getattr(part, kind)
            if value is not None and value.dim() and rows_of_a_scale(part.granularity, dims):
                found = (windows.cut(getattr(one, kind)) for (_, windows), one in zip(rows, others, strict=True))
                setattr(part, kind, joined(list(found)))
    return own


def shallow(module: nn.Module) -> Any:
    """A module whose attributes can be set, and are those of ``module`` until then; so those that it is made of."""
    own: Any = copy.copy(module)
    for kind in ("_parameters", "_buffers", "_modules"):
        setattr(own, kind, dict(getattr(module, kind)))
    own._modules = {name: None if part is None else shallow(part) for name, part in own._modules.items()}
    return own


class Compared:
    """Tensors that are stored as they are."""

    def __init__(self, reader: FolderReader, item: Item) -> None:
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
    flat = value.contiguous().reshape(-1).view(torch.uint8)
    return flat.view(torch.int64) if flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0 else flat
