"""Weights tuned for a model that stays in its files: GPTQ, GPTAQ, Qronos, AutoRound with one decoder block in memory.

    samples run through the float model, whose blocks are read when they are called and dropped behind
    for each block: read it, tune its weights on what the quantized blocks before it produce, run it, keep its
    weights in a file, drop it

The weights are those that the algorithm gives a model in memory, bit for bit. A block that an interrupted job has
finished is not tuned again. Memory holds a block, what the algorithm needs for it, and the samples' hidden states.

Not handled: algorithms that change the float model as a whole (scalings, rotations, branches), which are refused by
name; static activations; weights that share a scale with others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quark.errors import ConfigError, DataError, ModelError
from quark.torch.algorithms.blocks import find_blocks
from quark.torch.algorithms.context import Context, Home, Undo, forget_twins
from quark.torch.algorithms.registry import run_algorithms
from quark.torch.attention import find_targets
from quark.torch.config.model import QConfig
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.fake_quantize import Quantizer, calibrate_with, parts
from quark.torch.files.plan import Quantized
from quark.torch.files.skeleton import Stored, read_skeleton
from quark.torch.files.static import check_loaded, drop, load
from quark.torch.matching import Match, match
from quark.torch.prepare import prepare, restore

KINDS = ("gptq", "gptaq", "qronos", "autoround")
PARAMETERS = ("scale", "zero_point")
Tuned = dict[str, Path]  # the file with a layer's tuned weight, by the name of the weight


def check_tuning(
    config: QConfig, quantized: Mapping[str, Quantized], static: bool, samples: Iterable[Any] | None
) -> None:
    """The algorithms can work on files.

    Raises:
        ConfigError: an algorithm that cannot, more than one, or weights that share a scale.
        DataError: no samples.
    """
    names = [algorithm.name for algorithm in config.algo_config or []]
    for name in names:
        if name not in KINDS:
            raise ConfigError(
                f"algo_config: {name!r} changes or searches the model as a whole, which files do not hold in memory; "
                f"those that tune block by block do: {', '.join(KINDS)}"
            )
    if len(names) > 1:
        raise ConfigError(f"algo_config: one algorithm at a time works on files, not {', '.join(names)}")
    if names and static:
        raise ConfigError("algo_config: in files, algorithms need dynamic or no activations, not static ones")
    shared = [name for name, item in quantized.items() if len(item.siblings) > 1]
    if names and shared:
        raise ConfigError(
            f"algo_config: {shared[0]!r} shares its scale with other weights, which tuning in files cannot"
        )
    if names and samples is None:
        raise DataError(f"algo_config: {names[0]!r} needs samples: give a dataloader")


@dataclass(frozen=True)
class InFiles(Home):
    """Blocks that are read when they are needed.

    Attributes:
        blocks: by name.
        model: of which they are.
        items: the quantized layers, by name.
        tensors: of the checkpoint, by the names in memory.
        source: its folder.
        folder: where tuned weights are kept.
        undo: of the algorithm; what it holds of a block goes with the block.
    """

    blocks: Mapping[str, nn.Module]
    model: nn.Module
    items: Mapping[str, Match]
    tensors: Mapping[str, Stored]
    source: Path
    folder: Path
    undo: Undo

    def own(self, name: str) -> list[str]:
        """The tensors of a block."""
        return [tensor for tensor in self.tensors if tensor.startswith(f"{name}.")]

    def load(self, name: str) -> None:
        """Read a block."""
        load(self.model, self.own(name), self.tensors, self.source)

    def drop(self, name: str) -> None:
        """Forget a block."""
        drop(self.model, self.own(name))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Blocks are read when they are called."""
        with ExitStack() as undo:
            for name, block in self.blocks.items():
                before = block.register_forward_pre_hook(lambda *_, name=name: self.load(name))
                after = block.register_forward_hook(lambda *_, name=name: self.drop(name), always_call=True)
                undo.callback(before.remove)
                undo.callback(after.remove)
            yield

    @contextmanager
    def holding(self, name: str, block: nn.Module) -> Iterator[Callable[[], None] | None]:
        """A block with values; what becomes of it is kept in a file."""
        self.load(name)
        layers = {key: item for key, item in self.items.items() if key.startswith(f"{name}.")}
        for item in layers.values():
            set_ranges(item)
        path = path_of(self.folder, name)
        if path.exists():
            yield lambda: self.put(path, layers)
        else:
            yield None
            self.keep(path, layers)
        self.undo.actions.clear()
        self.undo.seen.clear()
        self.drop(name)

    def keep(self, path: Path, layers: Mapping[str, Match]) -> None:
        """Weights and scales of a block into a file, which appears when it is whole."""
        values: dict[str, torch.Tensor] = {}
        for name, item in layers.items():
            values[f"{name}.weight"] = item.layer.module._parameters["weight"].detach()  # type: ignore[union-attr]
            for number, part in enumerate(parts(weight_quantizer(item))):
                found = ((key, getattr(part, key)) for key in PARAMETERS)
                values |= {f"{name}.weight.{number}.{key}": value for key, value in found if value is not None}
        part_path = path.with_name(f"{path.name}.part")
        save_file({key: value.clone().contiguous() for key, value in values.items()}, part_path)
        os.replace(part_path, path)

    def put(self, path: Path, layers: Mapping[str, Match]) -> None:
        """Weights and scales of a block from a file."""
        values = load_file(path)
        for name, item in layers.items():
            weight = nn.Parameter(values[f"{name}.weight"], requires_grad=False)
            item.layer.module._parameters["weight"] = weight
            set_scales(weight_quantizer(item), f"{name}.weight", values)
        forget_twins(item.layer.module for item in layers.values())


