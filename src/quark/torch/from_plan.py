"""A plan from a file, carried out: the configuration under which the torch flow decides exactly what the file says.

The configuration beside it says what a plan does not (algorithms, caches, groups of shared scales). Layers about which
both say the same stay as they are; every other one gets an entry of its own, so that the files that are written say
what is in them. What no configuration says, or the model cannot have, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from quark.config.plan import Plan, refuse
from quark.errors import ConfigError, unknown
from quark.numerics.granularity import WHOLE, Block2D, Channel, Group, Tensor, Token
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.schemes import ROWS, scheme
from quark.torch.config.tensor import MODES, ROUNDINGS, SCALE_FORMATS, QTensorConfig
from quark.torch.config.type import Dtype, QSchemeType, ZeroPointType
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.files.decision import decide
from quark.torch.matching import Match, Matches, choose_all, is_excluded, meaning
from quark.torch.observer import SearchObserver
from quark.torch.plan_rows import WORDS, on_axis, tensor_name
from quark.torch.stage import Stage, Stages

RESULTS = ("range", "given", "scale", "zero_point", "fixed_range", "bias_of")


def config_from(plan: Plan, checkpoint: Checkpoint, config: QConfig) -> QConfig:
    """``config``, changed so that ``plan`` is what it decides about a checkpoint.

    Raises:
        ConfigError: the plan does not fit the model, or no configuration says it; tensor and reason are named.
    """
    decided = decide(checkpoint, config).found
    check(plan, decided.plan)
    wanted, given = Matches(plan, decided.layers), config.layer_quant_config
    layers: dict[str, QLayerConfig] = {}
    floats, freed = [], set()
    for layer in decided.layers:
        before, after = Match(layer, decided.plan), Match(layer, plan)
        if before.stages == after.stages:
            continue
        if not any(after.stages.values()):
            floats.append(layer.name)
            continue
        freed |= {layer.name} if is_excluded(layer, config) else set()
        found = choose_all(layer, config)[0] or QLayerConfig()
        slots = {slot: said(after, slot) for slot in WORDS if before.stages[slot] != after.stages[slot]}
        layers[layer.name] = replace(found, **slots)
    excluded = [name for name in decided.excluded if name not in freed] if freed else list(config.exclude)
    changed = replace(config, layer_quant_config={**layers, **given}, exclude=[*excluded, *floats])
    made = Matches(decide(checkpoint, changed).found.plan, decided.layers)
    for layer in wanted.layers:
        for slot, stages in Match(layer, plan).stages.items():
            if stages != Match(layer, made.plan).stages[slot]:
                refuse(tensor_name(layer.name, slot), f"of a {type(layer.module).__name__} it cannot be quantized so")
    return changed


def check(plan: Plan, decided: Plan) -> None:
    """The plan names layers of the model, and nothing that is found later or comes from the configuration."""
    known = {f"{name}.{word}" for name in decided.nodes for word in WORDS.values()}
    for name, row in plan.tensors.items():
        if name not in known:
            raise ConfigError(f"--plan-from: {unknown('tensor of the plan', name, sorted(known))}")
        if given := next((field for field in RESULTS if getattr(row, field) is not None), None):
            refuse(name, f"{given} is found from weights and samples in the torch flow and cannot be given")
        before = decided.tensors.get(name)
        if row.group != (name if before is None else before.group):
            refuse(name, f"group is {row.group!r}: which weights share a scale is said by shared_scale_groups")
    for name, node in plan.nodes.items():
        if name not in decided.nodes:
            raise ConfigError(f"--plan-from: {unknown('layer of the plan', name, decided.nodes)}")
        if node.quantized != decided.nodes[name].quantized:
            refuse(name, "lines of layers only explain, and the configuration says the opposite: change its tensors")


def said(item: Match, slot: str) -> Any:
    """What a ``QLayerConfig`` holds for the stages of a slot: one configuration, a list, or None.

    Raises:
        ConfigError: none says it.
    """
    stages = item.stages[slot]
    if not stages:
        return None
    for candidate in candidates(item, slot, stages):
        try:
            made = QLayerConfig(**{slot: candidate}).stages(slot)
        except (ConfigError, TypeError):
            continue  # a combination of fields that does not exist says nothing
        if tuple(meant(item, slot, stage) for stage in made) == stages:
            return candidate
    name = tensor_name(item.layer.name, slot)
    return refuse(name, f"no configuration of the torch flow means {item.plan.tensors[name].spec.describe()}")


def meant(item: Match, slot: str, stage: Stage) -> Stage:
    """A stage on the stored tensor."""
    return on_axis(stage, meaning(item.layer, slot, stage))


def candidates(item: Match, slot: str, stages: Stages) -> Iterator[Any]:
    """What may mean these stages: the fields spelt out, then whatever a scheme has for this slot."""
    found = product(*(spelt(stage, item, slot) for stage in stages))
    yield from (list(several) if len(several) > 1 else several[0] for several in found)
    for name in ROWS:
        yield getattr(scheme(name), slot if slot in ("weight", "input_tensors") else "input_tensors")


def spelt(stage: Stage, item: Match, slot: str) -> Iterator[QTensorConfig]:
    """Configurations whose fields are those of a spec."""
    spec = stage.spec
    row = spec.row
    own = {"calibration_method": spec.method, "calibration_settings": dict(spec.settings)}
    finds = own if stage.observer is SearchObserver else {"observer_cls": stage.observer}
    fields = {
        **axes(item.written(stage) if slot == "weight" else spec.granularity),
        "is_dynamic": spec.dynamic,
        "round_method": next(kind for kind, name in ROUNDINGS.items() if name == spec.rounding),
    }
    scaled = {
        "symmetric": spec.symmetric,
        "narrow": spec.narrow or None,
        "zero_point_type": ZeroPointType.float32 if spec.real_zero else ZeroPointType.int32,
        "scale_rule": None if stage.observer.rule else spec.scale_rule,
    }
    for dtype in Dtype:
        if dtype.row is None:
            continue
        if dtype.row.name == spec.format:
            yield from tried(
                {"dtype": dtype, **fields, **scaled, **finds}, {"dtype": dtype, **fields}, {"dtype": dtype}
            )
        if getattr(row, "element", None) == dtype.row:
            for kind in SCALE_FORMATS:
                for mode in (None, *MODES):
                    block = {"dtype": dtype, **fields, "scale_format": kind, "scale_calculation_mode": mode}
                    yield from tried(block, {**block, "dtype": Dtype.mx, "mx_element_dtype": dtype})


def tried(*fields: dict[str, Any]) -> Iterator[QTensorConfig]:
    """The configurations of these fields that exist."""
    for values in fields:
        try:
            yield QTensorConfig(**values)
        except ConfigError:
            continue  # fields that do not go together mean nothing


def axes(granularity: Any) -> dict[str, Any]:
    """The fields of a granularity."""
    match granularity:
        case Tensor():
            return {"qscheme": QSchemeType.per_tensor}
        case Token():
            return {"qscheme": QSchemeType.per_channel, "ch_axis": 1}
        case Channel(axis):
            return {"qscheme": QSchemeType.per_channel, "ch_axis": axis}
        case Group(axis, size):
            return {"qscheme": QSchemeType.per_group, "ch_axis": axis, "group_size": -1 if size == WHOLE else size}
        case Block2D(rows, columns):
            return {"qscheme": QSchemeType.per_block, "block_size": (rows, columns)}
    raise TypeError(f"unknown granularity {granularity!r}")
