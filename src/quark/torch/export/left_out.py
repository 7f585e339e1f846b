"""Tensors that lie beside the model that transformers loads: heads for multi-token prediction, which are called
``mtp``, or are layers behind the last one (DeepSeek, GLM).

transformers leaves them in the file (``_keys_to_ignore_on_load_unexpected`` knows them in the published size of a
model, ``num_nextn_predict_layers`` counts them in any), so they are no part of the model that is quantized, but
programs that serve it decode with them. They go from the source's files to those of the export as they are, in float,
and are named among what stays float. Import leaves them where they are, as transformers does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.torch.digest import GRIDS
from quark.torch.export.checkpoint import SUFFIX, names_in, opened, tensor_of, weight_files
from quark.torch.export.model_files import float_dtype, source_of
from quark.torch.export.shards import Item

PREDICTION = re.compile(r"(^|\.)mtp(_\w+)?\.")
LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
TABLES = ("rotary_emb.inv_freq", "position_ids")
GIVEN = "left_out"  # attribute of a model whose heads were decoded: their items


def is_ignored(model: nn.Module, name: str) -> bool:
    """Whether the tensor ``name`` of a file of ``model`` is left unread.

    transformers names it, or it is of a layer behind the last, which the configuration counts as a head; or a table
    that older versions stored with every layer, and the model makes (``_adjust_missing_and_unexpected_keys``).
    """
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    tables = {one for one in TABLES if name.endswith(one)}
    if tables and any(own.endswith(one) for own, _ in model.named_buffers() for one in tables):
        return True
    depth, heads = depth_of(model)
    behind = any(depth <= int(number) < depth + heads for _, number in LAYER.findall(name))
    return behind or any(re.search(pattern, name) for pattern in patterns)


def depth_of(model: nn.Module) -> tuple[int, int]:
    """How many layers the configuration of a model has, and how many heads behind them; 0 where it does not say."""
    config: Any = getattr(model, "config", None)
    whole = config.get_text_config() if hasattr(config, "get_text_config") else None  # diffusers has none
    depth, heads = (getattr(whole, name, None) for name in ("num_hidden_layers", "num_nextn_predict_layers"))
    return depth or 0, heads if depth and isinstance(heads, int) else 0


def is_prediction(model: nn.Module, name: str) -> bool:
    """Whether the tensor ``name`` of a file of ``model`` is one of a head for multi-token prediction."""
    if not is_ignored(model, name):
        return False
    depth, _ = depth_of(model)
    behind = depth > 0 and any(int(number) >= depth for _, number in LAYER.findall(name))
    return behind or bool(PREDICTION.search(name))


def left_out_items(model: nn.Module) -> Iterator[Item]:
    """The heads for multi-token prediction of the folder that ``model`` came from.

    Raises:
        ModelError: a file of that folder is broken.
    """
    if GIVEN in model.__dict__:
        yield from model.__dict__[GIVEN]
        return
    ignores = bool(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or depth_of(model)[1])
    source = source_of(model) if ignores else None
    if source is None or not any(source.glob(f"*{SUFFIX}")):
        return
    coded = set(names_in(source / GRIDS)) if (source / GRIDS).is_file() else set()
    for file, names in weight_files(source).items():
        for name in names:
            if is_prediction(model, name):  # decoded ones lie in float32
                yield item_of_file(source / file, name, float_dtype(model) if name in coded else None)


def left_out_layers(model: nn.Module) -> list[str]:
    """Names of the heads' layers that programs may take for quantized ones."""
    forms = [item.form for item in left_out_items(model)]
    matrices = [name for form in forms for name, (shape, _) in form.items() if len(shape) > 1]
    return [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]


def item_of_file(path: Path, name: str, dtype: torch.dtype | None = None) -> Item:
    """One tensor of a file, read when it is written; in its own type, or in ``dtype``."""
    with opened(path) as file:
        value = file.get_tensor(name)  # mapped, not read
        form = {name: (tuple(value.shape), dtype or value.dtype)}

    def make() -> dict[str, torch.Tensor]:
        with opened(path) as file:
            return {name: tensor_of(file, path, name).to(form[name][1])}

    return Item(form, make)
