"""The modules of a checkpoint without their values, so that layers can be matched before a tensor is read.

The architecture is made by transformers from ``config.json`` on the meta device (no code of the checkpoint runs).
Tensors of an architecture that is not known are told by their names and shapes: a matrix called ``weight`` whose module
is neither a norm nor an embedding is a linear layer. What a known one has no place for is refused or left behind, as
transformers does; what it passes over by rule (``_keys_to_ignore_on_load_unexpected``) stays in the files as it is.

Stacked experts become linear layers, as in memory: each is a part of a stored tensor, and read alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quark.dataclass import dataclass
from quark.errors import ModelError, known
from quark.torch.experts import is_fused, stacked_name, unfuse
from quark.torch.export.checkpoint import Checkpoint, opened, row_of, tensor_of
from quark.torch.export.model_files import HALVES, class_named, kept_wide
from quark.torch.export.original import FileNames, names_of
from quark.torch.files.carried import places_of
from quark.torch.files.config_fields import COMPUTES, check_counts, type_named
from quark.torch.files.fitting import check_derived, check_lacking, check_types, left_behind, told
from quark.torch.files.headers import EMBEDDING
from quark.torch.files.named import check_named
from quark.torch.files.names import names_in_memory, renamed, renames_of
from quark.torch.files.plain import misshapen

COMPUTED: dict[str, torch.dtype] = {name: getattr(torch, name) for name in COMPUTES}


@dataclass(frozen=True)
class ExpertShare:
    """One expert's share of a stacked tensor.

    Attributes:
        number: of the expert, the first index of the stacked tensor.
        shape, stride, offset: of the share within what that index gives.
    """

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class StoredSource:
    """A tensor of a file, or a part of one.

    Attributes:
        file: that holds it.
        name: in that file.
        shape, dtype: of it; a tensor that is stored in another type is read in this one.
        part: which; None: all.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: ExpertShare | None = None

    def read(self, folder: Path) -> torch.Tensor:
        """The values, from the checkpoint in ``folder``; of a part only its expert is read.

        A part has the strides that it has in a stacked tensor in memory, because sums depend on them.

        Raises:
            ModelError: they cannot be read.
        """
        path = folder / self.file
        with opened(path) as source:
            if self.part is None:
                return tensor_of(source, path, self.name).to(self.dtype)
            row = row_of(source, path, self.name, self.part.number).contiguous().to(self.dtype)
            start = row.storage_offset() + self.part.offset
            return row.as_strided(self.part.shape, self.part.stride, start)


@dataclass(frozen=True)
class Skeleton:
    """A checkpoint without its values.

    Attributes:
        model: its modules, on the meta device, stacked experts taken apart.
        tensors: what is stored, by the names in ``model``.
        stacked: stored tensors of which ``tensors`` has the parts: the names of these, and of the module.
        names: of the tensors of ``model`` outside.
        base: what the names in its files leave out, with a dot: they hold the model inside, with or without a head.
    """

    model: nn.Module
    tensors: dict[str, StoredSource]
    stacked: dict[str, tuple[StoredSource, tuple[str, ...]]]
    names: FileNames
    base: str = ""

    def outside(self, name: str, quantized: Collection[str]) -> str:
        """The name in written files of a tensor, or of a parameter beside it: as in those that are read, in full."""
        found = self.named(name, quantized)
        return self.base + found if name.startswith(self.base) and not found.startswith(self.base) else found

    def named(self, name: str, quantized: Collection[str]) -> str:
        """As ``outside``, where the files that are read say it in full."""
        owner, _, own = name.rpartition(".")
        weight = self.tensors.get(f"{owner}.weight")
        if name in self.tensors and name not in quantized and self.tensors[name].part is None:
            return self.tensors[name].name
        if name in self.stacked:
            return self.stacked[name][0].name
        if weight is not None and weight.part is None and weight.name.endswith(".weight"):
            return f"{weight.name.removesuffix('.weight')}.{own}"
        return self.names.outside(name)

    def kept(self, quantized: Iterable[str]) -> dict[str, StoredSource]:
        """The tensors to write: stacked ones stay together where no part of their module is quantized."""
        modules, found = {name.rsplit(".", 3)[0] for name in quantized}, dict(self.tensors)
        for name, (stored, parts) in self.stacked.items():
            if name.rpartition(".")[0] not in modules:
                found = {key: value for key, value in found.items() if key not in parts} | {name: stored}
        return found


