"""What is known of layers under candidates, as plain values that travel as JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from typing import Any

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError

#: The candidate that leaves a layer as it is.
FLOAT = "float"
#: What may be saved, and what its numbers are.
BUDGETS = {
    "size": "bytes of the layers' weights and biases as stored, scales and zero points included",
    "bits": "bits that the layers read for one inference: weights and inputs",
    "latency": "seconds of one inference",
}


@dataclass(frozen=True)
class Trial:
    """One layer quantized alone.

    Attributes:
        layer: its name.
        kind: its operator or class.
        candidate: how it was quantized.
        loss: what the model's outputs lose, 0 or more; assumed to add up over layers.
        metrics: the measures of the outputs, by name.
        costs: by name of a budget.
    """

    layer: str
    kind: str
    candidate: str
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Every layer under every candidate that fits it.

    Attributes:
        trials: in the order of the layers.
        metric: what ``ranked`` sorts by, for people.
        samples: how many the losses were measured on.
        seconds: what the measuring took.
    """

    trials: tuple[Trial, ...]
    metric: str
    samples: int
    seconds: float = 0.0

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in order."""
        return list(dict.fromkeys(trial.layer for trial in self.trials))

    @property
    def candidates(self) -> list[str]:
        """Names of the candidates, in order."""
        return list(dict.fromkeys(trial.candidate for trial in self.trials))

    def ranked(self, candidate: str | None = None) -> list[Trial]:
        """The trials, of one candidate or of all, the largest loss first."""
        chosen = [trial for trial in self.trials if candidate in (None, trial.candidate)]
        return sorted(chosen, key=lambda trial: -trial.loss)

    def of(self, layer: str, candidate: str) -> Trial | None:
        """One trial; ``None`` where the candidate does not fit the layer."""
        found = (trial for trial in self.trials if (trial.layer, trial.candidate) == (layer, candidate))
        return next(found, None)

    def table(self, name: str) -> np.ndarray:
        """``loss`` or a cost as an array [layers, candidates]; infinite where a candidate does not fit."""
        rows = {layer: row for row, layer in enumerate(self.layers)}
        columns = {candidate: column for column, candidate in enumerate(self.candidates)}
        found = np.full((len(rows), len(columns)), np.inf)
        for trial in self.trials:
            value = trial.loss if name == "loss" else trial.costs[name]
            found[rows[trial.layer], columns[trial.candidate]] = value
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        ranked = [asdict(trial) for trial in self.ranked()]
        return {"metric": self.metric, "samples": self.samples, "seconds": self.seconds, "trials": ranked}


@dataclass(frozen=True)
class Found:
    """A plan that was verified.

    Attributes:
        layers: candidate by layer.
        metric, value: what was measured on the whole plan, on the samples that chose it.
        costs: of the whole plan, by budget.
        measured: how many plans were quantized and measured before it was chosen.
        study: the sensitivities.
        uniform: of candidates for all layers: (metric, costs).
        met: whether the target was.
        reported: the metric on samples that neither fitted ranges nor chose the plan; None: there are none.
        notes: what a reader must know, a sentence each.
        settings: options that measuring the plan decided, in the place of those that it was measured under.
    """

    layers: Mapping[str, str]
    metric: str
    value: float
    costs: Mapping[str, float]
    measured: int
    study: Study
    uniform: Mapping[str, tuple[float, Mapping[str, float]]] = field(default_factory=dict)
    met: bool = True
    reported: float | None = None
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """How many layers got which candidate."""
        chosen = list(self.layers.values())
        return {candidate: chosen.count(candidate) for candidate in self.study.candidates if candidate in chosen}


def total(study: Study, name: str, chosen: Sequence[str]) -> float:
    """A cost, or ``loss``, of one candidate per layer, added up."""
    table, columns = study.table(name), study.candidates
    return float(sum(table[row, columns.index(candidate)] for row, candidate in enumerate(chosen)))


def check_distinct(candidates: Sequence[str]) -> None:
    """Raise ``ConfigError`` for no candidate, or one that is listed twice."""
    if not candidates:
        raise ConfigError("there are no candidates")
    doubled = next((name for name in candidates if list(candidates).count(name) > 1), None)
    if doubled is not None:
        raise ConfigError(f"the candidate {doubled!r} is listed twice")


def plan_key(layers: Sequence[str], plan: Sequence[str], metric: str, data: str) -> str:
    """The entry of a whole plan (a candidate for each layer), measured by ``metric`` on data of this digest."""
    named = "\n".join(f"{layer} as {name}" for layer, name in zip(layers, plan, strict=True))
    return f"plan {hashlib.blake2b(named.encode(), digest_size=8).hexdigest()} {metric} on {data}"
