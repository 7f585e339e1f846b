"""``auto``: tries on a model what an expert would try, and proves the winner on samples that decided nothing.

    samples → fit (ranges), choose (which trial wins), report (what is said about the winner)
    bases   → the presets of the purpose, one trial each
    recipes → for a base outside the tolerance, ``quark.onnx.recipes``, one after the other, while they help
    winner  → the cheapest trial within the tolerance: in time (cpu), in bits (npu), in bytes (size)

One quantized model is in memory at a time; the files of trials lie in a folder of their own, and those that cannot win
any more are removed. Where nothing is within the tolerance the nearest miss comes back, and ``solved`` is False.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from quark.errors import ConfigError, DataError, QuarkError, unknown
from quark.measure.answers import Answers
from quark.onnx import fingerprint
from quark.onnx.compare import Comparison, compare
from quark.onnx.data import Feed
from quark.onnx.describe import describe, file_bytes
from quark.onnx.graph import model as files
from quark.onnx.graph.libraries import Libraries
from quark.onnx.latency import median_seconds
from quark.onnx.quantization.config.config import Config
from quark.onnx.quantizer import ModelQuantizer
from quark.onnx.recipes import GOOD, Attempt, Choice, Situation, improve, islands, wider
from quark.onnx.sensitivity import sensitivity
from quark.report.verdict import Judged, worst
from quark.search.ledger import Ledger
from quark.search.parts import how_far, parts
from quark.search.values import FLOAT

ISLANDS = 0.4
"""The part of the time of a preset that is kept for islands, the last resort."""
TRIED = 4
"""Samples that single layers are tried on."""
SAME = 0.03
"""A trial that is not faster than the float model by this part wins nothing in time."""


@dataclass(frozen=True)
class Purpose:
    """What a model is made for.

    Attributes:
        bases: presets, the cheapest first.
        cost: what is to be small: "seconds", "bytes", or "rank", the place of the base in ``bases``.
        may_stay_float: the float model is an answer where nothing is won.
    """

    bases: tuple[str, ...]
    cost: str
    may_stay_float: bool = True


PURPOSES: dict[str, Purpose] = {
    "cpu": Purpose(("A8W8_CPU", "UINT8_DYNAMIC_QUANT"), "seconds"),
    "npu": Purpose(("XINT8", "A8W8", "A16W8", "BF16"), "rank", may_stay_float=False),
    "size": Purpose(("A8W8_CPU", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS"), "bytes"),
}


@dataclass(frozen=True)
class Split:
    """Samples, each part iterable any number of times; ``total``: how many there are."""

    fit: Iterable[Feed]
    choose: Iterable[Feed]
    report: Iterable[Feed]
    total: int


def split(samples: Sequence[Feed]) -> Split:
    """The parts of a list of samples."""
    return Split(*parts(samples), len(samples))


@dataclass(frozen=True)
class Goal:
    """What is wanted.

    Attributes:
        purpose: a row of ``PURPOSES``.
        drop: the part of the metric, or of the float model's answers, that may be lost; None: a good verdict.
        metric: path of a model → number, larger is better; None: agreement with the float model.
        reporting: the same on the samples that decide nothing, where the metric knows parts.
        seconds: for all trials; the one that runs is not stopped.
        libraries: files with the model's custom operators.
        ledger: a JSON file that finished trials are kept in; after a kill the same call goes on from there.
        identity: what tells ``metric`` from another function.

    Raises:
        ConfigError: an unknown purpose, or a drop outside 0..1.
    """

    purpose: str = "cpu"
    drop: float | None = None
    metric: Callable[[str], float] | None = None
    seconds: float = 600.0
    libraries: Libraries = None
    ledger: Path | None = None
    identity: str = "none"
    reporting: Callable[[str], float] | None = None

    def __post_init__(self) -> None:
        if self.purpose not in PURPOSES:
            raise ConfigError(unknown("--for", self.purpose, PURPOSES))
        if self.drop is not None and not 0 <= self.drop < 1:
            raise ConfigError(f"--drop is {self.drop:g}: it is the part that may be lost, from 0 to 1, such as 0.01")

    @property
    def row(self) -> Purpose:
        """The row of the purpose."""
        return PURPOSES[self.purpose]


@dataclass(frozen=True)
class Trial:
    """A configuration that was tried; ``path`` is None for one that failed (``error``) or that a ledger remembers."""

    name: str
    choice: Choice | None
    judged: Judged | None = None
    value: float | None = None
    bytes: int = 0
    seconds: float = float("nan")
    causes: tuple[str, ...] = ()
    error: str = ""
    passes: bool = False
    path: Path | None = None


@dataclass
class Outcome:
    """What ``auto`` found.

    Attributes:
        winner: the trial whose model is to be used; its ``choice`` is None for the float model.
        solved: it is within the tolerance, and it is not the float model.
        trials: all, in the order in which they were made.
        reported: the winner on the samples that decided nothing; None for the float model.
        float_value: the metric of the float model.
        float_seconds: an inference of it, where time counts.
        seconds: an inference of the trials that were timed, by name.
        reported_values: (winner, float model) of the metric on the samples that decided nothing.
        notes: what a reader must know, a sentence each.
    """

    winner: Trial
    solved: bool
    trials: list[Trial]
    reported: Judged | None = None
    float_value: float | None = None
    float_seconds: float = float("nan")
    seconds: dict[str, float] = field(default_factory=dict)
    reported_values: tuple[float, float] | None = None
    notes: list[str] = field(default_factory=list)


class Search:
    """The trials of one model."""

    def __init__(self, model: Path, samples: Split, goal: Goal, folder: Path, tell: Callable[[str], None]) -> None:
        self.model, self.samples, self.goal, self.folder, self.tell = model, samples, goal, folder, tell
        self.trials: list[Trial] = []
        self.end = time.perf_counter() + goal.seconds
        self.book, metric = _ledger(model, samples, goal), goal.metric
        self.float_value = None if metric is None else self.book.number("float model", lambda: metric(str(model)))
        self.situation = Situation(frozenset(describe(model).operators), (), goal.purpose == "npu")

    def attempt(self, choice: Choice, causes: tuple[str, ...] = ()) -> Trial:
        """Quantize with the fitting samples and judge on the choosing ones."""
        name = choice.name
        path, known = self.folder / f"{len(self.trials)}.onnx", self.book.done(f"trial {name}")
        if known is not None:
            self.propose(known["proposals"])
            return self.finished(_remembered(name, choice, causes, known))
        try:
            found = self._quantized(choice, path)
        except QuarkError as error:
            trial = Trial(name, choice, causes=causes, error=str(error))
        else:
            judged = worst(found.outputs, found.answers)
            value = None if self.goal.metric is None else float(self.goal.metric(str(path)))
            trial = Trial(name, choice, judged, value, file_bytes(path), causes=causes, path=path)
            trial = replace(trial, passes=self.within(trial, found.answers))
        self.book.finish(f"trial {name}", _entry(trial, self.situation.proposals))
        return self.finished(trial)

    def finished(self, trial: Trial) -> Trial:
        """Take a trial down, and tell it."""
        self.trials.append(trial)
        said = trial.error or (trial.judged.reason if trial.judged else "nothing to compare")
        self.tell(f"{trial.name}: {said}")
        return trial

    def propose(self, sentences: Iterable[str]) -> None:
        """Remember what the engine proposed."""
        found = dict.fromkeys((*self.situation.proposals, *sentences))
        self.situation = replace(self.situation, proposals=tuple(found))

    def with_file(self, trial: Trial) -> Trial:
        """The trial with its model; one that only the ledger remembers is quantized again, to the same bytes."""
        if trial.path is not None or trial.choice is None:
            return trial
        path = self.folder / f"again{self.trials.index(trial)}.onnx"
        self._quantized(trial.choice, path)
        return replace(trial, path=path)

    def _quantized(self, choice: Choice, path: Path) -> Comparison:
        config = choice.config()
        config.extra_options["PrintSummary"] = False
        result = ModelQuantizer(Config(global_quant_config=config)).run(self.model, path, self.samples.fit)
        self.propose(result.plan.proposals)
        return compare(self.model, path, self.samples.choose, layers=False, libraries=self.goal.libraries)

    def within(self, trial: Trial, answers: Mapping[str, Answers]) -> bool:
        """Whether a trial keeps what it has to keep."""
        drop = self.goal.drop
        if self.float_value is not None and trial.value is not None:
            least = self.float_value - abs(self.float_value) * (0.01 if drop is None else drop)
            return trial.value >= least
        if trial.judged is None:
            return False
        share = answers[trial.judged.name].share if trial.judged.name in answers else None
        return trial.judged.level >= GOOD if drop is None or share is None else share >= 1 - drop

    def improved(self, base: Trial, seconds: float) -> None:
        """Recipes on a base that is outside the tolerance."""

        def measure(choice: Choice) -> Judged | None:
            return _as_wanted(self.attempt(choice))

        if base.choice is None:
            return
        end = time.perf_counter() + seconds
        best, _ = improve(Attempt(base.choice, _as_wanted(base)), self.situation, measure, seconds * (1 - ISLANDS))
        good = best.judged is not None and best.judged.level >= GOOD
        if not good and time.perf_counter() < end and Config(best.choice.config()).compile().mode == "static":
            self.islands(best, end)

    def islands(self, best: Attempt, end: float) -> None:
        """The layers that lose most, in float or in the wider preset of an NPU, until the rest is good enough."""
        wide = wider(best.choice.preset) if self.situation.npu else FLOAT
        if wide is None:
            return
        few = list(islice(self.samples.fit, TRIED))
        values = {"preset": best.choice.preset, "options": dict(best.choice.options)}
        try:
            study = sensitivity(self.model, values, few, [best.choice.preset])
        except QuarkError as error:
            self.tell(f"islands: {error}")
            return
        cause = f"a few layers lose most; they are {wide}"
        for choice in islands(best, [one.layer for one in study.ranked()], wide):
            if time.perf_counter() > end or self.attempt(choice, (*best.causes, cause)).passes:
                break

    def timed(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials with their seconds an inference, and those of the float model, side by side."""
        feed = next(iter(self.samples.choose))
        models: dict[str, Any] = {"float": self.model} | {str(k): one.path for k, one in enumerate(trials)}
        found = median_seconds(models, feed, libraries=self.goal.libraries)
        stays = Trial("float", None, bytes=file_bytes(self.model), seconds=found["float"], path=self.model)
        return [stays, *(replace(one, seconds=found[str(k)]) for k, one in enumerate(trials))]


