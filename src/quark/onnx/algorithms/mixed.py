"""What automatic mixed precision decided, as values: for the flow, which mostly has nothing to decide."""

from __future__ import annotations

from quark.config.job import Job
from quark.dataclass import dataclass
from quark.report.values import Table


@dataclass(frozen=True)
class LayerTargets:
    """Layers that are chosen together, and the targets that they may get."""

    name: str
    nodes: tuple[str, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True)
class TargetScore:
    """The metric with one candidate alone in a target's precision; ``None`` where nothing had to be measured."""

    candidate: LayerTargets
    target: int
    value: float | None


@dataclass(frozen=True)
class Mixed:
    """What was decided.

    Attributes:
        job: with the rules that give the chosen layers their precision.
        scores: the ranking, the layer that bears its target best first.
        chosen: names of the candidates that were chosen.
        metric: value for the chosen layers together; ``None`` where nothing was measured.
        name: of the metric.
    """

    job: Job
    scores: tuple[TargetScore, ...] = ()
    chosen: tuple[str, ...] = ()
    metric: float | None = None
    name: str = ""

    def tables(self) -> tuple[Table, ...]:
        """The ranking for people; nothing where there was nothing to decide."""
        rows = [
            (one.candidate.name, "" if one.value is None else f"{one.value:.6g}", one.candidate.name in self.chosen)
            for one in self.scores
        ]
        shown = tuple((name, value, "yes" if taken else "no") for name, value, taken in rows)
        title = "Automatic mixed precision" + ("" if self.metric is None else f": {self.name} {self.metric:.6g}")
        return (Table(title, ("layer", f"{self.name} alone", "chosen"), shown),) if shown else ()
