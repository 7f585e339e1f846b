"""``auto``: tries on a model what an expert would try, and proves the winner on samples that decided nothing.

    samples → fit (ranges), choose (which trial wins), report (what is said about the winner)
    bases   → the presets of the purpose, one trial each
    recipes → for bases outside the tolerance, ``quark.onnx.recipes``: on each of them what the engine proposes, then
              the others one after the other, while they help
    winner  → the cheapest trial within the tolerance: in time (cpu), in bits (npu), in bytes (size)

One quantized model is in memory at a time; the files of trials lie in a folder of their own, and those that cannot win
any more are removed. Where nothing is within the tolerance the nearest miss comes back, and ``solved`` is False.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from quark import parallel
from quark.errors import DataError, QuarkError
from quark.files.journal import Journal
from quark.measure.answers import Answers
from quark.measure.score import Score, by_chance
from quark.onnx import fingerprint
from quark.onnx.compare import compare
from quark.onnx.describe import describe, file_bytes
from quark.onnx.graph import model as files
from quark.onnx.latency import median_seconds
from quark.onnx.one_pass import estimate
from quark.onnx.quantization.config.config import Config
from quark.onnx.recipes import GOOD, QUICKER, RECIPES, SLOW, Attempt, Choice, Climb, Situation, layers_apart, wider
from quark.onnx.trial_files import probed, quantized, write_model
from quark.onnx.trials import (
    PURPOSES,
    Goal,
    Outcome,
    Probed,
    Purpose,
    Trial,
    entry_of,
    ledger_of,
    remembered,
)
from quark.onnx.tuned_speed import repeating
from quark.report.verdict import Judged, worst
from quark.search.clock import Clock
from quark.search.function import checked_reference, kept_score, score_of
from quark.search.parts import Split
from quark.search.trials import DROP, LATE
from quark.search.values import FLOAT

APART = 0.4
"""The part of the time of a preset that is kept for layers apart, the last resort."""
ALL, HALF, BESIDE = 1.0, 0.5, 0.125
"""The part of the layers that may stand apart: in float, of wider types on an NPU, and beside an NPU on the CPU."""
TRIED = 8
"""Samples that single layers are tried on."""
PROBED = 8
"""Samples, of each part, that recipes are compared on before the better ones get all."""
__all__ = [
    "PURPOSES",
    "Goal",
    "Outcome",
    "Purpose",
    "Search",
    "Trial",
    "auto",
    "write_model",
]
BRIEFLY = 0.5
"""Seconds for a first look at how fast a trial is."""
TIMED, TIMING = 2.0, 0.05
"""Seconds in which the good trials are timed side by side; not more than this part of all the time."""
LOOKS, STEPS = 2.0, 6
"""How many plain trials finding the layers that lose most takes, about; and trials of one of them, of two, four, …"""
NEAREST = 0.5
"""The part of the time that the nearest preset gets first, where nothing is within the tolerance."""
PROBES = 0.25
"""The part of the time of a preset that comparing recipes on few samples may take."""
SAME = 0.03
"""A trial that is not faster than the float model by this part wins nothing in time."""


class Search:
    """The trials of one model."""

    def __init__(self, model: Path, samples: Split, goal: Goal, folder: Path, tell: Callable[[str], None]) -> None:
        self.model, self.samples, self.goal, self.folder, self.tell = model, samples, goal, folder, tell
        self.trials: list[Trial] = []
        self.notes: list[str] = []
        self.pace: dict[str, float] = {}
        self.same: dict[str, str] = {}
        self.clock = Clock(goal.seconds)
        self.probes = 0.0
        self.book = ledger_of(model, samples, goal)
        self.float_score = None if goal.metric is None else self._of_float(goal.metric)
        self.situation = Situation(frozenset(describe(model).operators), (), goal.purpose == "npu")

    def attempt(self, choice: Choice, causes: tuple[str, ...] = ()) -> Trial:
        """Quantize with the fitting samples and judge on the choosing ones."""
        name = choice.name
        before = next((one for one in self.trials if one.name == name), None)
        if before is not None:  # recipes on a cheaper base may end at a dearer one
            return before
        path, known = self.folder / f"{len(self.trials)}.onnx", remembered(self.book, name, choice, causes)
        if known is not None:
            self.propose(known[1])
            return self.finished(known[0])
        with self.clock.during(choice.pace):
            try:
                trial = self._made(Trial(name, choice, causes=causes, path=path), path)
            except QuarkError as error:
                trial = Trial(name, choice, causes=causes, error=str(error))
        self.clock.reserved = self.clock.usual("judging") * (1 if self.goal.reporting is None else 2) + self.timing
        self.book.finish(f"trial {name}", entry_of(trial, self.situation.proposals))
        return self.finished(trial)

    def _made(self, trial: Trial, path: Path) -> Trial:
        """The trial, quantized and judged; what was judged under another name is not judged again."""
        trial = replace(trial, choice=self._quantized(trial.choice or Choice(""), path))
        digest = fingerprint.of_model(files.load(path))
        before = next((one for one in self.trials if one.digest == digest), None)
        if before is not None:
            own: dict[str, Any] = {"name": trial.name, "choice": trial.choice, "causes": trial.causes, "path": path}
            return replace(before, same=before.name, **own)
        with self.clock.during("judging"):
            found = compare(self.model, path, self.samples.choose, layers=False, libraries=self.goal.libraries)
            judged = worst(found.outputs, found.answers)
            value, chance = self.measured(path)
        trial = replace(trial, judged=judged, value=value, bytes=file_bytes(path), chance=chance, digest=digest)
        return replace(trial, passes=self.within(trial, found.answers))

    def usual(self, choice: Choice) -> float:
        """Seconds that a trial of such a choice takes; until there was one, those of a plain one."""
        return self.clock.usual(choice.pace) or self.clock.usual(Choice("").pace)

    @property
    def timing(self) -> float:
        """Seconds for timing the good trials, where that decides."""
        return 0.0 if self.goal.row.cost == "rank" else min(TIMED, TIMING * self.goal.seconds)

    def _of_float(self, metric: Callable[[str], Any]) -> Score:
        def made() -> Score:
            found = score_of(metric(str(self.model)), "the metric")
            checked_reference(found.value)
            return found

        return kept_score(self.book, "float model", made)

    def measured(self, path: Path) -> tuple[float | None, float]:
        """The metric of a model's file, and how much of its loss is chance."""
        if self.goal.metric is None or self.float_score is None:
            return None, math.nan
        found = score_of(self.goal.metric(str(path)), "the metric")
        return found.value, by_chance(self.float_score, found, self.limit)

    def finished(self, trial: Trial) -> Trial:
        """Take a trial down, and tell it."""
        self.trials.append(trial)
        said = trial.error or (trial.judged.reason if trial.judged else "nothing to compare")
        said = f"the same model as {trial.same}" if trial.same else said
        score = "" if trial.value is None else f"metric {trial.value:.6g}, "
        self.tell(f"{trial.name}: {score}{said}")
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

    def _quantized(self, choice: Choice, path: Path) -> Choice:
        """Write the model of a choice; the choice, with what timing decided in the place of timing it again."""
        plan = quantized(self.model, choice, path, self.samples.fit).plan
        self.propose(plan.proposals)
        return replace(choice, options={**choice.options, **repeating(plan)})

    def within(self, trial: Trial, answers: Mapping[str, Answers]) -> bool:
        """Whether a trial keeps what it has to keep."""
        drop = self.goal.drop
        if self.float_score is not None and trial.value is not None:
            close = self.float_score.value - trial.value <= _larger(self.limit, trial.chance)
            return close and (self.told(trial) or (trial.judged is not None and trial.judged.level >= GOOD))
        if trial.judged is None:
            return False
        read = answers.get(trial.judged.name)
        if drop is None or read is None or read.share is None:
            return trial.judged.level >= GOOD
        return read.share >= 1 - _larger(drop, read.error)

    def confirmed(self, outcome: Outcome, answers: Mapping[str, Answers]) -> bool:
        """Whether the winner also keeps what it has to keep on the reporting samples; a function has its own data."""
        if outcome.reported_values is not None:
            after, before = outcome.reported_values
            allowed = abs(before.value) * (DROP if self.goal.drop is None else self.goal.drop)
            return before.value - after.value <= _larger(allowed, by_chance(before, after, allowed))
        return self.goal.metric is not None or self.within(replace(outcome.winner, judged=outcome.reported), answers)

    @property
    def limit(self) -> float:
        """How much of the metric may be lost."""
        value = math.nan if self.float_score is None else self.float_score.value
        return abs(value) * (DROP if self.goal.drop is None else self.goal.drop)

    def told(self, trial: Trial) -> bool:
        """Whether there is a metric, on so many labels that they can see the tolerance."""
        return trial.value is not None and not trial.chance > self.limit

    def as_wanted(self, trial: Trial) -> Judged | None:
        """How a trial was judged: good exactly where it is within the tolerance, by the user's metric if there is one
        and its labels can see the tolerance; where they cannot, the agreement with the float model tells trials apart.
        """
        judged = trial.judged
        if judged is None:
            return None
        level = GOOD if trial.passes else min(judged.level, GOOD - 1)
        first = next((one for one in self.trials if one.value is not None), trial)  # one scale for all of them
        value = trial.value if trial.value is not None and self.told(first) else judged.value
        return replace(judged, level=level, value=value)

    def nearest(self, trials: Sequence[Trial]) -> Trial:
        """The most accurate of the trials."""
        return max(trials, key=lambda one: Attempt(one.choice or Choice(""), self.as_wanted(one)).rank)

    def climb(self, base: Trial) -> Climb:
        """Recipes on a base that is outside the tolerance."""

        def measure(choice: Choice) -> Judged | None:
            return self.as_wanted(self.attempt(choice, made.trying.causes))

        choice = base.choice or Choice("")
        made = Climb(Attempt(choice, self.as_wanted(base)), self.situation, measure, self.pace, self.usual(choice))
        return made

    def improved(self, climb: Climb, seconds: float) -> bool:
        """All recipes that apply, then single layers apart, in about this time; whether one is within the tolerance."""
        count = len(self.trials)
        end = self.clock.left - seconds  # what is to be left of all the time when this is over
        self.probes = self.clock.left - PROBES * seconds
        self.situation = climb.situation
        best = climb.others(seconds * (1 - APART), self.probe if self.samples.total > 4 * PROBED else None)
        good = best.judged is not None and best.judged.level >= GOOD
        if not good and Config(best.choice.config()).compile().mode == "static":
            self.layers_apart(best, end)
        return any(trial.passes for trial in self.trials[count:])

    def probe(self, choices: Sequence[Choice]) -> list[tuple[float, ...] | None]:
        """How choices do on few samples: the rank of their agreement; None for those that fail or came too late, and
        no numbers for those whose model is that of another one."""
        few = [list(islice(part, PROBED)) for part in (self.samples.fit, self.samples.choose)]
        kept = {one.name: self.book.done(f"probe {one.name}", Probed) for one in choices}
        left = [one for one in choices if kept[one.name] is None]
        found: Iterable[Probed] = (probed(self.model, one, few[0], few[1]) for one in left)
        if self.goal.workers != 1:
            calls: list[parallel.Call] = [(probed, (self.model, one, *few), {}) for one in left]
            found = parallel.results(calls, self.goal.workers, "processes")
        before = self.clock.left
        for choice, one in zip(left, found, strict=False):
            kept[choice.name] = one
            self.book.finish(f"probe {choice.name}", one.model_dump())
            last, before = before - self.clock.left, self.clock.left
            if before - last < self.probes:
                break
        return [self._ranked(one, choices, kept) for one in choices]

    def _ranked(self, choice: Choice, among: Sequence[Choice], kept: Mapping[str, Probed | None]) -> Any:
        own = kept[choice.name]
        if own is None or not own.rank:
            return None
        for other in among[: among.index(choice)]:
            that = kept[other.name]
            if that is not None and that.digest == own.digest:
                self.same[choice.name] = other.name
                self.tell(f"{choice.name}: comes last, on few samples its model is that of {other.name}")
                return ()
        return tuple(own.rank)

    def layers_apart(self, best: Attempt, end: float) -> None:
        """The layers that lose most, in float or in the wider preset of an NPU, until the rest is good enough.

        What an NPU has no wider type for runs on the CPU beside it: a few layers, where nothing else is good enough.
        Algorithms for which the time is too short, trial after trial, are left out.
        """
        npu, wide = self.situation.npu, wider(best.choice.preset) if self.situation.npu else FLOAT
        if wide is None and any(trial.passes for trial in self.trials):
            return
        plain = replace(best.choice, algorithms=())
        looks = LOOKS * self.usual(plain)
        if self.clock.left - looks - STEPS * self.usual(best.choice) < end:
            best = replace(best, choice=plain)
        usual = self.usual(best.choice)
        if self.clock.left - looks < end:
            return
        few = list(islice(self.samples.fit, TRIED))
        values = {"preset": best.choice.preset, "options": dict(best.choice.options)}
        try:
            study = estimate(self.model, values, few, [best.choice.preset])
        except QuarkError as error:
            self.tell(f"layers apart: {error}")
            return
        cause, ranked = f"a few layers lose most; they are {wide or FLOAT}", [one.layer for one in study.ranked()]
        most = (HALF if wide else BESIDE) if npu else ALL
        for choice in layers_apart(best, ranked, wide or FLOAT, most):
            if self.clock.left - usual < end or self.attempt(choice, (*best.causes, cause)).passes:
                break

    def promising(self, base: Trial) -> Trial | None:
        """The base, where it is worth improving: for the CPU one that is slower than float is not, whatever it keeps.

        Where it is not faster, this machine's own timings say first what stays in float.
        """
        if base.error or base.choice is None or self.goal.row.cost != "seconds":
            return None if base.error else base
        pace = self.speed(base)
        applies = pace < 1 + SAME and QUICKER.applies(replace(self.situation, slow=True), base.choice)
        if applies and self.clock.fits(SLOW * self.usual(base.choice)):
            tuned = self.attempt(QUICKER.change(base.choice), (*base.causes, QUICKER.cause))
            if not tuned.error and (quicker := self.speed(tuned)) > pace:
                base, pace = tuned, quicker
        if pace > 1 - SAME:
            return base
        self.notes.append(f"{base.name} is slower than the float model, so no recipe was tried on it")
        return None

    def speed(self, trial: Trial) -> float:
        """How many times as fast as the float model a trial is, at a first look."""
        stays, one = self.timed([self.with_file(trial)], min(BRIEFLY, self.timing))
        return stays.seconds / one.seconds

    def timed(self, trials: Sequence[Trial], seconds: float) -> list[Trial]:
        """The trials with their seconds an inference, and those of the float model, side by side."""
        feed = next(iter(self.samples.choose))
        models: dict[str, Any] = {"float": self.model} | {str(k): one.path for k, one in enumerate(trials)}
        found = median_seconds(models, feed, seconds, libraries=self.goal.libraries)
        stays = Trial("float", None, bytes=file_bytes(self.model), seconds=found["float"], path=self.model)
        return [stays, *(replace(one, seconds=found[str(k)]) for k, one in enumerate(trials))]


