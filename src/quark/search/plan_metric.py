"""The metric of a model that is quantized by a whole plan: what a search measures, in both flows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from quark.dataclass import dataclass
from quark.files.journal import Journal
from quark.search.function import load_function, number_of
from quark.search.parts import Split
from quark.search.values import plan_key


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

    def by_function(self, model: Any) -> float | None:
        """What the user's function says of a model; None: there is no such function."""
        return None if self.function is None else number_of(load_function(self.function)(model), self.metric)

    def apart(self, split: Split) -> tuple[Self, Self | None]:
        """The metric on the samples that choose, and on those that decide nothing; None: there are none."""
        choose = self if split.choose is None else self.on(split.choose, "choose")
        return choose, None if split.report is None else self.on(split.report, "report")

    @abstractmethod
    def on(self, samples: Any, name: str) -> Self:
        """The same metric on other data, whose float outputs are kept under ``name``."""

    @abstractmethod
    def measured(self, plan: Mapping[str, str]) -> float:
        """Quantize, and measure."""
