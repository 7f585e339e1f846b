"""``auto`` for torch: the smallest form of a model that one program reads and that keeps a metric.

    schemes   → all that the program reads, the smallest first, plain: from the first that is within the tolerance on,
                larger ones cannot win
    recipes   → for the smaller ones, nearest miss first and half of them in each round: algorithms, one after the other
    winner    → the smallest trial within the tolerance; the nearest miss where there is none

Half of the samples calibrate, a quarter chooses, a quarter is reported. The model is quantized in place for a trial and
put back, so that memory holds one model. Sizes are those of the files, from the plan, before anything is quantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from quark.algorithms.own import chooses_codes
from quark.config.file_formats import FORMATS, PROGRAMS, format_for, works
from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError, QuarkError
from quark.files.journal import Journal
from quark.files.private import private_folder
from quark.measure.outputs import Outputs, scores
from quark.measure.score import Score, error
from quark.search.auto import DROP, LATE, AutoTrial, Goal, Outcome, Search
from quark.search.function import checked_reference, score_of
from quark.search.parts import split
from quark.search.target import Target
from quark.search.values import FLOAT
from quark.torch.config.schemes import GGUF, NAMES
from quark.torch.config.schemes import scheme as named
from quark.torch.digest import digest_of_samples, identity_of_model
from quark.torch.export.before_work import check_before_work
from quark.torch.export.write_as import config_for, export_as
from quark.torch.from_values import config_of
from quark.torch.layer_runs import (
    FloatOutputs,
    Traffic,
    lay_out,
    outputs_before,
    outputs_of,
    running,
)
from quark.torch.quantizer import ModelQuantizer
from quark.torch.sensitivity import TorchSearchGoal, costs_of, file_bytes, matched, unfit
from quark.torch.template_reading import head_of

PURPOSES = {"genai": "onnxruntime-genai", **{name: name for name in PROGRAMS}}
SMALLER = "a smaller one is within the tolerance"
SQNR = 20.0  # dB that a model without tokens has to keep where no --drop is given
FIXED = ("sqnr", "cosine")  # metrics of the distance to the float model, which itself has none
WIDER = "int8_wo_per_channel"  # for layers whose axes the groups of a scheme do not divide


@dataclass(frozen=True)
class SchemeRecipe:
    """An algorithm beside a scheme; ``cause``: what it mends; ``inputs``: only where inputs are quantized too."""

    algorithms: tuple[str, ...]
    cause: str
    inputs: bool = False


RECIPES = (
    SchemeRecipe(("gptq",), "rounding errors that the weights not yet rounded can take over"),
    SchemeRecipe(("awq",), "weights that meet the largest inputs are rounded as coarsely as the others"),
    SchemeRecipe(("smooth",), "channels of inputs far larger than the others", inputs=True),
    SchemeRecipe(("rotation",), "outliers in single channels", inputs=True),
    SchemeRecipe(("awq", "gptq"), "weights that meet large inputs, and rounding errors that others can take over"),
    SchemeRecipe(("autoround",), "rounding to the nearest code is not the best rounding of a block"),
)


@dataclass(frozen=True)
class TorchGoal(Goal):
    """What is wanted: as ``quark.search.auto.Goal``; ``metric`` gets the model.

    Without one it is the perplexity, or the SQNR of a model without tokens.
    """

    PURPOSES = PURPOSES
    ELSEWHERE = "for a folder of a torch model; cpu, npu and size are for ONNX models"
    purpose: str = "transformers"

    @property
    def program(self) -> str:
        """The name in the table of formats."""
        return PURPOSES[self.purpose]


@dataclass(frozen=True)
class TorchTrial(AutoTrial):
    """A configuration that was tried: as ``quark.search.auto.AutoTrial``; ``chance`` is that of the value itself where
    the float model has none.

    Attributes:
        values: of the configuration file.
        value: of the metric on the choosing samples.
    """

    values: Mapping[str, Any]
    value: float = math.nan

    @property
    def pace(self) -> str:
        """The same for trials that take about as long."""
        return " ".join((super().pace, *(self.values.get("algorithms") or ())))


@dataclass
class TorchOutcome(Outcome[TorchTrial]):
    """What ``auto`` found: as ``quark.search.auto.Outcome``.

    Attributes:
        format: that the program reads it in.
        target: what had to be kept, on the choosing samples.
        float_value, float_bytes: of the float model.
        reported: (winner, float model) on the samples that decided nothing; None: there are none.
        chance: of the winner's value there, as that of a trial.
    """

    format: str
    target: Target
    float_value: float
    float_bytes: int
    reported: tuple[float, float] | None = None
    chance: float = math.nan

    @property
    def gap(self) -> float:
        """How much worse (below 0) or better the winner does on the samples that decided nothing than on those that
        chose it: as a part of the float model's value where that is what counts, or in the units of the metric.
        """
        if self.reported is None:
            return float("nan")
        after, before = self.reported
        sign = 1.0 if self.target.least else -1.0
        if self.target.metric in FIXED:
            return after - self.winner.value
        return sign * ((after - before) / abs(before) - (self.winner.value - self.float_value) / abs(self.float_value))


class TorchSearch(Search[TorchTrial, TorchOutcome]):
    """The trials of one model: as ``quark.search.auto.Search``."""

    goal: TorchGoal

    def __init__(
        self,
        model: nn.Module,
        samples: Sequence[Any],
        goal: TorchGoal,
        folder: Path,
        tell: Callable[[str], None],
        source: Path | None,
    ) -> None:
        super().__init__(goal, partial(identity_of, model, samples), tell)
        self.model, self.parts, self.folder, self.source = model, split(samples), folder, source
        self.common, self.before = self.laid_out(self.parts.choose, "choose")
        self.float_bytes = round(sum(file_bytes(one, (), goal.program) for one in model.parameters()))
        values = {name: one.value for name, one in self.before.items()}
        self.target = target_of(goal, values, vocabulary(model))
        self.float_value = values.get(self.target.metric, float("inf"))

    def steps(self) -> None:
        """Plain schemes, the smallest first; algorithms on the nearest misses, half of them in each round."""
        for trial in self.proposals():
            if self.late(trial):
                self.untried.append((trial.name, LATE))
            elif refused := refusal(self.model, trial.values, self.goal.program, self.source):
                self.untried.append((trial.name, str(refused)))
            else:
                self.attempt(trial)

    def proposals(self) -> Iterator[TorchTrial]:
        """What to try next, given what was tried."""
        plain = [self.planned(scheme) for scheme in NAMES if reads([scheme], self.goal.program)]
        for trial in sorted(plain, key=lambda one: one.bytes):
            if self.solved_within(trial.bytes):
                self.untried.append((trial.name, SMALLER))
            else:
                yield trial
        tried = [one for one in self.trials if not one.error]
        missed = sorted(tried, key=lambda one: abs(one.value - self.target.value))
        for recipe in RECIPES:
            missed = missed[: max(2, (len(missed) + 1) // 2)]
            for trial in missed:
                if goes_with(recipe, trial.values["scheme"]) and not self.solved_within(trial.bytes):
                    yield self.planned(trial.values["scheme"], recipe.algorithms, recipe.cause)

    def planned(self, scheme: str, algorithms: Sequence[str] = (), *causes: str) -> TorchTrial:
        """A trial that is still to be made."""
        values = self.values(scheme, algorithms)
        return TorchTrial("+".join((scheme, *algorithms)), values, bytes=self.size(values), causes=causes)

    def solved_within(self, size: int) -> bool:
        """Whether a trial of at most this size is within the tolerance."""
        return any(one.passes and one.bytes <= size for one in self.trials)

    def laid_out(self, samples: Sequence[Any], part: str) -> tuple[FloatOutputs, dict[str, Score]]:
        """Samples with the outputs of the float model, and its measures."""
        with self.clock.during("laying out"):
            (self.folder / part).mkdir()
            common = lay_out(self.model, samples, self.folder / part)
            return common, self.figures(common, outputs_before)

    def figures(
        self, common: FloatOutputs, outputs: Callable[[nn.Module, FloatOutputs], list[Outputs]] = outputs_of
    ) -> dict[str, Score]:
        """The measures of the model as it is."""
        if self.goal.metric is None:
            return scores(outputs(self.model, common))
        with running(self.model):
            return {"metric": score_of(self.goal.metric(self.model), "metric")}

    def values(self, scheme: str, algorithms: Sequence[str] = ()) -> dict[str, Any]:
        """Keys and values of a configuration; layers that the scheme does not fit get more bits, or stay float."""
        plain: dict[str, Any] = {"scheme": scheme, "algorithms": list(algorithms) or None}
        odd = list(unfit(self.model, config_of({"scheme": scheme}, self.model)))
        if odd and reads([scheme, WIDER], self.goal.program):
            fitting = {**plain, "layers": dict.fromkeys(odd, WIDER)}
            still = list(unfit(self.model, config_of(fitting, self.model)))
            return {**fitting, "layers": {**fitting["layers"], **dict.fromkeys(still, FLOAT)}}
        return {**plain, "layers": dict.fromkeys(odd, FLOAT)} if odd else plain

    def size(self, values: Mapping[str, Any]) -> int:
        """Bytes of all tensors under a configuration."""
        layers, how = matched(self.model, values).values(), (Traffic(), TorchSearchGoal(program=self.goal.program))
        saved = (costs_of(one, None, *how)["size"] - costs_of(one, one, *how)["size"] for one in layers)
        return round(self.float_bytes - sum(saved))

    def made(self, trial: TorchTrial) -> TorchTrial:
        """The trial, quantized in place with the fitting samples and judged on the choosing ones."""
        found = self.value(trial.values, self.common)
        chance = chance_of(self.target, found, self.before)
        return replace(trial, value=found.value, chance=chance, passes=self.target.met(found.value))

    def said(self, trial: TorchTrial) -> str:
        """The metric."""
        return f"{self.target.metric} {trial.value:.6g}"

    def ending(self) -> float:
        """Seconds for making the winner twice again: judged on samples that decided nothing, and written."""
        return self.clock.usual("laying out") + 2 * max(self.usual(one.pace) for one in self.trials)

    def cost(self, trial: TorchTrial) -> tuple[float, ...]:
        """The size."""
        return (trial.bytes,)

    def rank(self, trial: TorchTrial) -> tuple[float, ...]:
        """The metric, larger is better; NaN is the worst."""
        worst = math.isnan(trial.value)
        return (-math.inf if worst else trial.value if self.target.least else -trial.value,)

    def value(self, values: Mapping[str, Any], common: FloatOutputs) -> Score:
        """The metric of the quantized model."""
        scheme, program = values["scheme"], self.goal.program
        kept = getattr(self.model, "dtype", next(self.model.parameters()).dtype)
        config = config_for(config_of(values, self.model), format_for(schemes_in(values), program), program, kept)
        with ExitStack() as undo:
            ModelQuantizer(config).quantize(self.model, self.parts.fit if needs_data(scheme, values) else None, undo)
            return self.figures(common)[self.target.metric]

    def proved(self, winner: TorchTrial, good: Sequence[TorchTrial]) -> TorchOutcome:
        """The outcome, with the winner on the reporting samples."""
        notes, found = list(self.parts.notes), None
        if self.goal.metric is not None:
            notes.append("the function that chose the winner also reports on it, on data of its own")
        elif self.parts.report is not None:
            common, before = self.laid_out(self.parts.report, "report")
            found = before, self.value(winner.values, common)
        program = format_for(schemes_in(winner.values), self.goal.program)
        facts = program, self.target, self.float_value, self.float_bytes
        outcome = TorchOutcome(winner, bool(good), self.trials, *facts, notes=notes, untried=self.untried)
        return outcome if found is None else reported_on(outcome, self.goal, *found)


def auto(
    model: nn.Module,
    samples: Iterable[Any],
    goal: TorchGoal,
    tell: Callable[[str], None] = lambda words: None,
    source: Path | None = None,
) -> TorchOutcome:
    """Try, choose, and judge the winner on samples that decided nothing. The model is left as it was.

    Args:
        model: a float model.
        samples: tensors, mappings or tuples: what the model is called with.
        goal: what is wanted.
        tell: is told each trial in a line.
        source: the folder that the model came from, for what programs read beside it: its tokenizer.

    Raises:
        DataError: no samples.
        ConfigError, ModelError: nothing can be tried at all, or nothing that is tried could be written.
    """
    if source is not None:
        check_written(model, goal.program, source)
    with private_folder() as folder, Journal.held(goal.ledger):
        return TorchSearch(model, list(samples), goal, folder, tell, source).found()


def check_written(model: nn.Module, program: str, source: Path) -> None:
    """Refuse, before anything is tried, a model or a tokenizer that no format of the program holds in any scheme.

    Raises:
        ConfigError, ModelError: why the first scheme cannot be written.
    """
    first: QuarkError | None = None
    for scheme in (name for name in NAMES if reads([name], program)):
        refused = refusal(model, {"scheme": scheme}, program, source)
        if refused is None:
            return
        first = first or refused
    if first is not None:
        raise first


def refusal(
    model: nn.Module, values: Mapping[str, Any], program: str, source: Path | None
) -> ConfigError | ModelError | None:
    """Why a model cannot be written under a configuration; None: it can, or nothing will be written."""
    if source is None:
        return None
    try:
        config = config_of(values, model)
        check_before_work(model, config, format_for(schemes_in(values), program), program, source)
    except (ConfigError, ModelError) as error:
        return error
    return None


def identity_of(model: nn.Module, samples: Sequence[Any]) -> dict[str, str]:
    """What a ledger belongs to: the model, the samples, what computes."""
    return {**identity_of_model(model), "data": digest_of_samples(samples)}


def goes_with(recipe: SchemeRecipe, scheme: str) -> bool:
    """Whether a recipe has something to mend in a scheme: inputs, or codes that are not chosen with their scales."""
    if scheme in GGUF and any(map(chooses_codes, recipe.algorithms)):
        return False
    return not recipe.inputs or named(scheme).input_tensors is not None


def reported_on(outcome: TorchOutcome, goal: TorchGoal, before: Mapping[str, Score], after: Score) -> TorchOutcome:
    """What is found on the samples that decided nothing: of the float model, of the winner."""
    target, chance = outcome.target, chance_of(outcome.target, after, before)
    allowed = 0.0 if math.isnan(chance) else chance
    whole = before[target.metric].value
    if target.metric in FIXED:
        near = target.value - after.value <= allowed
    else:
        target = target_of(goal, {target.metric: whole}, math.inf)
        near = abs(after.value - whole) <= allowed
    confirmed = outcome.solved and (target.met(after.value) or near)
    return replace(outcome, reported=(after.value, whole), chance=chance, confirmed=confirmed)


def chance_of(target: Target, value: Score, before: Mapping[str, Score]) -> float:
    """How far a value is chance: the standard error of its difference to the float model's, or of itself."""
    still = Score(0.0, (0.0,) * len(value.without))
    return error(value, still if target.metric in FIXED else before[target.metric])


