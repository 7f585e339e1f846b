"""Which layer of a model gets which configuration, decided and checked before anything is changed.

A layer may have several names (a module used twice); a pattern that matches any of them matches the layer. A name,
glob or type that the user wrote and that matches nothing is an error, as is a layer whose tensors do not fit their
configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from quark.config.plan import NodePlan, Plan
from quark.config.tensor import check_sign
from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError
from quark.numerics.granularity import Channel, Granularity, Group, Token
from quark.torch.config.model import SLOTS, QConfig, QLayerConfig
from quark.torch.direct_reads import read_directly
from quark.torch.layers import LayerKind, kind_of, known_kind, type_names, type_of_name
from quark.torch.patterns import Usual, check_fit, check_group, check_pattern, matches
from quark.torch.plan_rows import ROLES, WORDS, on_axis, put, stages_in, tensor_name
from quark.torch.stage import Stage, Stages

log = logging.getLogger(__name__)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ACTIVATIONS = ("input_tensors", "output_tensors")
FEATURES = {  # of the layers of torch, and of transformers' Conv1D
    "input_tensors": ("in_features", "in_channels", "nx"),
    "output_tensors": ("out_features", "out_channels", "nf"),
}
UNSUPPORTED = "layers of this type are not quantized"
UNNAMED = "the configuration names none of its tensors"
READ = "other code of the model reads its weight"


@dataclass(frozen=True)
class Candidate:
    """A layer that can be quantized."""

    names: tuple[str, ...]
    module: nn.Module
    kind: LayerKind

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]


@dataclass(frozen=True, eq=False)
class Match:
    """What a plan says about a layer.

    Attributes:
        layer: the layer.
        plan: the decisions about its model.
    """

    layer: Candidate
    plan: Plan

    @cached_property
    def stages(self) -> Mapping[str, Stages]:
        """By slot what runs, with the granularity of the stored tensor; empty tuples stay float."""
        return {slot: stages_in(self.plan, tensor_name(self.layer.name, slot)) for slot in SLOTS}

    @property
    def source(self) -> str:
        """The field of the configuration that decided."""
        return self.plan.nodes[self.layer.name].reason

    def written(self, stage: Stage) -> Granularity:
        """The granularity of a stage of the weight [out, in], however it is stored."""
        return self.layer.kind.weight_granularity(stage.spec.granularity)


@dataclass(frozen=True, eq=False)
class Matches:
    """What a plan says about a model.

    Attributes:
        plan: every decision.
        layers: those that can be quantized.
    """

    plan: Plan
    layers: tuple[Candidate, ...]

    @cached_property
    def quantized(self) -> tuple[Match, ...]:
        """The layers that are quantized."""
        found = (Match(layer, self.plan) for layer in self.layers)
        return tuple(item for item in found if any(item.stages.values()))

    @property
    def excluded(self) -> tuple[str, ...]:
        """Names of the layers that the user excluded, or whose weight other code reads."""
        return tuple(layer.name for layer in self.layers if tensor_name(layer.name, "weight") in self.plan.floats)

    @property
    def unsupported(self) -> tuple[str, ...]:
        """``name (type)`` of other modules with weight matrices; they stay float."""
        return tuple(f"{row.name} ({row.op_type})" for row in self.plan.nodes.values() if row.reason == UNSUPPORTED)

    def only(self, *slots: str) -> Matches:
        """The same with the tensors in these slots alone."""
        kept = {tensor_name(layer.name, slot) for layer in self.layers for slot in slots}
        rows = {name: row for name, row in self.plan.tensors.items() if name in kept}
        return Matches(replace(self.plan, tensors=rows), self.layers)


def match(model: nn.Module, config: QConfig, skeleton: bool = False, stored: bool = False) -> Matches:
    """Decide for every layer of ``model``.

    Args:
        model: whose layers.
        config: what is wanted.
        skeleton: its tensors are still to be loaded, so values are not looked at.
        stored: the configuration is that of a file, which says all.

    Raises:
        ConfigError: a pattern or a type that matches nothing; a tensor that does not fit its configuration.
        ModelError: nothing to quantize, or weights that cannot be quantized.
    """
    candidates = tuple(find_candidates(model))
    if not candidates:
        known = ", ".join(type_names())
        raise ModelError(f"{type(model).__name__} has no layer that can be quantized; those that can: {known}")
    if not skeleton:
        check_patterns(model, config, list(candidates))
    direct = set() if stored else directly_read(model, candidates, config)
    plan = Plan()
    for layer in candidates:
        decide(plan, layer, config, layer in direct, skeleton)
    for name, kind in find_unsupported(model):
        plan.nodes[name] = NodePlan(name, kind, False, UNSUPPORTED)
    found = Matches(plan, candidates)
    if not plan.tensors and not (config.kv_cache_post_rope and config.kv_cache_quant_config):
        asked = [layer.name for layer in candidates if not layer.kind.by_default]
        hint = f"; {asked[0]!r} is quantized only where layer_quant_config or a type names it" if asked else ""
        raise ModelError(
            f"nothing to quantize: {len(found.excluded)} of the {len(candidates)} layers are excluded, and the "
            f"configuration of the others names no tensor{hint}"
        )
    if not stored:
        share_scales(plan, config.shared_scale_groups)
    return found


def match_skeleton(model: nn.Module, config: QConfig) -> Matches:
    """As ``match``, of a model without values that has the names of the one in memory: patterns are checked too."""
    check_patterns(model, config, list(find_candidates(model)))
    return match(model, config, skeleton=True)


def decide(plan: Plan, layer: Candidate, config: QConfig, direct: bool, skeleton: bool) -> None:
    """Write the decisions about one layer into ``plan``."""
    left = excluded_by(layer, config) if is_excluded(layer, config) else READ if direct else ""
    found, source = (None, "") if direct else choose_all(layer, config)
    stages = {} if found is None else bind(layer, found, source, skeleton)
    for slot in WORDS:
        role = ROLES.get(slot, "activation")
        put(plan, tensor_name(layer.name, slot), role, stages.get(slot, ()), source)
    if left:
        plan.floats[tensor_name(layer.name, "weight")] = left
    reason = source if any(stages.values()) else left or UNNAMED
    plan.nodes[layer.name] = NodePlan(layer.name, type(layer.module).__name__, any(stages.values()), reason)


def share_scales(plan: Plan, groups: Iterable[Iterable[str]]) -> None:
    """Make one group of the weights of siblings whose names a group of the configuration holds (last parts or globs).

    Raises:
        ConfigError: no two siblings of a group that a user wrote.
    """
    for group in groups:
        names = list(group)
        last = [name.rpartition(".")[2] for name in names]
        found: dict[str, list[str]] = {}
        for row in plan.of_role("weight"):
            parent, _, own = row.name.removesuffix(".weight").rpartition(".")
            if any(fnmatchcase(own, pattern) for pattern in last):
                found.setdefault(parent, []).append(row.name)
        members = [rows for rows in found.values() if len(rows) > 1]
        if not members and not all(isinstance(name, Usual) for name in names):
            raise ConfigError(
                f"shared_scale_groups: no module of the model holds two quantized layers of {names}; a group names "
                f"siblings, for instance ['q_proj', 'k_proj', 'v_proj']"
            )
        for rows in members:
            for name in rows:
                plan.put(replace(plan.tensors[name], group=rows[0]))


def weights_in_groups(plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """The weights that share their tensor scales, by the names of each."""
    groups: dict[str, list[str]] = {}
    for row in plan.of_role("weight"):
        groups.setdefault(row.group, []).append(row.name)
    return {name: tuple(names) for names in groups.values() if len(names) > 1 for name in names}


def is_static(item: Match) -> bool:
    """Whether samples are needed for a layer."""
    return any(stage.calibrated for slot in ACTIVATIONS for stage in item.stages[slot])


def directly_read(model: nn.Module, candidates: Iterable[Candidate], config: QConfig) -> set[Candidate]:
    """The layers whose weight other code reads, past what quantizes it; they stay float.

    Raises:
        ConfigError: the configuration names one of them.
    """
    names = set(read_directly(model))
    found = {layer for layer in candidates if names & set(layer.names) and not is_excluded(layer, config)}
    for layer in found:
        if named := next((name for name in config.layer_quant_config if name in layer.names), None):
            raise ConfigError(
                f"layer_quant_config: the weight of {named!r} is read by other code of the model, so it cannot be "
                f"quantized; leave it out"
            )
    if names := {layer.name for layer in found if choose(layer, config)[0] is not None}:
        log.info("%d layers stay float, since other code reads their weight: %s", len(names), ", ".join(sorted(names)))
    return found


def find_candidates(model: nn.Module) -> Iterable[Candidate]:
    """The layers of a known kind, each once, with all their names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    for module, found in names.items():
        kind = kind_of(module)
        if kind is not None:
            yield Candidate(tuple(found), module, kind)


