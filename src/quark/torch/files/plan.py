"""What becomes of every tensor of a checkpoint, decided before a value is read: plain values, for any process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quark.errors import ModelError
from quark.numerics.granularity import Granularity
from quark.torch.config.model import QConfig
from quark.torch.fake_quantize import Quantizer, make_quantizer
from quark.torch.files.skeleton import Stored
from quark.torch.matching import Match, Matches
from quark.torch.shared_scales import check_siblings
from quark.torch.stage import Stage, Stages

OWN = ("weight", "bias")


@dataclass(frozen=True)
class Quantized:
    """A tensor that is quantized.

    Attributes:
        name: in memory.
        stored: where it is.
        stages, granularities: how.
        siblings: names of the tensors that share its tensor scale, itself among them; empty: none.
    """

    name: str
    stored: Stored
    stages: Stages
    granularities: tuple[Granularity, ...]
    siblings: tuple[str, ...] = ()

    def quantizer(self) -> Quantizer:
        """A new quantizer of it."""
        known: dict[Stage, Granularity] = dict(zip(self.stages, self.granularities, strict=True))
        return make_quantizer(self.stages, known.__getitem__, f"weight {self.name!r}", True)


def plan(found: Matches, tensors: Mapping[str, Stored], config: QConfig) -> dict[str, Quantized]:
    """The quantized tensors of a checkpoint, by their names in memory.

    Raises:
        ModelError: a layer without its tensor.
    """
    quantized: dict[str, Quantized] = {}
    for item in found.quantized:
        for slot in OWN:
            if item.stages[slot]:
                name = f"{item.layer.name}.{slot}"
                stored = stored_of(item, slot, tensors)
                rows = tuple(item.granularity(slot, stage) for stage in item.stages[slot])
                quantized[name] = Quantized(name, stored, item.stages[slot], rows)
    return with_siblings(quantized, config)


def stored_of(item: Match, slot: str, tensors: Mapping[str, Stored]) -> Stored:
    """The stored tensor of a layer."""
    for name in item.layer.names:
        if f"{name}.{slot}" in tensors:
            return tensors[f"{name}.{slot}"]
    raise ModelError(
        f"the checkpoint has no tensor {item.layer.name + '.' + slot!r}; a layer that shares its weight with another "
        f"(a head with the embedding) stays float: exclude it"
    )


def with_siblings(quantized: dict[str, Quantized], config: QConfig) -> dict[str, Quantized]:
    """The same, with the groups of ``shared_scale_groups``.

    Raises:
        ConfigError: a group that a user wrote has no two members.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for name in quantized:
        path, _, slot = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        for number, patterns in enumerate(config.shared_scale_groups):
            if slot == "weight" and any(fnmatchcase(last, pattern.rpartition(".")[2]) for pattern in patterns):
                groups.setdefault((parent, number), []).append(name)
    found = {number for (_, number), members in groups.items() if len(members) > 1}
    for number, patterns in enumerate(config.shared_scale_groups):
        check_siblings(number in found, patterns)
    for members in groups.values():
        for name in members if len(members) > 1 else ():
            one = quantized[name]
            quantized[name] = Quantized(name, one.stored, one.stages, one.granularities, tuple(members))
    return quantized
