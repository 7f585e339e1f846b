"""Static activations of a model that stays in its files: samples run while one decoder block at a time is in memory.

Embeddings, norms and the head are loaded; a block's tensors are read when it is called, and dropped when it returns.
The forward is that of the model in memory, so the ranges are the same, bit for bit. Blocks are read again for every
item of the dataloader: large batches read less. Not handled: architectures that transformers does not know.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from quark.errors import DataError
from quark.torch.algorithms.blocks import find_blocks
from quark.torch.attention import Targets, find_targets
from quark.torch.calibration import calibrate
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.export.state import activations_item, attention_items
from quark.torch.export.stored import PREFIXES
from quark.torch.files.block_files import BlocksInFiles, RunInFiles, opened_model
from quark.torch.kv_cache import CacheMatch, settle_scales, without_lost
from quark.torch.matching import ACTIVATIONS, Match, Matches, choose, is_static
from quark.torch.prepare import prepare, restore
from quark.torch.quantized_layer import QuantLayer
from quark.torch.shared_scales import share_expert_inputs

log = logging.getLogger(__name__)


def activation_parameters(job: RunInFiles) -> dict[str, torch.Tensor]:
    """The static scales and zero points of layers, caches and attention probabilities.

    Returns:
        By their names in a file.

    Raises:
        ModelError: no decoder blocks, or a parameter that no file has.
        DataError: no samples, or values that are not finite.
    """
    (skeleton, found), config = job.opened(), job.config
    model = skeleton.model
    blocks = opened_model(skeleton, job, decoder_path(model))
    store = BlocksInFiles(blocks, model, skeleton.tensors, job.checkpoint.folder, job.journal, job.device)
    layers = tuple(item.layer for item in found.quantized if is_static(item))
    quantized = replace(found.only(*ACTIVATIONS), layers=layers)
    with ExitStack() as undo:
        undo.callback(restore, quantized)
        prepare(quantized)
        find_targets(model, config).attach(undo)
        undo.enter_context(store.recording())
        unreached = calibrate(model, job.samples)
        settle_scales(model, config)
        if config.sync_moe_expert_input_amax:
            adopted = share_expert_inputs(model)
            unreached = [name for name in unreached if name not in adopted]
        if unreached:
            log.warning("no sample reached %d activations, which stay float: %s", len(unreached), ", ".join(unreached))
        scales = [value for item in quantized.quantized for value in parameters_of(item).items()]
        return dict([*scales, *(value for item in attention_items(model) for value in item.make().items())])


def decoder_path(model: Any) -> str:
    """Where the blocks are that read text, in a model with other towers beside them; empty: nobody says."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    name = next((name for name, module in model.named_modules() if name and module is decoder), "")
    path = find_blocks(model.get_submodule(name)).path if name else ""
    return f"{name}.{path}" if path else ""


def parameters_of(item: Match) -> dict[str, torch.Tensor]:
    """What a file holds of a layer's activations."""
    layer = item.layer.module
    if not isinstance(layer, QuantLayer):
        raise TypeError(f"{item.layer.name!r} has lost its quantizers")
    made = activations_item(item.layer.name, layer)
    return {} if made is None else dict(made.make())


def without_unreached(
    config: QConfig, found: Matches, caches: Sequence[CacheMatch], scales: Collection[str]
) -> QConfig:
    """The configuration with the static activations that have no scale, since no sample reached them, left float."""
    left: dict[str, QLayerConfig] = {}
    cached = {name for one in caches for name in one.projections.values() if one.all_stages[0].calibrated}
    scaled = {name for name in cached if any(scale.startswith(f"{name}.") for scale in scales)}
    config = without_lost(config, cached - scaled, scaled)
    known = {scale.rpartition("_scale")[0] for scale in scales}
    for item in found.quantized:
        name = item.layer.name
        calibrated = (slot for slot in ACTIVATIONS if any(stage.calibrated for stage in item.stages[slot]))
        slots = [slot for slot in calibrated if f"{name}.{PREFIXES[slot]}" not in known]
        own, _ = choose(item.layer, config)
        if slots and own is not None:
            left[name] = replace(own, **dict.fromkeys(slots))
    return replace(config, layer_quant_config={**config.layer_quant_config, **left})


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