def find_unsupported(model: nn.Module) -> Iterable[tuple[str, str]]:
    """Names and types of modules of no known kind that hold matrices themselves: recurrent cells, fused experts."""
    for name, module in model.named_modules():
        own = [value for value in module._parameters.values() if value is not None]
        if kind_of(module) is None and any(value.dim() > 1 and value.shape[0] > 1 for value in own):
            yield name or "the model", type(module).__name__


def candidate(name: str, module: nn.Module) -> Candidate:
    """A layer that is known to be one that can be quantized."""
    return Candidate((name,), module, known_kind(module))


def is_excluded(layer: Candidate, config: QConfig) -> bool:
    """Whether the user wants a layer to stay float."""
    return any(matches(layer.names, pattern) for pattern in config.exclude)


def excluded_by(layer: Candidate, config: QConfig) -> str:
    """The pattern by which the user excludes a layer, in words."""
    return f"exclude: {next(pattern for pattern in config.exclude if matches(layer.names, pattern))!r}"


def choose_all(layer: Candidate, config: QConfig) -> tuple[QLayerConfig | None, str]:
    """The configuration of a layer and the field that it comes from.

    The keys and values that a layer makes are quantized even where the layer is excluded: they are the cache's. What
    ``kv_cache_quant_config`` says about other tensors goes before what the layer has.
    """
    excluded = is_excluded(layer, config)
    found, source = (None, "exclude") if excluded else choose(layer, config)
    pattern = next((key for key in config.kv_cache_quant_config if matches(layer.names, key)), None)
    if pattern is None:
        return found, source
    cache = config.kv_cache_quant_config[pattern]
    slots = ("output_tensors",) if excluded else SLOTS
    given = {slot: getattr(cache, slot) for slot in slots if getattr(cache, slot) is not None}
    if config.kv_cache_post_rope:
        del given["output_tensors"]
    return (
        (replace(found or QLayerConfig(), **given), f"kv_cache_quant_config[{pattern!r}]") if given else (found, source)
    )