def _ledger(model: Path, samples: Split, goal: Goal) -> Ledger:
    """The ledger of a run; refused where it belongs to another one."""
    if goal.ledger is None:
        return Ledger(None, {})
    digest = b""
    for part in (samples.fit, samples.choose, samples.report):
        for feed in part:
            digest = fingerprint.of_arrays(feed, digest)
    wanted = {"purpose": goal.purpose, "metric": goal.identity, "tolerance": str(goal.drop)}
    return Ledger(goal.ledger, {"model": fingerprint.of_model(files.load(model)), "data": digest.hex(), **wanted})


def _entry(trial: Trial, proposals: Sequence[str]) -> dict[str, Any]:
    """A trial as a ledger keeps it."""
    kept: dict[str, Any] = {"error": trial.error, "bytes": trial.bytes, "passes": int(trial.passes)}
    kept |= {"proposals": list(proposals)} | ({} if trial.value is None else {"metric": trial.value})
    return kept | ({} if trial.judged is None else asdict(trial.judged))


def _remembered(name: str, choice: Choice, causes: tuple[str, ...], kept: Mapping[str, Any]) -> Trial:
    """The same, read."""
    judged = Judged(**{one.name: kept[one.name] for one in fields(Judged)}) if "level" in kept else None
    told = {"error": kept["error"], "passes": bool(kept["passes"])}
    return Trial(name, choice, judged, kept.get("metric"), kept["bytes"], causes=causes, **told)