def write(
    model: nn.Module, found: TorchOutcome, samples: Sequence[Any], output: Path, source: Path, program: str
) -> None:
    """Quantize the model as the winner was, in place, and write it in the format that the program reads.

    Args:
        model: the float model.
        found: what ``auto`` returned.
        samples: those that fitted.
        output: a new folder.
        source: the folder that the model came from, with its tokenizer.
        program: that reads it.

    Raises:
        ConfigError, OutputError: it cannot be written.
    """
    model = model.float() if found.format == "onnx" else model
    kept = getattr(model, "dtype", next(model.parameters()).dtype)
    config = config_for(config_of(found.winner.values, model), found.format, program, kept)
    ModelQuantizer(config).quantize_model(model, list(samples))
    export_as(model, output, found.format, source, program=program)


def target_of(goal: TorchGoal, before: Mapping[str, float], tokens: float) -> Target:
    """What is to be kept, given the figures of the float model.

    A perplexity above the number of ``tokens`` is that of a model which knows nothing of the text: damage may lower it.
    """
    drop = DROP if goal.drop is None else goal.drop
    if "metric" in before:
        value = checked_reference(before["metric"])
        return Target("metric", True, value - abs(value) * drop)
    if "perplexity" in before and before["perplexity"] < tokens:
        return Target("perplexity", False, before["perplexity"] * (1 + drop))
    return Target("sqnr", True, SQNR) if goal.drop is None else Target("cosine", True, 1 - drop)


def vocabulary(model: nn.Module) -> float:
    """How many tokens a model tells apart."""
    head = head_of(model)
    return float(head.weight.shape[0]) if head is not None else float("inf")


def reads(schemes: Iterable[str], program: str) -> bool:
    """Whether a program reads all of the schemes in one format."""
    wanted = list(schemes)
    return any(all(works(scheme, format, program) for scheme in wanted) for format in FORMATS)


def schemes_in(values: Mapping[str, Any]) -> list[str]:
    """The schemes of a configuration."""
    return [values["scheme"], *(one for one in (values.get("layers") or {}).values() if one != FLOAT)]


def needs_data(scheme: str, values: Mapping[str, Any]) -> bool:
    """Whether inputs are quantized with static scales, or an algorithm looks at samples."""
    inputs = named(scheme).input_tensors
    return bool(values.get("algorithms")) or inputs is not None