def choose(layer: Candidate, config: QConfig) -> tuple[QLayerConfig | None, str]:
    """The configuration of a layer and the field that it comes from; exact names go before globs."""
    for pattern, found in config.layer_quant_config.items():
        if pattern in layer.names:
            return found, f"layer_quant_config[{pattern!r}]"
    for pattern, found in config.layer_quant_config.items():
        if matches(layer.names, pattern):
            return found, f"layer_quant_config[{pattern!r}]"
    for key, found in config.layer_type_quant_config.items():
        if isinstance(layer.module, type_of_name(key)):
            return found, f"layer_type_quant_config[{type_of_name(key).__name__}]"
    return (config.global_quant_config, "global_quant_config") if layer.kind.by_default else (None, "")


def check_patterns(model: nn.Module, config: QConfig, candidates: list[Candidate]) -> None:
    """Every name, glob and type of the configuration matches something."""
    everything = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    layers = [name for layer in candidates for name in layer.names]
    for field, patterns, known in (
        ("exclude", config.exclude, [*everything, *layers]),
        ("layer_quant_config", config.layer_quant_config, layers),
        ("kv_cache_quant_config", config.kv_cache_quant_config, layers),
        ("kv_cache_group", config.kv_cache_group, layers),
    ):
        for pattern in patterns:
            check_pattern(field, pattern, known, everything, layers)
    for key in config.layer_type_quant_config:
        cls = type_of_name(key)
        if not any(isinstance(layer.module, cls) for layer in candidates):
            present = sorted({type(layer.module).__name__ for layer in candidates})
            raise ConfigError(
                f"layer_type_quant_config: the model has no quantizable layer of the type {cls.__name__}; it has "
                f"{', '.join(present)}"
            )