def _as_wanted(trial: Trial) -> Judged | None:
    """How a trial was judged: good exactly where it is within the tolerance, by the user's metric if there is one."""
    judged = trial.judged
    if judged is None:
        return None
    level = GOOD if trial.passes else min(judged.level, GOOD - 1)
    return replace(judged, level=level, value=judged.value if trial.value is None else trial.value)


def auto(
    model: Path, samples: Split, goal: Goal, folder: Path, tell: Callable[[str], None] = lambda words: None
) -> Outcome:
    """Try, choose, and judge the winner on samples that decided nothing.

    Args:
        model: the float model.
        samples: the parts that fit, choose and report.
        goal: what is wanted.
        folder: where the files of trials lie while it runs; the winner's ``path`` is in it.
        tell: is told each trial in a line.

    Raises:
        ConfigError, DataError, ModelError: nothing can be tried at all.
    """
    with Ledger.held(goal.ledger):
        search = Search(model, samples, goal, folder, tell)
        _try(search)
        outcome = _concluded(search)
        search.book.settle()
    return outcome


def _try(search: Search) -> None:
    """The bases, the cheapest first, and recipes on those that are outside the tolerance."""
    goal = search.goal
    for place, preset in enumerate(goal.row.bases):
        if place and time.perf_counter() > search.end:
            break
        base = search.attempt(Choice(preset))
        if not base.passes and not base.error:
            left = (search.end - time.perf_counter()) / (len(goal.row.bases) - place)
            search.improved(base, left)
        if goal.row.cost == "rank" and any(trial.passes for trial in search.trials):
            break


