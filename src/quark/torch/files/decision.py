"""What becomes of every tensor of a checkpoint, decided before a value is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.errors import ModelError
from quark.torch.config.model import QConfig
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.fake_quantize import Quantizer, make_quantizer
from quark.torch.files.skeleton import Skeleton, StoredSource, read_skeleton
from quark.torch.matching import Match, Matches, match_skeleton
from quark.torch.plan_rows import stages_in, tensor_name
from quark.torch.quantized_layer import OWN


@dataclass(frozen=True)
class CheckpointDecision:
    """What becomes of a checkpoint, before a value is read.

    Attributes:
        skeleton: its modules and tensors.
        found: the plan, and the layers that it is about.
        weights: the tensors that are quantized, by their names in memory, with the places where they are.
        tensors: all that is written.
        by_files: files hold them; else transformers makes them of other tensors when it loads the model.
    """

    skeleton: Skeleton
    found: Matches
    weights: dict[str, StoredSource]
    tensors: dict[str, StoredSource]
    by_files: bool = True

    def stored_apart(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes, in their float types, of the tensors that are quantized, and of the others."""
        sizes = {name: one.dtype.itemsize * prod(one.shape) for name, one in (self.tensors | self.weights).items()}
        others = {name: size for name, size in sizes.items() if name not in self.weights}
        return {name: sizes[name] for name in self.weights}, others


def decide(checkpoint: Checkpoint, config: QConfig, in_memory: bool = False) -> CheckpointDecision:
    """Decide for every tensor of a checkpoint; arguments and errors as in ``quantize_checkpoint``.

    Args:
        in_memory: weights that transformers makes of other tensors when it loads the model count as they are then.
    """
    skeleton = read_skeleton(checkpoint, eager=config.softmax_quant_spec is not None)
    found = match_skeleton(skeleton.model, config)
    by_files = not in_memory or all(is_stored(item, slot, skeleton) for item in found.quantized for slot in OWN)
    skeleton = skeleton if by_files else as_loaded(skeleton, checkpoint)
    weights = {
        tensor_name(item.layer.name, slot): stored_of(item, slot, skeleton)
        for item in found.quantized
        for slot in OWN
        if item.stages[slot]
    }
    return CheckpointDecision(skeleton, found, weights, skeleton.kept(weights) | untied(skeleton, weights), by_files)


def is_stored(item: Match, slot: str, skeleton: Skeleton) -> bool:
    """Whether the files have a tensor of a layer that is quantized, or one that it is tied to."""
    ties = getattr(skeleton.model, "all_tied_weights_keys", None) or {}
    names = [tensor_name(name, slot) for name in item.layer.names]
    return not item.stages[slot] or any(name in skeleton.tensors or name in ties for name in names)


def as_loaded(skeleton: Skeleton, checkpoint: Checkpoint) -> Skeleton:
    """A skeleton whose tensors are those of the model in memory, as if the first file held them."""
    ties = getattr(skeleton.model, "all_tied_weights_keys", None) or {}
    file, dtype = next(iter(checkpoint.files)), checkpoint.dtype or torch.float32
    state = {name: value for name, value in skeleton.model.state_dict().items() if name not in ties}
    tensors = {name: StoredSource(file, name, tuple(value.shape), dtype) for name, value in state.items()}
    return replace(skeleton, tensors=tensors, stacked={})


def untied(skeleton: Skeleton, weights: Mapping[str, StoredSource]) -> dict[str, StoredSource]:
    """The float tensors that the files have under the name of a quantized one alone, to which they are tied."""
    ties: Mapping[str, str] = getattr(skeleton.model, "all_tied_weights_keys", None) or {}
    known = {**skeleton.tensors, **weights}
    return {target: weights[source] for target, source in ties.items() if source in weights and target not in known}


def stored_of(item: Match, slot: str, skeleton: Skeleton) -> StoredSource:
    """The stored tensor of a layer.

    Raises:
        ModelError: there is none.
    """
    for name in item.layer.names:
        if f"{name}.{slot}" in skeleton.tensors:
            return skeleton.tensors[f"{name}.{slot}"]
    name = f"{item.layer.name}.{slot}"
    ties = getattr(skeleton.model, "all_tied_weights_keys", None) or {}
    if name in ties:
        why = f"it shares that of {ties[name]!r}, and such a layer stays float: exclude it"
    else:
        why = "transformers makes it of other tensors when it loads the model: use `quark torch quantize`"
    raise ModelError(f"the checkpoint has no tensor {name!r}; {why}")


def quantizer_of(plan: Plan, name: str) -> Quantizer:
    """A new quantizer of a weight or bias."""
    return make_quantizer(stages_in(plan, name), f"weight {name!r}", True)
