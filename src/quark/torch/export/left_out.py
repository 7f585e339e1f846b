"""Tensors that lie beside the model that transformers loads: heads for multi-token prediction, ``mtp.*``.

transformers leaves them in the file (``_keys_to_ignore_on_load_unexpected``), so they are no part of the model that is
quantized, but programs that serve it decode with them. They go from the source's files to those of the export as they
are, in float. Import leaves them where they are, as transformers does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from quark.torch.export.checkpoint import SUFFIX, opened, tensor_of, weight_files
from quark.torch.export.model_files import source_of
from quark.torch.export.shards import Item

PREDICTION = re.compile(r"mtp\.")


def is_ignored(model: nn.Module, name: str) -> bool:
    """Whether transformers leaves the tensor ``name`` of a file of ``model`` unread."""
    return any(re.search(pattern, name) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def left_out_items(model: nn.Module) -> Iterator[Item]:
    """The heads for multi-token prediction of the folder that ``model`` came from.

    Raises:
        ModelError: a file of that folder is broken.
    """
    source = source_of(model) if is_ignored(model, "mtp.layers.0.weight") else None
    if source is None or not any(source.glob(f"*{SUFFIX}")):
        return
    for file, names in weight_files(source).items():
        for name in names:
            if PREDICTION.match(name) and is_ignored(model, name):
                yield item_of_file(source / file, name)


def item_of_file(path: Path, name: str) -> Item:
    """One tensor of a file, read when it is written."""
    with opened(path) as file:
        value = file.get_tensor(name)  # mapped, not read
        form = {name: (tuple(value.shape), value.dtype)}

    def make() -> dict[str, torch.Tensor]:
        with opened(path) as file:
            return {name: tensor_of(file, path, name)}

    return Item(form, make)