def _larger(limit: float, chance: float) -> float:
    """The tolerance, or the standard error where that is larger; NaN is not an error."""
    return max(limit, 0.0 if math.isnan(chance) else chance)


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
    with Journal.held(goal.ledger):
        search = Search(model, samples, goal, folder, tell)
        _try(search)
        outcome = _concluded(search)
        search.book.settle()
    return outcome


def _try(search: Search) -> None:
    """All bases as they are, the cheapest first; on those outside the tolerance what the engine proposes; then the
    other recipes: where nothing is within, on the nearest, and on those that are cheaper than the first within."""
    goal, climbs = search.goal, list[Climb]()
    for place, preset in enumerate(goal.row.bases):
        if place and not search.clock.fits(search.usual(goal.base(preset))):
            break
        search.situation = replace(search.situation, proposals=())  # those of another preset may mean nothing here
        base = search.attempt(goal.base(preset))
        if base.passes and goal.row.cost == "rank":
            break
        worth = search.promising(base)
        if worth is not None and not worth.passes:
            climbs.append(search.climb(worth))
    for place, climb in enumerate(climbs):
        search.situation, best = climb.situation, climb.proposed(search.clock.left)
        if goal.row.cost == "rank" and best.judged is not None and best.judged.level >= GOOD:
            climbs = climbs[:place]
            break
    if len(climbs) > 1 and not any(trial.passes for trial in search.trials) and search.clock.left > 0:
        nearest = max(climbs, key=lambda one: one.best.rank)
        climbs.remove(nearest)
        if search.improved(nearest, NEAREST * search.clock.left) and goal.row.cost == "rank":
            bound = goal.row.place(nearest.first.choice.preset)
            climbs = [one for one in climbs if goal.row.place(one.first.choice.preset) < bound]
    for place, climb in enumerate(climbs):
        left = search.clock.left
        if left <= 0:
            search.notes.append(f"no time was left for recipes on {climb.best.choice.name}")
        elif search.improved(climb, left / (len(climbs) - place)) and goal.row.cost == "rank":
            break


