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
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from quark import parallel
from quark.config.job import repeating
from quark.errors import QuarkError
from quark.files.journal import Journal
from quark.measure.answers import Answers
from quark.measure.score import Score, by_chance
from quark.onnx import fingerprint
from quark.onnx.climb import GOOD, Attempt, Climb, layers_apart
from quark.onnx.compare import ENDS, compare
from quark.onnx.describe import describe, file_bytes
from quark.onnx.forecast import forecast
from quark.onnx.graph import model as files
from quark.onnx.graph.libraries import library_files
from quark.onnx.latency import quiet_seconds
from quark.onnx.quantization.config.config import Config
from quark.onnx.recipes import QUICKER, RECIPES, Choice, Situation, wider
from quark.onnx.sensitivity import estimate
from quark.onnx.trial_files import probed, quantized
from quark.onnx.trials import OnnxGoal, OnnxOutcome, OnnxTrial, Probed, entry_of, identity_of, remembered
from quark.report.verdict import Judged, worst
from quark.search.auto import DROP, LATE, PLAIN, Search, kept_score
from quark.search.function import checked_reference, score_of
from quark.search.parts import Split
from quark.search.values import FLOAT

APART = 0.4
"""The part of the time of a preset that is kept for layers apart, the last resort."""
ALL, HALF, BESIDE = 1.0, 0.5, 0.125
"""The part of the layers that may stand apart: in float, of wider types on an NPU, and beside an NPU on the CPU."""
TRIED = 8
"""Samples that single layers are tried on."""
PROBED = 8
"""Samples, of each part, that recipes are compared on before the better ones get all."""
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
SLOWER = "the presets that it could help are slower than the float model"
"""Why a recipe was not tried: more time would not help."""
SAME = 0.03
"""A trial that is not faster than the float model by this part wins nothing in time."""


