"""What automatic mixed precision decided, as values: for the flow, which mostly has nothing to decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from quark.config.job import Job
from quark.dataclass import dataclass
from quark.report.values import Table
from quark.search.values import Trial


@dataclass(frozen=True)
class Mixed:
    """What was decided.

    Attributes:
        job: with the rules that give the chosen layers their precision.
        scores: the layers and their targets, each alone; the layer that bears its target best first. Its loss is 0
            where nothing had to be measured.
        chosen: names of the candidates that were chosen.
        metric: value for the chosen layers together; ``None`` where nothing was measured.
        name: of the metric.
        groups: the nodes of every layer of ``scores``.
    """

    job: Job
    scores: tuple[Trial, ...] = ()
    chosen: tuple[str, ...] = ()
    metric: float | None = None
    name: str = ""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def tables(self) -> tuple[Table, ...]:
        """The ranking for people; nothing where there was nothing to decide."""
        shown = tuple(
            (
                one.layer,
                f"{one.metrics['value']:.6g}" if one.metrics else "",
                "yes" if one.layer in self.chosen else "no",
            )
            for one in self.scores
        )
        title = "Automatic mixed precision" + ("" if self.metric is None else f": {self.name} {self.metric:.6g}")
        return (Table(title, ("layer", f"{self.name} alone", "chosen"), shown),) if shown else ()
