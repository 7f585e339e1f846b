"""Decisions about tensors as rows of the ``Plan``, and what runs, read off them.

A row holds the spec as it is on the stored tensor (a transposed weight's axes are its own) and the class that finds the
range, which a plan file holds by its name. The second of two stages has a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quark.config.plan import Plan, Role, TensorPlan
from quark.numerics.granularity import Granularity
from quark.observers.registry import SEARCHES
from quark.torch.observer import ObserverBase, SearchObserver
from quark.torch.stage import Stage, Stages

WORDS = {"weight": "weight", "bias": "bias", "input_tensors": "input", "output_tensors": "output"}
ROLES: dict[str, Role] = {"weight": "weight", "bias": "bias"}
SECOND = " (second stage)"


def tensor_name(layer: str, slot: str) -> str:
    """What a plan calls the tensor in a slot of a layer."""
    return f"{layer}.{WORDS[slot]}"


def on_axis(stage: Stage, granularity: Granularity) -> Stage:
    """A stage with the granularity that it has on the stored tensor."""
    return Stage(replace(stage.spec, granularity=granularity), stage.observer)


def rows_of(
    name: str, role: Role, stages: Stages, reason: str, group: str = "", readers: frozenset[str] | None = None
) -> Iterable[TensorPlan]:
    """The rows of a tensor, one per stage."""
    for number, stage in enumerate(stages):
        key = name + SECOND * number
        yield TensorPlan(key, role, stage.spec, reason, group or key, readers=readers, observer=stage.observer)


def stages_in(plan: Plan, name: str) -> Stages:
    """What a plan does to a tensor, first to last; empty: it stays float."""
    rows = (plan.tensors.get(name + SECOND * number) for number in range(2))
    return tuple(Stage(row.spec, observer_of(row)) for row in rows if row is not None)


def observer_of(row: TensorPlan) -> type[ObserverBase]:
    """The class that finds the range: the row's, or that of the method where somebody has changed the spec."""
    found = ObserverBase.registry.get(row.observer) if isinstance(row.observer, str) else row.observer
    if found is not None and found.told(row.spec) == row.spec:
        return found
    return SearchObserver if row.spec.method in SEARCHES else ObserverBase.registry[row.spec.method]