def read_skeleton(checkpoint: Checkpoint, buffers: bool = False, eager: bool = False) -> Skeleton:
    """The modules and tensors of a checkpoint.

    Args:
        checkpoint: whose.
        buffers: buffers that no file holds get their values.
        eager: attention is computed step by step, not by a fused kernel.

    Raises:
        ModelError: tensors of a type or shape that cannot be.
    """
    stored = stored_tensors(checkpoint)
    check_named(checkpoint.folder, checkpoint.config)
    model = architecture_of(checkpoint, buffers, eager) or nn.Module()
    renames = renames_of(model)
    inside = getattr(model, "base_model_prefix", "")
    begun = any(renamed(name, renames).startswith(f"{inside}.") for name in stored)
    base = f"{inside}." if inside in model._modules and not begun else ""
    together = set(model.state_dict())
    check_types(checkpoint.folder, model, {name: one.dtype for name, one in stored.items()})
    check_derived(checkpoint.folder, checkpoint.config, model)
    with told(checkpoint.folder, checkpoint.config):
        apart = stacks(model)
        outside = names_of(model)
    layers = {name: inside for inside, name in outside.layers.items()}
    places = together | set(model.state_dict())
    names = names_in_memory(stored, places, renames, layers)
    if base:
        longer = names_in_memory([base + name for name in stored], places, renames, layers)
        names |= {name: found for name in stored if (found := longer[base + name]) in places}
    computed, decoded = checkpoint.dtype or named_type(checkpoint), places_of(checkpoint.folder)
    wide = kept_wide(model, computed)
    halved = {name: replace(stored[name], dtype=computed) for name in decoded if computed and name in stored}
    tensors = {names[name]: as_held(names[name], value, wide) for name, value in (stored | halved).items()}
    stacked: dict[str, tuple[StoredSource, tuple[str, ...]]] = {}
    for name, (shape, views) in apart.items():
        if name in tensors:
            whole = tensors.pop(name)
            tensors |= shares(whole, shape, views)
            stacked[name] = whole, tuple(views)
    check_shapes(checkpoint, model, tensors)
    known = {name: one.name for name, one in tensors.items()}
    check_lacking(checkpoint.folder, model, known, apart)
    for name in left_behind(checkpoint.folder, model, known):
        del tensors[name]
    if not hasattr(model, "config"):
        add_layers(model, tensors)
    return Skeleton(model, tensors, stacked, outside, base)


def as_held(name: str, stored: StoredSource, wide: Callable[[str], object]) -> StoredSource:
    """A tensor in the type that it has in memory, which is the file's unless it is ``wide`` there."""
    return replace(stored, dtype=torch.float32) if stored.dtype in HALVES and wide(name) else stored


def check_shapes(checkpoint: Checkpoint, model: nn.Module, tensors: Mapping[str, StoredSource]) -> None:
    """Every tensor has the shape that ``config.json`` asks for.

    Raises:
        ModelError: one has another.
    """
    for name, value in model.state_dict().items():
        stored = tensors.get(name)
        if stored is not None and stored.part is None and stored.shape != tuple(value.shape):
            raise misshapen(checkpoint.folder, stored.name, stored.shape, value.shape)


def stacks(model: nn.Module) -> dict[str, tuple[tuple[int, ...], dict[str, torch.Tensor]]]:
    """Take stacked experts apart: by the name of each stacked tensor its shape, and what it becomes, as views."""
    found: dict[str, tuple[tuple[int, ...], dict[str, torch.Tensor]]] = {}
    for path, module in list(model.named_modules()):
        if is_fused(module):
            before = dict(module._parameters)
            unfuse(module)
            for name, value in module.named_parameters():
                source = stacked_name(module, name)
                shape = tuple(before[source].shape)
                found.setdefault(f"{path}.{source}", (shape, {}))[1][f"{path}.{name}"] = value
    return found


def shares(whole: StoredSource, shape: tuple[int, ...], views: Mapping[str, torch.Tensor]) -> dict[str, StoredSource]:
    """What every expert has of a stacked tensor: where a view of the tensor in memory lies, it lies in the file."""
    if whole.shape != shape:
        raise ModelError(f"{whole.file!r}: {whole.name!r} has the shape {whole.shape}; the model has {shape}")
    found, size = {}, math.prod(shape[1:])
    for name, view in views.items():
        number, offset = divmod(int(view.storage_offset()), size)
        part = ExpertShare(number, tuple(view.shape), tuple(view.stride()), offset)
        found[name] = StoredSource(whole.file, whole.name, part.shape, whole.dtype, part)
    return found


def named_type(checkpoint: Checkpoint) -> torch.dtype | None:
    """The type that the configuration names.

    Raises:
        ModelError: no model computes in it.
    """
    named = type_named(checkpoint.folder, checkpoint.config)
    return None if named is None else COMPUTED[named]