def bind(layer: Candidate, config: QLayerConfig, source: str, skeleton: bool) -> dict[str, Stages]:
    """``config`` on one layer, checked: what runs on each tensor, as it is stored."""
    stages = {slot: config.stages(slot) for slot in SLOTS}
    if getattr(layer.module, "bias", None) is None:
        stages["bias"] = ()
    if any(stages.values()):
        check_module(layer, skeleton)
    if layer.kind.features is None and stages["input_tensors"]:
        raise ConfigError(f"{source}: {layer.name!r} looks up rows by integers, so input_tensors must be None")
    for slot in SLOTS:
        for stage in stages[slot]:
            check_sign(f"{source}: {WORDS.get(slot, slot)} of {layer.name!r}", stage.spec)
    found = {slot: tuple(on_axis(stage, meaning(layer, slot, stage)) for stage in stages[slot]) for slot in SLOTS}
    for slot in ("weight", "bias"):
        for stage in found[slot]:
            check_fit(f"{source}: {slot} of {layer.name!r}", tuple(getattr(layer.module, slot).shape), stage)
    for slot, attributes in FEATURES.items():
        for stage in stages[slot]:
            check_groups(f"{source}: {WORDS[slot]} of {layer.name!r}", layer, attributes, stage)
    return found


def meaning(layer: Candidate, slot: str, stage: Stage) -> Granularity:
    """What the granularity of a stage means on the tensor in ``slot``."""
    written, kind = stage.spec.granularity, layer.kind
    if slot == "weight":
        return kind.weight_granularity(written)
    per_token = slot in ACTIVATIONS and kind.tokens and stage.spec.dynamic and written == Channel(1)
    return Token() if per_token else written


def check_module(layer: Candidate, skeleton: bool) -> None:
    """The weight is there, real, and read by nobody but the layer."""
    module, name = layer.module, layer.name
    weight = module._parameters.get("weight")
    if weight is None:
        raise ModelError(
            f"the weight of {name!r} is computed (weight norm, parametrization); make it plain, or exclude it"
        )
    if isinstance(weight, UninitializedParameter) or (weight.is_meta and not skeleton):
        raise ModelError(
            f"the weight of {name!r} has no values (meta device, or not initialized); load the weights first"
        )
    if weight.dtype not in FLOATS:
        raise ModelError(
            f"the weight of {name!r} is {weight.dtype}; only float32, float16, bfloat16 and float64 can be quantized"
        )
    if "forward" in module.__dict__:
        raise ModelError(
            f"the forward of {name!r} has been replaced on the object (accelerate does that for device_map); remove "
            f"the hook first, for instance with accelerate.hooks.remove_hook_from_submodules"
        )
    if getattr(module, "max_norm", None) is not None:
        raise ModelError(
            f"{name!r} rewrites its weight at each call (max_norm); set max_norm to None, or leave it float"
        )


def check_groups(what: str, layer: Candidate, attributes: tuple[str, ...], stage: Stage) -> None:
    """Groups along the features of an activation divide them."""
    granularity, module = stage.spec.granularity, layer.module
    if not isinstance(granularity, Group) or granularity.axis != layer.kind.features:
        return
    lengths = [getattr(module, name) for name in attributes if hasattr(module, name)]
    if lengths:
        check_group(what, lengths[0], granularity.size, stage.format)