class OnnxSearch(Search[OnnxTrial, OnnxOutcome]):
    """The trials of one model: as ``quark.search.auto.Search``."""

    goal: OnnxGoal

    def __init__(self, model: Path, samples: Split, goal: OnnxGoal, folder: Path, tell: Callable[[str], None]) -> None:
        super().__init__(goal, partial(identity_of, model, samples, goal.exclude), tell)
        self.model, self.samples, self.folder = model, samples, folder
        self.pace: dict[str, float] = {}
        self.same: dict[str, str] = {}
        self.slow = set[str]()  # presets that are slower than the float model
        self.probes = 0.0
        self.float_score = None if goal.metric is None else self._of_float(goal.metric)
        self.situation = Situation(frozenset(describe(model).operators), (), goal.purpose == "npu", apart=True)

    def steps(self) -> None:
        """All bases as they are, the cheapest first; on those outside the tolerance what the engine proposes; then the
        other recipes: where nothing is within, on the nearest, and on those that are cheaper than the first within."""
        goal, climbs = self.goal, list[Climb]()
        for preset in goal.row.bases:
            trial = OnnxTrial.of(goal.base(preset))
            if self.late(trial):
                break
            self.situation = replace(self.situation, proposals=())  # those of another preset may mean nothing here
            base = self.attempt(trial)
            if base.passes and goal.row.cost == "rank":
                break
            worth = self.promising(base)
            if worth is not None and not worth.passes:
                climbs.append(self.climb(worth))
        for place, climb in enumerate(climbs):
            self.situation, best = climb.situation, climb.proposed(self.clock.left)
            if goal.row.cost == "rank" and best.judged is not None and best.judged.level >= GOOD:
                climbs = climbs[:place]
                break
        if len(climbs) > 1 and not any(trial.passes for trial in self.trials) and self.clock.left > 0:
            nearest = max(climbs, key=lambda one: one.best.rank)
            climbs.remove(nearest)
            if self.improved(nearest, NEAREST * self.clock.left) and goal.row.cost == "rank":
                bound = goal.row.place(nearest.first.choice.preset)
                climbs = [one for one in climbs if goal.row.place(one.first.choice.preset) < bound]
        for place, climb in enumerate(climbs):
            left = self.clock.left
            if left <= 0:
                self.notes.append(f"no time was left for recipes on {climb.best.choice.name}")
            elif self.improved(climb, left / (len(climbs) - place)) and goal.row.cost == "rank":
                break

    def remembered(self, trial: OnnxTrial) -> OnnxTrial | None:
        """What the ledger has of a trial; what the engine proposed then is remembered, too."""
        known = remembered(self.book, trial)
        self.propose(() if known is None else known[1])
        return None if known is None else known[0]

    def entry(self, trial: OnnxTrial) -> dict[str, Any]:
        """A trial as the ledger keeps it."""
        return entry_of(trial, self.situation.proposals)

    def made(self, trial: OnnxTrial) -> OnnxTrial:
        """The trial, quantized and judged; what was judged under another name is not judged again."""
        path = self.folder / f"{len(self.trials)}.onnx"
        trial = replace(trial, choice=self._quantized(trial.choice or Choice(""), path), path=path)
        digest = fingerprint.of_model(files.load(path))
        before = next((one for one in self.trials if one.digest == digest), None)
        if before is not None:
            own: dict[str, Any] = {"name": trial.name, "choice": trial.choice, "causes": trial.causes, "path": path}
            return replace(before, same=before.name, **own)
        with self.clock.during("judging"):
            found = compare(self.model, path, self.samples.choose, ENDS, libraries=self.goal.libraries)
            judged = worst(found.outputs, found.answers)
            value, chance = self.measured(path)
        trial = replace(trial, judged=judged, value=value, bytes=file_bytes(path), chance=chance, digest=digest)
        return replace(trial, passes=self.within(trial, found.answers))

    def ending(self) -> float:
        """Seconds for judging the winner, and for timing the good trials."""
        return self.clock.usual("judging") * (1 if self.goal.reporting is None else 2) + self.timing

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

    def said(self, trial: OnnxTrial) -> str:
        """The metric, and how the outputs were judged."""
        said = trial.judged.reason if trial.judged else "nothing to compare"
        score = "" if trial.value is None else f"metric {trial.value:.6g}, "
        return score + (f"the same model as {trial.same}" if trial.same else said)

    def propose(self, sentences: Iterable[str]) -> None:
        """Remember what the engine proposed."""
        found = dict.fromkeys((*self.situation.proposals, *sentences))
        self.situation = replace(self.situation, proposals=tuple(found))

    def with_file(self, trial: OnnxTrial) -> OnnxTrial:
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

    def within(self, trial: OnnxTrial, answers: Mapping[str, Answers]) -> bool:
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

    def confirmed(self, outcome: OnnxOutcome, answers: Mapping[str, Answers]) -> bool:
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

    def told(self, trial: OnnxTrial) -> bool:
        """Whether there is a metric, on so many labels that they can see the tolerance."""
        return trial.value is not None and not trial.chance > self.limit

    def as_wanted(self, trial: OnnxTrial) -> Judged | None:
        """How a trial was judged: good exactly where it is within the tolerance, by the user's metric if there is one
        and its labels can see the tolerance; where they cannot, the agreement with the float model tells trials apart.
        """
        judged = trial.judged
        if judged is None:
            return None
        level = GOOD if trial.passes else min(judged.level, GOOD - 1)
        first = next((one for one in self.trials if one.value is not None), trial)  # one scale for all of them
        if trial.value is not None and self.told(first):
            return replace(judged, level=level, value=trial.value, without=())
        return replace(judged, level=level)

    def rank(self, trial: OnnxTrial) -> tuple[float, ...]:
        """The better, the larger."""
        return Attempt(trial.choice or Choice(""), self.as_wanted(trial)).rank

    def cost(self, trial: OnnxTrial) -> tuple[float, ...]:
        """What orders trials where the types count: the cheaper types, then fewer layers of dearer ones."""
        choice = trial.choice or Choice("")
        return self.goal.row.place(choice.preset), len(choice.layers)

    def climb(self, base: OnnxTrial) -> Climb:
        """Recipes on a base that is outside the tolerance."""

        def measure(choice: Choice) -> Judged | None:
            return self.as_wanted(self.attempt(OnnxTrial.of(choice, made.trying.causes)))

        choice = base.choice or Choice("")
        made = Climb(Attempt(choice, self.as_wanted(base)), self.situation, measure, self.pace, self.usual(choice.pace))
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
        looks = LOOKS * self.usual(plain.pace)
        if self.clock.left - looks - STEPS * self.usual(best.choice.pace) < end:
            best = replace(best, choice=plain)
        usual = self.usual(best.choice.pace)
        if self.clock.left - looks < end:
            return
        few = list(islice(self.samples.fit, TRIED))
        own = best.choice
        values = {"preset": own.preset, "options": dict(own.options), "exclude": list(own.exclude)}
        try:
            study = estimate(self.model, values, few, [best.choice.preset])
            nodes = forecast(Config(own.config()).compile(), self.model).plan.nodes
        except QuarkError as error:
            self.tell(f"layers apart: {error}")
            return
        cause = f"a few layers lose most; they are {wide or FLOAT}"
        layers = [one.layer for one in study.ranked()]
        ranked = [name for name in layers if name not in nodes or nodes[name].quantized]  # not what is float already
        most = (HALF if wide else BESIDE) if npu else ALL
        for choice in layers_apart(best, ranked, wide or FLOAT, most):
            if self.clock.left - usual < end or self.attempt(OnnxTrial.of(choice, (*best.causes, cause))).passes:
                break

    def promising(self, base: OnnxTrial) -> OnnxTrial | None:
        """The base, where it is worth improving: for the CPU one that is slower than float is not, whatever it keeps.

        Where it is not faster, this machine's own timings say first what stays in float.
        """
        if base.error or base.choice is None or self.goal.row.cost != "seconds":
            return None if base.error else base
        pace = self.speed(base)
        applies = pace < 1 + SAME and QUICKER.applies(replace(self.situation, slow=True), base.choice)
        if applies and self.clock.fits(QUICKER.times * self.usual(base.pace)):
            tuned = self.attempt(OnnxTrial.of(QUICKER.change(base.choice), (*base.causes, QUICKER.cause)))
            if not tuned.error and (quicker := self.speed(tuned)) > pace:
                base, pace = tuned, quicker
        if pace > 1 - SAME:
            return base
        self.slow.add(base.choice.preset if base.choice else "")
        self.notes.append(f"{base.name} is slower than the float model, so no recipe was tried on it")
        return None

    def speed(self, trial: OnnxTrial) -> float:
        """How many times as fast as the float model a trial is, at a first look."""
        stays, one = self.timed([self.with_file(trial)], min(BRIEFLY, self.timing))
        return stays.seconds / one.seconds

    def timed(self, trials: Sequence[OnnxTrial], seconds: float) -> list[OnnxTrial]:
        """The trials with their seconds an inference, and those of the float model, side by side."""
        feed = next(iter(self.samples.choose))
        models: dict[str, Any] = {"float": self.model} | {str(k): one.path for k, one in enumerate(trials)}
        found = quiet_seconds(models, feed, seconds, libraries=self.goal.libraries)
        return [self._float(found["float"]), *(replace(one, seconds=found[str(k)]) for k, one in enumerate(trials))]

    def _float(self, seconds: float = math.nan) -> OnnxTrial:
        """The float model as a trial."""
        return OnnxTrial("float", None, bytes=file_bytes(self.model), seconds=seconds, path=self.model)

    def proved(self, winner: OnnxTrial, good: Sequence[OnnxTrial]) -> OnnxOutcome:
        """The outcome: the fastest or smallest, where that counts; judged on the reporting samples."""
        value, notes = None if self.float_score is None else self.float_score.value, [*self.notes, *self.samples.notes]
        outcome = OnnxOutcome(winner, bool(good), self.trials, None, value, notes=notes, untried=self._untried())
        made = {one.choice.preset for one in self.trials if one.choice and not one.error}
        if self.slow and not good and made <= self.slow:
            outcome.notes.append("every preset is slower than the float model here: nothing to win in time")
            outcome.winner = self._float()
            return outcome
        if not good or self.goal.row.cost == "rank":
            return self._reported(outcome)
        stays, *timed = self.timed([self.with_file(one) for one in good if not one.same], self.timing)
        outcome.seconds = {one.name: one.seconds for one in timed}
        outcome.float_seconds, by_time = stays.seconds, self.goal.row.cost == "seconds"
        least = min(timed, key=lambda one: one.seconds if by_time else one.bytes)
        alike = [one for one in timed if by_time and one.seconds <= least.seconds * (1 + SAME)]  # no clock tells them
        outcome.winner = self.nearest(alike or [least])
        slow = by_time and outcome.winner.seconds > stays.seconds * (1 - SAME)
        if slow or (not by_time and outcome.winner.bytes >= stays.bytes):
            better = "faster" if by_time else "smaller"
            outcome.notes.append(f"no trial within the tolerance is {better} than the float model")
            outcome.winner, outcome.solved = stays, False
            return outcome
        return self._reported(outcome)

    def _untried(self) -> list[tuple[str, str]]:
        """Presets and recipes that no trial has, and why not."""
        presets = [trial.choice.preset for trial in self.trials if trial.choice is not None]
        passed, over = any(trial.passes for trial in self.trials), not self.clock.fits(self.usual(PLAIN))
        late = LATE if over or not passed else "what was found before was good enough"
        found = []
        for preset in self.goal.row.bases:
            if preset not in presets:
                found.append((preset, "a cheaper one is within the tolerance" if passed else late))
        causes = {cause for trial in self.trials for cause in trial.causes}
        for recipe in (one for one in RECIPES if one.cause not in causes):
            fits = [one for one in map(self.goal.base, dict.fromkeys(presets)) if recipe.applies(self.situation, one)]
            same = next((self.same[name] for one in fits if (name := recipe.change(one).name) in self.same), None)
            why = late if fits else "its condition does not hold for this model and these presets"
            why = SLOWER if fits and all(one.preset in self.slow for one in fits) else why
            why = why if same is None else f"{late}, and on few samples its model is that of {same}"
            found.append((recipe.name, why))
        return found

    def _reported(self, outcome: OnnxOutcome) -> OnnxOutcome:
        """The outcome with what the winner does on the reporting samples."""
        outcome.winner = self.with_file(outcome.winner)
        if self.samples.report is None:  # too few to set any apart, as the notes say
            outcome.confirmed = outcome.solved
            return outcome
        path, libraries = outcome.winner.path or self.model, self.goal.libraries
        found = compare(self.model, path, self.samples.report, ENDS, None, libraries)
        outcome.reported = worst(found.outputs, found.answers)
        if self.goal.reporting is not None:
            judge = self.goal.reporting
            after, before = (score_of(judge(str(one)), "the metric") for one in (path, self.model))
            outcome.reported_values = after, before
        outcome.confirmed = outcome.solved and self.confirmed(outcome, found.answers)
        return outcome


def _larger(limit: float, chance: float) -> float:
    """The tolerance, or the standard error where that is larger; NaN is not an error."""
    return max(limit, 0.0 if math.isnan(chance) else chance)


def auto(
    model: Path, samples: Split, goal: OnnxGoal, folder: Path, tell: Callable[[str], None] = lambda words: None
) -> OnnxOutcome:
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
    if goal.exclude:  # a name that no node has ends it, too
        forecast(Config(goal.base(goal.row.bases[0]).config()).compile(), model)
    library_files(goal.libraries)  # what is not there ends the search, and not each of its trials
    with Journal.held(goal.ledger):
        return OnnxSearch(model, samples, goal, folder, tell).found()