def float_type(checkpoint: Checkpoint) -> torch.dtype:
    """The type that its model computes in: what its configuration says, or its first float tensor."""
    said = named_type(checkpoint)
    if said is not None:
        return said
    return next(one.dtype for one in stored_tensors(checkpoint).values() if one.dtype.is_floating_point)


def as_named(checkpoint: Checkpoint, name: str, stored: torch.dtype) -> torch.dtype:
    """The type of ``config.json``, in which transformers reads a tensor of eight bits that no scale belongs to.

    Raises:
        ModelError: it names none.
    """
    found = named_type(checkpoint)
    if found is None:
        raise ModelError(f"{name!r} has the type {stored}, and config.json has no dtype that it is to be read in")
    return found


def stored_tensors(checkpoint: Checkpoint) -> dict[str, StoredSource]:
    """Every tensor of a checkpoint, by its name there; values are not read.

    Raises:
        ModelError: of a type that torch does not have, or the configuration names one in which no model computes.
    """
    found: dict[str, StoredSource] = {}
    named = named_type(checkpoint)
    for file, names in checkpoint.files.items():
        with opened(checkpoint.folder / file) as source:
            for name in names:
                view = source.get_slice(name)
                dtype = DTYPES.get(view.get_dtype())
                if dtype is None:
                    raise ModelError(f"{file!r}: {name!r} has the type {view.get_dtype()}, which torch does not have")
                read = checkpoint.dtype if checkpoint.dtype is not None and dtype.is_floating_point else dtype
                if read is torch.float64:  # nobody computes in it: as the model in memory has it
                    read = named or read
                if read.is_floating_point and read.itemsize == 1 and "quantization_config" not in checkpoint.config:
                    read = as_named(checkpoint, name, read)  # no codes, since nothing says what they stand for
                found[name] = StoredSource(file, name, tuple(view.get_shape()), read)
    return found


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}


class Unallocated(TorchFunctionMode):
    """While it is on, tensors that are made without values (parameters) are on the meta device; others are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def architecture_of(
    checkpoint: Checkpoint, buffers: bool, eager: bool, dtype: torch.dtype = torch.float32
) -> nn.Module | None:
    """What transformers makes of ``config.json``; None where it does not know the architecture."""
    names = checkpoint.config.get("architectures")
    if not isinstance(names, list) or not names:
        return None
    try:
        import transformers
    except ImportError:
        return None
    cls = class_named(str(names[0]))
    if cls is None:
        return None
    check_counts(checkpoint.folder, checkpoint.config, checkpoint.names)
    with told(checkpoint.folder, checkpoint.config):
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
        with Unallocated() if buffers else torch.device("meta"):
            kernel = {"attn_implementation": "eager"} if eager else {}
            model: nn.Module = cls._from_config(config, dtype=dtype, **kernel)
    wide = kept_wide(model, dtype)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        value.data = value.data.float() if value.dtype in HALVES and wide(name) else value.data
    return emptied(model).eval()


def emptied(model: nn.Module) -> nn.Module:
    """The model, with its parameters on the meta device (some are made with zeros); what is tied stays tied."""
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and not value.is_meta:
                if value not in empty:
                    empty[value] = nn.Parameter(value.to("meta"), requires_grad=False)
                module._parameters[name] = empty[value]
    return model


def add_layers(model: nn.Module, tensors: Mapping[str, StoredSource]) -> None:
    """Layers for the matrices of an architecture that is not known."""
    known = {name for name, _ in model.named_modules()}
    for name, found in tensors.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight" and path not in known and len(found.shape) == 2:
            add_layer(model, path, found, bias=f"{path}.bias" in tensors)


def add_layer(model: nn.Module, path: str, found: StoredSource, bias: bool) -> None:
    """A layer that is only known by its weight, with the modules that lead to it."""
    last = path.rpartition(".")[2]
    if last.endswith("norm"):
        return
    rows, columns = found.shape
    layer: nn.Module = nn.Linear(columns, rows, bias=bias, device="meta", dtype=found.dtype)
    if EMBEDDING.search(path):
        layer = nn.Embedding(rows, columns, device="meta", dtype=found.dtype)
    put(model, path.split("."), layer)


def put(model: nn.Module, path: list[str], layer: nn.Module) -> None:
    """``layer`` as ``path`` of ``model``; modules on the way are made where they are missing."""
    for name in path[:-1]:
        if name not in model._modules:
            model._modules[name] = nn.Module()
        model = known(model._modules[name], name)
    model._modules[path[-1]] = layer
