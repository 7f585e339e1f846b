"""The metric of a model that is quantized by a whole plan: what a search measures, in both flows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from quark.dataclass import dataclass
from quark.files.journal import Journal
from quark.search.energy import is_table, read_table, with_energy
from quark.search.function import load_function, number_of
from quark.search.parts import Split
from quark.search.values import FLOAT, Study, plan_key

#: Of a plan, a candidate by layer.
PlanCosts = Callable[[Mapping[str, str]], Mapping[str, float]]


@dataclass(frozen=True)
class PlanMetric(ABC):
    """Measures plans (candidate by layer), each once.

    Attributes:
        values: of the configuration file, without the plan's layers.
        samples: of the calibration.
        metric: its name.
        function: ``file.py:function`` of a metric of the user's.
        ledger: where finished measurements are kept.
        data: digest of the data that plans are measured on.
    """

    values: Mapping[str, Any]
    samples: Any
    metric: str
    function: str | None
    ledger: Journal
    data: str

    def __call__(self, plan: Mapping[str, str]) -> float:
        """The metric of the model quantized by a plan."""
        return self.ledger.number(self.key(plan, self.metric), lambda: self.measured(plan))

    def key(self, plan: Mapping[str, str], what: str) -> str:
        """What a measurement of a plan is called in the ledger."""
        return plan_key(list(plan), list(plan.values()), what, self.data)

    def measured(self, plan: Mapping[str, str]) -> float:
        """Quantize, and measure."""
        with self.quantized(plan) as model:
            if self.function is not None:
                return number_of(load_function(self.function)(model), self.metric)
            return self.measures(model)[self.metric]

    def settled(self, plan: Mapping[str, str]) -> dict[str, Any] | None:
        """The configuration file of a plan, whose layers give way to those of ``values``; None: nothing changes."""
        pinned = self.values.get("layers") or {}
        if set(plan.values()) == {FLOAT} and not pinned:
            return None
        return {**self.values, "layers": {**plan, **pinned}}

    def priced(self, study: Study, budget: str) -> tuple[Study, str, PlanCosts | None]:
        """The study with the costs of a budget; the name of that cost; the costs of a plan that do not add up.

        Raises:
            ConfigError: a layer whose multiplications cannot be counted, where the budget is a table of energies.
        """
        if not is_table(budget):
            return study, budget, None
        return with_energy(study, self.macs(study.layers), read_table(budget), self.types), "energy", None

    def apart(self, split: Split) -> tuple[Self, Self | None]:
        """The metric on the samples that choose, and on those that decide nothing; None: there are none."""
        choose = self if split.choose is None else self.on(split.choose, "choose")
        return choose, None if split.report is None else self.on(split.report, "report")

    @abstractmethod
    def on(self, samples: Any, name: str) -> Self:
        """The same metric on other data, whose float outputs are kept under ``name``."""

    @abstractmethod
    def quantized(self, plan: Mapping[str, str]) -> AbstractContextManager[Any]:
        """The model of a plan, as a function of the user's is called with it."""

    @abstractmethod
    def measures(self, model: Any) -> Mapping[str, float]:
        """The measures of such a model, the metric among them."""

    @staticmethod
    @abstractmethod
    def types(name: str) -> str:
        """``inputs/weights`` of a candidate, for a table of energies."""

    @abstractmethod
    def macs(self, layers: Sequence[str]) -> Mapping[str, float]:
        """Multiplications of layers for one sample."""
