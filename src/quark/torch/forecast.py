"""``quark torch plan``: every decision about a checkpoint, from the names and shapes in its files; no value is read.

What is decided here is what ``quantize_checkpoint`` carries out: both call ``decide``. The plan is the value that the
ONNX flow has, so tables, JSON, ``explain`` and ``quark plan diff`` are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

from quark.config.plan import NodePlan, Plan, TensorPlan
from quark.torch.config.model import QConfig, check_available
from quark.torch.export.checkpoint import Checkpoint
from quark.torch.files.quantize import Decision, decide, jobs_of
from quark.torch.matching import Match
from quark.torch.stage import Stage

SLOTS = {"weight": "weight", "bias": "bias", "input_tensors": "input", "output_tensors": "output"}
ROLES = {"weight": "weight", "bias": "bias"}


@dataclass(frozen=True)
class Forecast:
    """What a quantization would make of a checkpoint.

    Attributes:
        plan: the decisions; nodes are layers.
        float_bytes, bytes: of all tensors now and then, in the layout of format quark.
        largest: bytes of the largest tensor in float32, of which file to file has a few in memory.
        samples: whether static activations need data.
    """

    plan: Plan
    float_bytes: int
    bytes: int
    largest: int
    samples: bool


def forecast(checkpoint: Checkpoint, config: QConfig, pack_method: str = "reorder") -> Forecast:
    """Decide about every tensor.

    Raises:
        ConfigError: a pattern that matches nothing, or a configuration that a tensor does not fit.
        ModelError: files that are missing or broken, or nothing to quantize.
    """
    check_available(config)
    decision = decide(checkpoint, config)
    stored = decision.tensors
    jobs = jobs_of(checkpoint, checkpoint.folder, stored, decision.quantized, pack_method, "cpu")
    sizes = [stored[name].dtype.itemsize * prod(stored[name].shape) for name in stored]
    return Forecast(
        plan_of(decision, config),
        sum(sizes),
        sum(item.size for job in jobs for item in job.items()),
        max((4 * prod(one.shape) for one in stored.values()), default=0),
        any(stage.calibrated for item in decision.found.quantized for stage in _activations(item)),
    )


def plan_of(decision: Decision, config: QConfig) -> Plan:
    """The decisions as a plan: a node per layer, a tensor per quantized weight, bias, input and output."""
    plan = Plan()
    for item in decision.found.quantized:
        plan.nodes[item.layer.name] = NodePlan(item.layer.name, type(item.layer.module).__name__, True, item.source)
        for tensor in tensors_of(item):
            plan.put(tensor)
    for name in decision.found.excluded:
        kind = type(decision.skeleton.model.get_submodule(name)).__name__
        plan.nodes[name] = NodePlan(name, kind, False, excluded_by(name, config.exclude))
        plan.floats[f"{name}.weight"] = excluded_by(name, config.exclude)
    for said in decision.found.unsupported:
        name, _, kind = said.partition(" ")
        plan.nodes[name] = NodePlan(name, kind.strip("()"), False, "layers of this type are not quantized")
    return plan


def tensors_of(item: Match) -> Iterable[TensorPlan]:
    """The tensors of a layer that are quantized; the second of two stages has a line of its own."""
    for slot, word in SLOTS.items():
        for number, stage in enumerate(item.stages[slot]):
            name = f"{item.layer.name}.{word}" + (" (second stage)" if number else "")
            spec = replace(stage.spec, granularity=item.granularity(slot, stage))
            yield TensorPlan(name, ROLES.get(slot, "activation"), spec, item.source, group=name)  # type: ignore[arg-type]


def excluded_by(name: str, patterns: Iterable[str]) -> str:
    """Why a layer stays float."""
    found = next((pattern for pattern in patterns if name == pattern or fnmatchcase(name, pattern)), None)
    return "other code of the model reads its weight" if found is None else f"exclude: {found!r}"


def _activations(item: Match) -> Iterable[Stage]:
    return (stage for slot in ("input_tensors", "output_tensors") for stage in item.stages[slot])
