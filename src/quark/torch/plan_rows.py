"""Decisions about tensors as rows of the ``Plan``, and what runs, read off them.

A row holds the spec as it is on the stored tensor (a transposed weight's axes are its own) and the classes that find
the ranges, which a plan file holds by their names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quark.config.plan import Plan, Role, TensorPlan
from quark.config.tensor import TensorSpec
from quark.numerics.granularity import Granularity
from quark.observers.registry import SEARCHES
from quark.torch.observer import ObserverBase, SearchObserver
from quark.torch.stage import Stage, Stages

WORDS = {"weight": "weight", "bias": "bias", "input_tensors": "input", "output_tensors": "output"}
ROLES: dict[str, Role] = {"weight": "weight", "bias": "bias"}


def tensor_name(layer: str, slot: str) -> str:
    """What a plan calls the tensor in a slot of a layer."""
    return f"{layer}.{WORDS[slot]}"


def on_axis(stage: Stage, granularity: Granularity) -> Stage:
    """A stage with the granularity that it has on the stored tensor."""
    return Stage(replace(stage.spec, granularity=granularity), stage.observer)


def put(plan: Plan, name: str, role: Role, stages: Stages, reason: str) -> None:
    """Write the row of a tensor into the plan; none where no stage quantizes it."""
    if stages:
        first, *later = (stage.spec for stage in stages)
        spec = replace(first, second=later[0]) if later else first
        plan.put(TensorPlan(name, role, spec, reason, name, observer=tuple(stage.observer for stage in stages)))


def stages_in(plan: Plan, name: str) -> Stages:
    """What a plan does to a tensor, first to last; empty: it stays float."""
    row = plan.tensors.get(name)
    if row is None:
        return ()
    specs = [row.spec.first, *([] if row.spec.second is None else [row.spec.second])]
    return tuple(Stage(spec, observer_of(spec, one)) for spec, one in zip(specs, (*row.observer, "", ""), strict=False))


def observer_of(spec: TensorSpec, observer: Any) -> type[ObserverBase]:
    """The class that finds the range: the row's, or that of the method where somebody has changed the spec."""
    found = ObserverBase.registry.get(observer) if isinstance(observer, str) else observer
    if found is not None and found.told(spec) == spec:
        return found
    return SearchObserver if spec.method in SEARCHES else ObserverBase.registry[spec.method]