def weight_quantizer(item: Match) -> Quantizer:
    """That of a prepared layer."""
    return item.layer.module._modules["weight_quantizer"]  # type: ignore[return-value]


def set_ranges(item: Match) -> None:
    """Those of a weight that is in memory now; its quantizer stays as disabled as it was."""
    quantizer = weight_quantizer(item)
    before = [part.enabled for part in parts(quantizer)]
    calibrate_with(quantizer, item.layer.module._parameters["weight"])  # type: ignore[arg-type]
    for part, enabled in zip(parts(quantizer), before, strict=True):
        part.enabled = enabled


def set_scales(quantizer: Quantizer, name: str, values: Mapping[str, torch.Tensor]) -> None:
    """The scales that a file of tuned weights has for a quantizer."""
    for number, part in enumerate(parts(quantizer)):
        for key in PARAMETERS:
            if f"{name}.{number}.{key}" in values:
                setattr(part, key, values[f"{name}.{number}.{key}"])


def path_of(folder: Path, block: str) -> Path:
    """Where a block's tuned weights are."""
    return folder / f"{block}.safetensors"


def tuned_weights(checkpoint: Checkpoint, config: QConfig, folder: Path, samples: Iterable[Any] | None) -> Tuned:
    """Tune the weights of all decoder blocks into files of ``folder``.

    Args:
        checkpoint: whose.
        config: how.
        folder: of this job, new or with the blocks that it has finished.
        samples: as ``quantize_model`` takes them.

    Raises:
        ModelError: no decoder blocks, or a parameter that no file has.
    """
    (algorithm,) = config.algo_config or []
    skeleton = read_skeleton(checkpoint, buffers=True, eager=config.softmax_quant_spec is not None)
    model, found = skeleton.model, match(skeleton.model, config, skeleton=True)
    blocks = find_blocks(model, getattr(algorithm, "model_decoder_layers", ""))
    if not blocks.path:
        raise ModelError("the checkpoint has no decoder blocks, which weights are tuned one by one in")
    inside = tuple(f"{name}." for name in blocks.modules)
    outside = [name for name in skeleton.tensors if not name.startswith(inside)]
    load(model, outside, skeleton.tensors, checkpoint.folder)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    check_loaded(model, inside)
    weights = [item for item in found.quantized if item.stages["weight"]]
    items = {item.layer.name: item for item in weights if item.layer.name.startswith(inside)}
    folder.mkdir(exist_ok=True)
    changes = Undo()
    home = InFiles(blocks.modules, model, items, skeleton.tensors, checkpoint.folder, folder, changes)
    with ExitStack() as undo:
        undo.callback(restore, found)
        prepare(found, ranges=False)
        find_targets(model, config).attach(undo)
        model.eval()
        run_algorithms([algorithm], Context(model, list(samples or ()), found, changes, home), tunes=True)
    places = {
        name: path_of(folder, block) for block in blocks.modules for name in items if name.startswith(f"{block}.")
    }
    return {f"{name}.weight": path for name, path in places.items()}
