"""The modules of a checkpoint without their values, so that layers can be matched before a tensor is read.

The architecture is made by transformers from ``config.json`` on the meta device (no code of the checkpoint runs).
Tensors of layers that it does not have, and all tensors of an architecture that is not known, are told by their names
and shapes: a matrix called ``weight`` whose module is neither a norm nor an embedding is a linear layer.

Stacked experts become one linear layer each, and experts of the first mixture models (``block_sparse_moe``, ``w1``,
``w2``, ``w3``) get the names that they have in memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from quark.errors import ModelError
from quark.torch.experts import unfuse_experts
from quark.torch.export.checkpoint import Checkpoint, opened

EXPERT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
OLD_EXPERT = re.compile(r"\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(w[123])\.")
EMBEDDING = re.compile(r"embed|(^|\.)wte$|(^|\.)wpe$")


@dataclass(frozen=True)
class Stored:
    """A tensor of a file.

    Attributes:
        file: that holds it.
        name: in that file.
        shape, dtype: of it.
    """

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_tensors(checkpoint: Checkpoint) -> dict[str, Stored]:
    """Every tensor of a checkpoint, by the name that it has in memory; values are not read."""
    found: dict[str, Stored] = {}
    for file, names in checkpoint.files.items():
        with opened(checkpoint.folder / file) as source:
            for name in names:
                view = source.get_slice(name)
                dtype = DTYPES.get(view.get_dtype())
                if dtype is None:
                    raise ModelError(f"{file!r}: {name!r} has the type {view.get_dtype()}, which torch does not have")
                found[name_in_memory(name)] = Stored(file, name, tuple(view.get_shape()), dtype)
    return found


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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


def name_in_memory(name: str) -> str:
    """The name that a stored tensor has in a model."""
    renamed = OLD_EXPERT.sub(lambda found: f".mlp.experts.{found[1]}.{EXPERT_NAMES[found[2]]}.", name)
    return renamed.replace(".block_sparse_moe.", ".mlp.")


class Unallocated(TorchFunctionMode):
    """While it is on, tensors that are made without values (parameters) are on the meta device; others are real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def skeleton_of(checkpoint: Checkpoint, tensors: Mapping[str, Stored], buffers: bool = False) -> nn.Module:
    """The modules of a checkpoint, on the meta device; with ``buffers``, those that no file holds have their values."""
    model = architecture_of(checkpoint, buffers) or nn.Module()
    base = getattr(model, "base_model_prefix", "")
    known = {name for name, _ in model.named_modules()}
    if base and base in known and not any(name.startswith(f"{base}.") for name in tensors):
        model = model.get_submodule(base)  # saved without its head
        known = {name for name, _ in model.named_modules()}
    for name, found in tensors.items():
        path, _, kind = name.rpartition(".")
        if kind == "weight" and path not in known and len(found.shape) == 2:
            add_layer(model, path, found, bias=f"{path}.bias" in tensors)
    return model


def architecture_of(checkpoint: Checkpoint, buffers: bool = False) -> nn.Module | None:
    """What transformers makes of ``config.json``; None where it does not know the architecture."""
    names = checkpoint.config.get("architectures")
    if not isinstance(names, list) or not names:
        return None
    try:
        import transformers
    except ImportError:
        return None
    cls: Any = getattr(transformers, str(names[0]), None)
    if cls is None:
        return None
    config = transformers.AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    with Unallocated() if buffers else torch.device("meta"):
        model: nn.Module = cls._from_config(config, dtype=torch.float32)
    unfuse_experts(model)
    return model.eval()


def add_layer(model: nn.Module, path: str, found: Stored, bias: bool) -> None:
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
        model = model._modules[name]  # type: ignore[assignment]
    model._modules[path[-1]] = layer
