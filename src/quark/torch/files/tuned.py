"""Weights tuned for a model that stays in its files, with one decoder block in memory: GPTQ, GPTAQ, Qronos, AutoRound;
and biases.

    samples run through the float model, whose blocks are read when they are called and dropped behind
    for each block: read it, tune its weights on what the quantized blocks before it produce, run it, keep its
    weights in a file, drop it

The weights are those that the algorithm gives a model in memory, bit for bit. A block that an interrupted job has
finished is not tuned again. Memory holds a block, what the algorithm needs for it, and the samples' hidden states.

Not handled: static activations; weights that share a scale with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quark.dataclass import dataclass
from quark.torch.algorithms.context import ModelContext, Undo
from quark.torch.algorithms.registry import run_algorithms
from quark.torch.attention import find_targets
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.fake_quantize import Quantizer, calibrate_with, parts
from quark.torch.files.block_files import BlocksInFiles, RunInFiles, opened_model
from quark.torch.files.changed import Changes
from quark.torch.matching import Match
from quark.torch.prepare import prepare, restore
from quark.torch.quantized_layer import OWN, forget_quantized, weight_quantizer
from quark.torch.rotated import attach_rotation

PARAMETERS = ("scale", "zero_point")
Tuned = dict[str, Path]  # the file with a tuned tensor, by its name


@dataclass(frozen=True)
class Tuning(BlocksInFiles):
    """Blocks whose tuned weights are kept in files.

    Attributes:
        items: the quantized layers, by name.
        undo: of the algorithm; what it holds of a block goes with the block.
    """

    items: Mapping[str, Match] = field(default_factory=dict)
    undo: Undo = field(default_factory=Undo)

    @contextmanager
    def holding(self, name: str, block: nn.Module) -> Iterator[Callable[[], None] | None]:
        """A block with values; what becomes of it is kept in a file."""
        self.load(name)
        layers = {key: item for key, item in self.items.items() if key.startswith(f"{name}.")}
        for item in layers.values():
            set_ranges(item)
        path = self.journal.file(entry_of(name))
        if path is not None:
            yield lambda: self.put(path, layers)
        else:
            yield None
            self.save(name, layers)
        self.undo.actions.clear()
        self.undo.seen.clear()
        self.drop(name)

    def save(self, block: str, layers: Mapping[str, Match]) -> None:
        """Weights, biases and scales of a block into a file of the journal."""
        values: dict[str, torch.Tensor] = {}
        for name, item in layers.items():
            own = ((key, item.layer.module._parameters.get(key)) for key in OWN)
            values |= {f"{name}.{key}": value.detach() for key, value in own if value is not None}
            for number, part in enumerate(parts(weight_quantizer(item.layer.module))):
                found = ((key, getattr(part, key)) for key in PARAMETERS)
                values |= {f"{name}.weight.{number}.{key}": value for key, value in found if value is not None}
        separate = {key: value.clone().contiguous() for key, value in values.items()}
        self.journal.finish_file(entry_of(block), lambda part: save_file(separate, part))

    def put(self, path: Path, layers: Mapping[str, Match]) -> None:
        """Weights and scales of a block from a file."""
        values = load_file(path, self.device)
        for name, item in layers.items():
            for key in OWN:
                if f"{name}.{key}" in values:
                    item.layer.module._parameters[key] = nn.Parameter(values[f"{name}.{key}"], requires_grad=False)
            set_scales(weight_quantizer(item.layer.module), f"{name}.weight", values)
        forget_quantized(item.layer.module for item in layers.values())


def set_ranges(item: Match) -> None:
    """Those of a weight and a bias that are in memory now; their quantizers stay as disabled as they were."""
    for key in OWN:
        quantizer = item.layer.module._modules[f"{key}_quantizer"]
        value = item.layer.module._parameters.get(key)
        if quantizer is None or value is None:
            continue
        before = [part.enabled for part in parts(quantizer)]
        calibrate_with(quantizer, value)
        for part, enabled in zip(parts(quantizer), before, strict=True):
            part.enabled = enabled


def set_scales(quantizer: Quantizer, name: str, values: Mapping[str, torch.Tensor]) -> None:
    """The scales that a file of tuned weights has for a quantizer."""
    for number, part in enumerate(parts(quantizer)):
        for key in PARAMETERS:
            if f"{name}.{number}.{key}" in values:
                setattr(part, key, values[f"{name}.{number}.{key}"])


def entry_of(block: str) -> str:
    """The entry of a journal that has a block's tuned weights."""
    return f"tuned weights of {block}"


def tuned_weights(job: RunInFiles, algorithm: AlgoConfig, changes: Changes) -> Tuned:
    """Tune the weights of all decoder blocks into files of the job's journal.

    Args:
        job: with the blocks that are finished.
        algorithm: that tunes.
        changes: of the float model.

    Raises:
        ModelError: no decoder blocks, or a parameter that no file has.
    """
    (skeleton, found), journal = job.opened(), job.journal
    model = skeleton.model
    if changes.untied:
        config_of_model: Any = model.config
        config_of_model.tie_word_embeddings = False
    skeleton = replace(skeleton, tensors={**skeleton.tensors, **changes.tensors})
    blocks = opened_model(skeleton, job, getattr(algorithm, "model_decoder_layers", ""))
    for name, turn in changes.turns.items():
        attach_rotation(model.get_submodule(name), turn)
    inside = tuple(f"{name}." for name in blocks)
    weights = [item for item in found.quantized if item.stages["weight"]]
    items = {item.layer.name: item for item in weights if item.layer.name.startswith(inside)}
    store = Tuning(blocks, model, dict(skeleton.tensors), job.checkpoint.folder, journal, job.device, items=items)
    with ExitStack() as undo:
        undo.callback(restore, found)
        prepare(found, ranges=False)
        find_targets(model, job.config).attach(undo)
        model.eval()
        context = ModelContext(model, list(job.samples), found, store.undo, store, job.workers)
        run_algorithms([algorithm], context, tunes=True)
    paths = {block: journal.file(entry_of(block)) for block in blocks}
    return {
        f"{name}.{key}": path
        for block, path in paths.items()
        for name in items
        for key in OWN
        if path is not None and name.startswith(f"{block}.")
    }
