"""Static activations of a model that stays in its files: samples run while one decoder block at a time is in memory.

Embeddings, norms and the head are loaded; a block's tensors are read when it is called, and dropped when it returns.
The forward is that of the model in memory, so the ranges are the same, bit for bit. Blocks are read again for every
item of the dataloader: large batches read less. Not handled: architectures that transformers does not know.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import DataError, ModelError
from quark.torch.algorithms.blocks import find_blocks
from quark.torch.attention import Targets, find_targets
from quark.torch.calibration import calibrate
from quark.torch.config.model import QConfig
from quark.torch.export.state import activations_item, attention_items
from quark.torch.files.skeleton import Skeleton, StoredSource
from quark.torch.kv_cache import settle_scales
from quark.torch.matching import ACTIVATIONS, Match, Matches, is_static
from quark.torch.prepare import prepare, restore
from quark.torch.quantized_layer import QuantLayer, forget_quantized
from quark.torch.shared_scales import share_expert_inputs

log = logging.getLogger(__name__)


def activation_parameters(
    skeleton: Skeleton, found: Matches, config: QConfig, folder: Path, samples: Iterable[Any]
) -> dict[str, torch.Tensor]:
    """The static scales and zero points of layers, caches and attention probabilities.

    Args:
        skeleton: with values in its buffers (``read_skeleton(..., buffers=True)``).
        found: what is quantized in it.
        config: how.
        folder: the checkpoint.
        samples: as calibration takes them.

    Returns:
        By their names in a file.

    Raises:
        ModelError: a parameter that no file has.
        DataError: no samples, or values that are not finite.
    """
    model, tensors = skeleton.model, skeleton.tensors
    blocks = find_blocks(model)
    if not blocks.path:
        raise ModelError("the checkpoint has no decoder blocks, which static activations are calibrated one by one in")
    inside = tuple(f"{name}." for name in blocks.modules)
    load(model, [name for name in tensors if not name.startswith(inside)], tensors, folder)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    check_loaded(model, inside)
    layers = tuple(item.layer for item in found.quantized if is_static(item))
    quantized = replace(found.only(*ACTIVATIONS), layers=layers)
    with ExitStack() as undo:
        undo.callback(restore, quantized)
        prepare(quantized)
        find_targets(model, config).attach(undo)
        for name, block in blocks.modules.items():
            own = [tensor for tensor in tensors if tensor.startswith(f"{name}.")]
            for handle in (
                block.register_forward_pre_hook(lambda *_, own=own: load(model, own, tensors, folder)),
                block.register_forward_hook(lambda *_, own=own: drop(model, own), always_call=True),
            ):
                undo.callback(handle.remove)
        unreached = calibrate(model, samples)
        settle_scales(model, config)
        if config.sync_moe_expert_input_amax:
            adopted = share_expert_inputs(model)
            unreached = [name for name in unreached if name not in adopted]
        if unreached:
            log.warning("no sample reached %d activations, which stay float: %s", len(unreached), ", ".join(unreached))
        scales = [value for item in quantized.quantized for value in parameters_of(item).items()]
        return dict([*scales, *(value for item in attention_items(model) for value in item.make().items())])


def parameters_of(item: Match) -> dict[str, torch.Tensor]:
    """What a file holds of a layer's activations."""
    layer = item.layer.module
    if not isinstance(layer, QuantLayer):
        raise TypeError(f"{item.layer.name!r} has lost its quantizers")
    made = activations_item(item.layer.name, layer)
    return {} if made is None else dict(made.make())


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a tensor, and the tensor's name there."""
    path, _, last = name.rpartition(".")
    try:
        return model.get_submodule(path), last
    except AttributeError as error:
        raise ModelError(f"the checkpoint has the tensor {name!r}, for which the model has no module") from error


def load(model: nn.Module, names: Iterable[str], tensors: Mapping[str, StoredSource], folder: Path) -> None:
    """Give parameters and buffers the values of the files."""
    for name in names:
        owner, last = owner_of(model, name)
        value = tensors[name].read(folder)
        if last in owner._buffers:
            owner._buffers[last] = value
        else:
            owner._parameters[last] = nn.Parameter(value, requires_grad=False)


def drop(model: nn.Module, names: Iterable[str]) -> None:
    """Take the values away again."""
    for name in names:
        owner, last = owner_of(model, name)
        value = owner._parameters.get(last)
        if value is not None:
            owner._parameters[last] = nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False)
        forget_quantized([owner])


def check_loaded(model: nn.Module, inside: tuple[str, ...]) -> None:
    """Everything outside the blocks has values."""
    named = [*model.named_parameters(), *model.named_buffers()]
    missing = [name for name, value in named if value.is_meta and not name.startswith(inside)]
    if missing:
        raise ModelError(f"the checkpoint has no tensor {missing[0]!r}, which the model needs to run")


def needs_samples(found: Matches, attention: Targets, samples: Iterable[Any] | None) -> bool:
    """Whether ranges are to be found from samples.

    Raises:
        DataError: they are, and there are none.
    """
    static = [f"{item.source}: activations of {item.layer.name!r}" for item in found.quantized if is_static(item)]
    static += attention.static
    if static and samples is None:
        raise DataError(
            f"{static[0]} have a static range, which needs samples: give a dataloader, or use a dynamic or "
            f"weight-only scheme"
        )
    return bool(static)