def _concluded(search: Search) -> Outcome:
    """The winner, judged on the reporting samples."""
    goal, tried = search.goal, [trial for trial in search.trials if not trial.error]
    if not tried:
        raise DataError(f"nothing could be tried; the first: {search.trials[0].name}: {search.trials[0].error}")
    good = [trial for trial in tried if trial.passes]
    winner = _nearest(good or tried)
    outcome = Outcome(
        winner,
        bool(good),
        search.trials,
        None,
        search.float_value,
        notes=list(how_far(search.samples.total, len(list(search.samples.report)))),
    )
    if good and goal.row.cost != "rank":
        stays, *timed = search.timed([search.with_file(one) for one in good])
        outcome.seconds = {one.name: one.seconds for one in timed}
        outcome.float_seconds, by_time = stays.seconds, goal.row.cost == "seconds"
        outcome.winner = min(timed, key=lambda one: one.seconds if by_time else one.bytes)
        slow = by_time and outcome.winner.seconds > stays.seconds * (1 - SAME)
        if slow or (not by_time and outcome.winner.bytes >= stays.bytes):
            outcome.notes.append(f"no trial is {'faster' if by_time else 'smaller'} than the float model")
            outcome.winner, outcome.solved = stays, False
            return outcome
    return _reported(search, outcome)


def _nearest(trials: Sequence[Trial]) -> Trial:
    """The most accurate of the trials."""
    return max(trials, key=lambda one: Attempt(one.choice or Choice(""), _as_wanted(one)).rank)


def _reported(search: Search, outcome: Outcome) -> Outcome:
    outcome.winner = search.with_file(outcome.winner)
    found = compare(
        search.model, outcome.winner.path or search.model, search.samples.report, False, None, search.goal.libraries
    )
    outcome.reported = worst(found.outputs, found.answers)
    if search.goal.reporting is not None:
        paths = outcome.winner.path or search.model, search.model
        outcome.reported_values = search.goal.reporting(str(paths[0])), search.goal.reporting(str(paths[1]))
    return outcome


def write_model(source: Path, target: Path) -> None:
    """Write the model of a trial, its external data under the name that is wanted.

    Raises:
        OutputError: it cannot be written.
    """
    if source.with_name(f"{source.name}.data").exists():
        files.save(files.load(source), target, True)
    else:
        files.save(files.load(source), target)
