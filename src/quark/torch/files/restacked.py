"""Experts that a quantized folder has one by one, stacked again as the original has them (gpt_oss, Llama 4).

A format whose layers have codes and scales of their own takes stacks apart. transformers has no name for the single
experts of such a model, and a float checkpoint that it is to load has the stacks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.torch.experts import UnfusedExperts, count_of, is_fused, layers_of, stacked_name, unfuse_experts
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.export.original import FileNames, names_of
from quark.torch.export.shards import Item
from quark.torch.export.transformers_reads import is_listed
from quark.torch.files.skeleton import architecture_of


def restacked(groups: list[list[Item]], checkpoint: Checkpoint) -> list[list[Item]]:
    """Items of a float checkpoint, with the stacks of experts in the place of their parts.

    Args:
        groups: tensors of each file, under their names outside.
        checkpoint: that they come from.
    """
    items = {name: item for group in groups for item in group for name in item.form}
    model = architecture_of(checkpoint, True, False) if any(".experts." in name for name in items) else None
    if model is None:
        return groups
    made, gone = [], set()
    for item, parts in stacks_of(model, items):
        made.append(item)
        gone |= parts
    left = [[item for item in group if not gone & set(item.form)] for group in groups]
    return [group for group in (*left, made) if group]


def stacks_of(model: nn.Module, items: dict[str, Item]) -> Iterator[tuple[Item, set[str]]]:
    """The stacks that a model has in its original, and the names of their parts."""
    shells: dict[str, Any] = {}
    for path, module in model.named_modules():
        if is_fused(module):
            shells[path] = copy.copy(module)
            shells[path].__dict__["_parameters"] = dict(module._parameters)
    unfuse_experts(model)
    names = names_of(model)
    for path, shell in shells.items():
        module = model.get_submodule(path)
        if not isinstance(module, UnfusedExperts) or is_listed(path, module, names):
            continue
        for own in shell._parameters:
            parts = parts_of(shell, path, own, names)
            if parts and all(part in items for part in parts):
                outside, shape = names.renamed(f"{path}.{own}"), tuple(shell._parameters[own].shape)
                dtype = next(items[part].form[part][1] for part in parts)
                form = {outside: (shape, dtype)}
                yield Item(form, partial(stacked, shell, path, own, names, items, form)), set(parts)


def parts_of(shell: Any, path: str, own: str, names: FileNames) -> list[str]:
    """The names outside of what the stack ``own`` is made of."""
    made = []
    for number in range(count_of(shell)):
        for key, _, bias in layers_of(shell, number):
            slots = ("weight",) if bias is None else ("weight", "bias")
            found = (slot for slot in slots if stacked_name(shell, f"{number}.{key}.{slot}") == own)
            made += [f"{names.layer(f'{path}.{number}.{key}')}.{slot}" for slot in found]
    return made


def stacked(
    shell: Any, path: str, own: str, names: FileNames, items: dict[str, Item], form: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The stack ``own``, filled with its parts."""
    ((outside, (shape, dtype)),) = form.items()
    view = copy.copy(shell)
    made = torch.zeros(shape, dtype=dtype)
    view.__dict__["_parameters"] = {**shell._parameters, own: made}
    for number in range(count_of(shell)):
        for key, weight, bias in layers_of(view, number):
            for slot, target in (("weight", weight), ("bias", bias)):
                if target is not None and stacked_name(shell, f"{number}.{key}.{slot}") == own:
                    name = f"{names.layer(f'{path}.{number}.{key}')}.{slot}"
                    target.copy_(items[name].make()[name])
    return {outside: made}