def _concluded(search: Search) -> Outcome:
    """The winner, judged on the reporting samples."""
    goal, tried = search.goal, [trial for trial in search.trials if not trial.error]
    if not tried:
        raise DataError(f"nothing could be tried; the first: {search.trials[0].name}: {search.trials[0].error}")
    good, untried = [trial for trial in tried if trial.passes], _untried(search)
    winner = min(good, key=_dearness(search)) if good else search.nearest(tried)
    outcome = Outcome(
        winner,
        bool(good),
        search.trials,
        None,
        None if search.float_score is None else search.float_score.value,
        notes=[*search.notes, *search.samples.notes],
        untried=untried,
    )
    if good and goal.row.cost != "rank":
        stays, *timed = search.timed([search.with_file(one) for one in good if not one.same], search.timing)
        outcome.seconds = {one.name: one.seconds for one in timed}
        outcome.float_seconds, by_time = stays.seconds, goal.row.cost == "seconds"
        least = min(timed, key=lambda one: one.seconds if by_time else one.bytes)
        alike = [one for one in timed if by_time and one.seconds <= least.seconds * (1 + SAME)]  # no clock tells them
        outcome.winner = search.nearest(alike or [least])
        slow = by_time and outcome.winner.seconds > stays.seconds * (1 - SAME)
        if slow or (not by_time and outcome.winner.bytes >= stays.bytes):
            better = "faster" if by_time else "smaller"
            outcome.notes.append(f"no trial within the tolerance is {better} than the float model")
            outcome.winner, outcome.solved = stays, False
            return outcome
    return _reported(search, outcome)


