"""What ``quark auto`` is asked and what it finds, as values; how a ledger keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from quark.dataclass import dataclass
from quark.files.journal import Journal
from quark.files.schema import Schema
from quark.measure.score import Score
from quark.onnx import fingerprint
from quark.onnx.graph import model as files
from quark.onnx.graph.libraries import Libraries
from quark.onnx.recipes import LIBRARIES, Choice
from quark.report.verdict import LEVELS, Judged
from quark.search.auto import AutoTrial, Goal, Outcome
from quark.search.parts import Split


@dataclass(frozen=True)
class Purpose:
    """What a model is made for.

    Attributes:
        bases: presets, the cheapest first.
        cost: what is to be small: "seconds", "bytes", or "rank", the place of the base in ``bases``.
    """

    bases: tuple[str, ...]
    cost: str

    def place(self, preset: str) -> int:
        """Where the types of a preset stand among those of ``bases``, the cheapest first."""
        types = preset.removesuffix("_PER_CHANNEL")
        return self.bases.index(types) if types in self.bases else len(self.bases)


PURPOSES: dict[str, Purpose] = {
    "cpu": Purpose(("A8W8_CPU", "UINT8_DYNAMIC_QUANT"), "seconds"),
    "npu": Purpose(("XINT8", "A8W8", "A16W8", "BF16"), "rank"),
    "size": Purpose(("A8W8_CPU", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS", "A16W8"), "bytes"),
}


@dataclass(frozen=True)
class OnnxGoal(Goal):
    """What is wanted: as ``quark.search.auto.Goal``; ``metric`` gets the path of a model.

    Attributes:
        reporting: the metric on the samples that decide nothing, where it knows parts.
        libraries: files with the model's custom operators.
        workers: recipes that are compared at once; processes, or what joblib is set to.
        exclude: nodes that stay in float whatever is tried.
    """

    PURPOSES = PURPOSES
    ELSEWHERE = "for an ONNX model; programs such as vllm read folders of torch models"
    purpose: str = "cpu"
    reporting: Callable[[str], Any] | None = None
    libraries: Libraries = None
    workers: int = 1
    exclude: tuple[str, ...] = ()

    @property
    def row(self) -> Purpose:
        """The row of the purpose."""
        return PURPOSES[self.purpose]

    def base(self, preset: str) -> Choice:
        """A preset, as this model is quantized with it."""
        own = {} if self.libraries is None else {LIBRARIES: self.libraries}
        return Choice(preset, own, exclude=self.exclude)


@dataclass(frozen=True)
class OnnxTrial(AutoTrial):
    """A configuration that was tried: as ``quark.search.auto.AutoTrial``.

    Attributes:
        choice: the configuration; None: the float model.
        judged: its agreement with the float model on the choosing samples.
        value: of the metric there.
        seconds: of an inference where that was timed.
        path: its file; None for one that failed or that a ledger remembers.
        digest, same: of its model; the name of the trial before it that made the same one.
    """

    choice: Choice | None
    judged: Judged | None = None
    value: float | None = None
    seconds: float = math.nan
    path: Path | None = None
    digest: str = ""
    same: str = ""

    @staticmethod
    def of(choice: Choice, causes: tuple[str, ...] = ()) -> OnnxTrial:
        """A trial that is still to be made."""
        return OnnxTrial(choice.name, choice, causes=causes)

    @property
    def pace(self) -> str:
        """The same for trials that take about as long."""
        return super().pace if self.choice is None else self.choice.pace


@dataclass
class OnnxOutcome(Outcome[OnnxTrial]):
    """What ``auto`` found: as ``quark.search.auto.Outcome``; a winner without ``choice`` is the float model.

    Attributes:
        reported: the winner on the samples that decided nothing; None for the float model, and where there are none.
        float_value: the metric of the float model.
        float_seconds: an inference of it, where time counts.
        seconds: an inference of the trials that were timed, by name.
        reported_values: (winner, float model) of the metric on the samples that decided nothing.
    """

    reported: Judged | None = None
    float_value: float | None = None
    float_seconds: float = math.nan
    seconds: dict[str, float] = field(default_factory=dict)
    reported_values: tuple[Score, Score] | None = None


def identity_of(model: Path, samples: Split, exclude: Sequence[str]) -> dict[str, str]:
    """What a ledger belongs to: the model and what of it stays in float, the samples, what computes."""
    digest = b""
    for part in (samples.fit, samples.choose, samples.report or ()):
        for feed in part:
            digest = fingerprint.of_arrays(feed, digest)
    kept = {"exclude": " ".join(exclude)} if exclude else {}
    return {"model": fingerprint.of_model(files.load(model)), "data": digest.hex(), **kept, **fingerprint.releases()}


def entry_of(trial: OnnxTrial, proposals: Sequence[str]) -> dict[str, Any]:
    """A trial as a ledger keeps it."""
    kept: dict[str, Any] = {"error": trial.error, "bytes": trial.bytes, "passes": int(trial.passes)}
    measured = {} if trial.value is None else {"metric": trial.value, "chance": trial.chance}
    kept |= {"proposals": list(proposals), "digest": trial.digest, "same": trial.same} | measured
    options = {} if trial.choice is None else trial.choice.options
    kept |= {"tuned": options["TunedFloat"]} if "TunedFloat" in options else {}
    return kept | ({} if trial.judged is None else asdict(trial.judged))


class _Failed(Schema):
    """A trial without a verdict in a ledger, as ``entry_of`` makes it."""

    error: str
    bytes: int = Field(ge=0)
    passes: Literal[0, 1]
    proposals: list[str]
    metric: float | None = None
    chance: float = math.nan
    digest: str = ""
    same: str = ""
    tuned: list[str] | None = None


class _Tried(_Failed):
    """One with a verdict."""

    name: str
    level: int = Field(ge=0, lt=len(LEVELS))
    reason: str
    value: float
    sqnr: float
    without: list[float] = Field(default_factory=list)


class Probed(Schema):
    """How a choice does on few samples: the rank of its agreement, empty where it fails; the digest of its model."""

    rank: list[float]
    digest: str


def remembered(book: Journal, trial: OnnxTrial) -> tuple[OnnxTrial, list[str]] | None:
    """What a ledger has of a trial, and what the engine proposed then; ``None`` where it is still to be made.

    Raises:
        ConfigError: the ledger has something else under its name.
    """
    kept = book.done(f"trial {trial.name}", _Tried | _Failed)
    if kept is None:
        return None
    own = {one.name: getattr(kept, one.name) for one in fields(Judged)} if isinstance(kept, _Tried) else None
    judged = None if own is None else Judged(**{**own, "without": tuple(own["without"])})
    told: dict[str, Any] = {name: getattr(kept, name) for name in ("error", "chance", "digest", "same", "bytes")}
    if kept.tuned is not None and trial.choice is not None:
        options = {**trial.choice.options, "TuneSpeed": False, "TunedFloat": kept.tuned}
        told["choice"] = replace(trial.choice, options=options)
    return replace(trial, judged=judged, value=kept.metric, passes=bool(kept.passes), **told), kept.proposals