def _untried(search: Search) -> list[tuple[str, str]]:
    """Presets and recipes that no trial has, and why not."""
    presets = [trial.choice.preset for trial in search.trials if trial.choice is not None]
    passed, over = any(trial.passes for trial in search.trials), not search.clock.fits(search.usual(Choice("")))
    late = LATE if over or not passed else "what was found before was good enough"
    found = []
    for preset in search.goal.row.bases:
        if preset not in presets:
            found.append((preset, "a cheaper one is within the tolerance" if passed else late))
    causes = {cause for trial in search.trials for cause in trial.causes}
    for recipe in (one for one in RECIPES if one.cause not in causes):
        fits = [one for one in map(search.goal.base, dict.fromkeys(presets)) if recipe.applies(search.situation, one)]
        same = next((search.same[name] for one in fits if (name := recipe.change(one).name) in search.same), None)
        why = late if fits else "its condition does not hold for this model and these presets"
        found.append((recipe.name, why if same is None else f"{late}, and on few samples its model is that of {same}"))
    return found


def _dearness(search: Search) -> Callable[[Trial], tuple[float, ...]]:
    """What orders trials within the tolerance where the types count: the cheaper types, fewer layers of dearer ones,
    the more accurate first."""

    def key(trial: Trial) -> tuple[float, ...]:
        choice = trial.choice or Choice("")
        rank = Attempt(choice, search.as_wanted(trial)).rank
        return (search.goal.row.place(choice.preset), len(choice.layers), *(-part for part in rank))

    return key


def _reported(search: Search, outcome: Outcome) -> Outcome:
    outcome.winner = search.with_file(outcome.winner)
    if search.samples.report is None:  # too few to set any apart, as the notes say
        outcome.confirmed = outcome.solved
        return outcome
    found = compare(
        search.model, outcome.winner.path or search.model, search.samples.report, False, None, search.goal.libraries
    )
    outcome.reported = worst(found.outputs, found.answers)
    if search.goal.reporting is not None:
        judge, paths = search.goal.reporting, (outcome.winner.path or search.model, search.model)
        after, before = (score_of(judge(str(path)), "the metric") for path in paths)
        outcome.reported_values = after, before
    outcome.confirmed = outcome.solved and search.confirmed(outcome, found.answers)
    return outcome
