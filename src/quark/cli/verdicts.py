"""The last lines of a command: is the model good, and what to type if it is not.

Where accuracy is not good and samples are at hand, the recipes of ``quark.onnx.recipes`` are tried on the model: as
many as its size and the samples say that there is time for (``WORK``), so that the same command says the same on a busy
machine. The command that is printed has been run, and its figure stands beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf, isnan
from pathlib import Path
from typing import Any

import numpy as np

from quark.cli.extensions import command_line
from quark.config.plan import Plan, TensorPlan
from quark.config.presets import get_preset
from quark.dataclass import dataclass
from quark.errors import ConfigError, QuarkError, check_name
from quark.numerics.formats import Int, get_format
from quark.onnx import Config, ModelQuantizer
from quark.onnx.compare import ENDS, FLOAT, QUANTIZED, Checks, Comparison, compare
from quark.onnx.config_file import load_config
from quark.onnx.coverage import Coverage, coverage, float_layers
from quark.onnx.data import Feed
from quark.onnx.data_layout import looked_at
from quark.onnx.describe import describe, file_bytes, largest_constant
from quark.onnx.explain import decisions
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.model import load
from quark.onnx.pipeline import is_float16, on_cpu
from quark.onnx.qdq.slower import REASON, TUNED, all_in_float
from quark.onnx.quantization.config.config import QuantizationConfig
from quark.onnx.quantized_plan import rows_of
from quark.onnx.recipes import QUICKER, Choice, Situation, with_algorithms
from quark.onnx.result import Result
from quark.report.tables import brief
from quark.report.verdict import (
    LEVELS,
    SAME,
    Judged,
    Line,
    accuracy_line,
    coverage_line,
    size_line,
    speed_line,
    worst,
)
from quark.search.target import check_reachable

WORK, OF_NODE, PER_SECOND = 7.0, 0.002, 4e10
"""Seconds that attempts take in all, about, where the first result is not good: by what a node takes of a quantization,
and by the multiplications of a second."""
SECONDS = 60.0
"""Time after which none begins, on however slow a machine."""
TIMED_ENDS = Checks(layers=False, timed=0.5)
"""Outputs and speed of what is tried."""
FEW = 32
"""Elements of a float weight up to which its codes cannot save anything: the scale and the node take some 200 bytes."""
FAILED = 3
"""The exit code of a bound that is not met."""
_BOUND = re.compile(r"^\s*([A-Za-z_]\w*)\s*=\s*([-+.\w]+)\s*$")
#: Metrics of ``--fail-under``: how each is read off a comparison, the worst output counting.
METRICS: Mapping[str, Callable[[Comparison], Mapping[str, float]]] = {
    "sqnr": lambda found: {name: one.sqnr for name, one in found.outputs.items() if one.count},
    "psnr": lambda found: {name: one.psnr for name, one in found.outputs.items() if one.count},
    "cosine": lambda found: {name: one.cosine for name, one in found.outputs.items() if one.count},
    "kept": lambda found: {name: one.share for name, one in found.answers.items() if one.share is not None},
}
_UNITS = {"sqnr": " dB", "psnr": " dB"}


@dataclass(frozen=True)
class Bound:
    """``--fail-under METRIC=NUMBER``."""

    metric: str
    value: float

    def failure(self, found: Comparison) -> str | None:
        """What is below the bound, or None. A metric that no output has, or that is not a number, is."""
        values = METRICS[self.metric](found)
        bound = f"--fail-under {self.metric}={self.value:g}"
        if not values:
            return f"{bound}: the outputs have too few answers to tell"
        worst = min(values, key=lambda name: -inf if isnan(values[name]) else values[name])
        if values[worst] >= self.value:
            return None
        return f"{bound}: the worst output, {worst!r}, has {values[worst]:.4g}{_UNITS.get(self.metric, '')}"


def parse_bound(text: str) -> Bound:
    """``sqnr=20``.

    Raises:
        ConfigError: no metric and number, an unknown metric, or a value that it never has.
    """
    match = _BOUND.match(text)
    if match is None:
        raise ConfigError(f"--fail-under {text!r}: write a metric, = and a number, as in 'sqnr=20'")
    check_name("metric of --fail-under", match[1], METRICS)
    try:
        value = float(match[2])
    except ValueError:
        value = math.nan
    if isnan(value):
        raise ConfigError(f"--fail-under {text!r}: {match[2]!r} is not a number")
    check_reachable(f"--fail-under {text!r}", match[1], value)
    return Bound(match[1], value)


def with_typed(config: QuantizationConfig, exclude: Sequence[str], layout: str | None) -> QuantizationConfig:
    """``config``, changed in place: with ``--exclude`` and ``--layout``."""
    config.nodes_to_exclude = [*config.nodes_to_exclude, *exclude]
    if layout is not None:
        config.target = "cpu" if layout == "cpu" else "any"
    return config


@dataclass(frozen=True)
class Subject:
    """What the verdict is about.

    Attributes:
        model, output: the files.
        choice: the configuration in words; None where only the files are known.
        source: the words of the command line that name the samples.
        where: what accuracy was measured on.
        feed: one sample, as the output takes it.
        exclude, layout: what was typed beside the choice, which an advised command keeps.
        file: the configuration file that says more than the choice's preset.
        judged_on: words of the command line that name the samples of the judgement, where they are others.
        counted: how much of the output is quantized, where that is known.
        libraries: files with the models' custom operators.
    """

    model: Path
    output: Path
    choice: Choice | None
    source: Sequence[str]
    where: str
    feed: Mapping[str, np.ndarray] | None = None
    exclude: Sequence[str] = ()
    layout: str | None = None
    file: Path | None = None
    judged_on: Sequence[str] = ()
    counted: Coverage | None = None
    libraries: Libraries = None

    @cached_property
    def shares(self) -> Coverage:
        """How much of the output is quantized."""
        return self.counted or coverage(self.output, self.feed, self.libraries)

    @cached_property
    def operators(self) -> Mapping[str, int]:
        """The operator types of the model, and how often they occur."""
        return describe(self.model).operators

    def keeps_file(self, choice: Choice) -> bool:
        """Whether a choice stands beside the configuration file: one of another preset stands in its place."""
        return self.file is not None and self.choice is not None and choice.preset == self.choice.preset

    def config(self, choice: Choice) -> Config:
        """What ``command`` would quantize with: a trial of it has to be of the same model."""
        file = self.file if self.keeps_file(choice) else None
        config = Choice(choice.preset).config() if file is None else load_config(file)
        config = with_algorithms(config, {**choice.options, "PrintSummary": False}, choice.algorithms)
        return Config(global_quant_config=with_typed(config, self.exclude, self.layout))


def judge_all(subject: Subject, plan: Plan | None, found: Comparison | None) -> list[Line]:
    """The lines that hold for what was written; those without a measurement are left out."""
    lines = []
    if found is not None:
        lines.append(accuracy_line(worst(found.outputs, found.answers), subject.where))
    if found is not None and found.seconds:
        lines.append(speed_line(found.seconds[FLOAT], found.seconds[QUANTIZED], elsewhere(subject)))
    lines.append(size_line(file_bytes(subject.model), file_bytes(subject.output)))
    return [*lines, *_coverage(subject, plan)]


_NO_KERNEL = "quantized, but ONNX Runtime has no integer kernel for it between these types"


def _coverage(subject: Subject, plan: Plan | None) -> list[Line]:
    """The line of coverage, where integers are: formats that are fake-quantized compute in float by design."""
    if plan is None:
        shares = subject.shares
        return [coverage_line(shares.integer, shares.stored)] if shares.integer else []
    if all_in_float(plan) and not subject.shares.stored:
        return [coverage_line(0.0, 0.0, [f"all layers: {TUNED if plan.tuned else REASON}"])]
    wanted = {tensor.role for tensor in plan if isinstance(get_format(tensor.spec.format), Int)}
    if not wanted:
        return []
    shares = subject.shares
    nodes = (plan.nodes[one.name] for one in float_layers(shares) if one.name in plan.nodes)
    left = [f"{brief(node.name)}: {_NO_KERNEL if node.quantized else node.reason}" for node in nodes]
    return [coverage_line(shares.integer if "activation" in wanted else None, shares.stored, left[:2])]


def elsewhere(subject: Subject) -> str:
    """The device that a preset is made for, where that is not this CPU; of a file alone, what its scales tell."""
    if subject.choice is None:
        return "NPUs, as its scales are powers of two" if _by_powers_of_two(subject.output) else ""
    hardware = get_preset(subject.choice.preset).hardware
    return "" if "cpu" in hardware or not hardware else " and ".join(kind.upper() + "s" for kind in hardware)


def _by_powers_of_two(path: Path) -> bool:
    """Whether all scales of activations are powers of two, and there are several."""
    rows = [row.given for _, row in rows_of(load(path), constants=False) if isinstance(row, TensorPlan)]
    scales = [np.asarray(given[0], np.float64).ravel() for given in rows if given is not None]
    together = np.concatenate(scales) if scales else np.zeros(0)
    return len(scales) > 1 and bool((np.frexp(together)[0] == 0.5).all())


@dataclass(frozen=True)
class Bench:
    """What other configurations are tried on.

    Attributes:
        subject: the model.
        reader, chosen: the samples that they calibrate on, and those that they are judged on.
    """

    subject: Subject
    reader: Any
    chosen: list[Feed]

    @cached_property
    def attempts(self) -> float:
        """How many quantizations are tried: each calibrates on all samples and compares both models on the chosen."""
        count = len(self.reader) if self.reader is not None else 0
        runs, nodes = count + 2 * len(self.chosen), sum(self.subject.operators.values())
        return WORK / (OF_NODE * nodes + self.subject.shares.macs * runs / PER_SECOND + 1e-9)

    def of(self, choice: Choice, checks: Checks = ENDS) -> Comparison | None:
        """What comes of a choice; None where the model has nothing for it."""
        subject = self.subject
        try:
            proto = ModelQuantizer(subject.config(choice)).run(subject.model, None, looked_at(self.reader)).proto
        except QuarkError:  # an algorithm that this model has nothing for; the model that was asked for is written
            return None
        if proto is None:
            return None
        return compare(subject.model, proto, self.chosen, checks, libraries=subject.libraries)


def advise(bench: Bench, result: Result, found: Comparison) -> list[str]:
    """The command that helps most of those that were tried, with its figure; what else can be done where none did."""
    subject = bench.subject
    judged = worst(found.outputs, found.answers)
    if subject.choice is None or judged is None or judged.level == len(LEVELS) - 1 or judged.value == math.inf:
        return []
    from quark.onnx.climb import Attempt, Climb

    def measure(choice: Choice) -> Judged | None:
        again = bench.of(choice)
        return None if again is None else worst(again.outputs, again.answers)

    npu = "npu" in get_preset(subject.choice.preset).hardware
    operators, lost = frozenset(subject.operators), judged.level == 0
    situation = Situation(operators, result.plan.proposals, npu, lost=lost)
    climb = Climb(Attempt(subject.choice, judged), situation, measure, left=bench.attempts, advised=True)
    best, tried = climb.within(SECONDS), climb.tried
    better = best.judged is not None and best.is_worth(climb.first)
    if best.judged is None or not better or best.judged.level == 0:  # a command that ends in a lost model is no help
        others = "other configurations were" if tried != 1 else "other configuration was"
        ended = "lost too" if better else "no better"
        tries = f"{tried} {others} {ended}" if tried else "no other configuration was tried: each would take longer"
        return [f"{tries}; {longer(subject, subject.choice)}"]
    figure = f"tried: {LEVELS[best.judged.level]}, {best.judged.reason}; cause: {'; '.join(best.causes)}"
    said = [f"{command(subject, best.choice)}   ({figure})"]
    if best.judged.level < len(LEVELS) - 1:
        said.append(longer(subject, subject.choice))
    return said


def command(subject: Subject, choice: Choice) -> str:
    """The command line of a choice."""
    model, output = str(subject.model), str(subject.output)
    kept = [word for name in subject.exclude for word in ("--exclude", name)]
    kept += ["--layout", subject.layout] if subject.layout else []
    flags = ["--config", str(subject.file), *choice.flags()[2:]] if subject.keeps_file(choice) else choice.flags()
    words = ["quark", "onnx", "quantize", model, "-o", output, *flags, *subject.source, *subject.judged_on, *kept]
    return command_line(words)


def longer(subject: Subject, choice: Choice) -> str:
    """The command that has the time for all recipes, and for layers of more bits."""
    hardware, output = get_preset(choice.preset).hardware, subject.output
    static = Config(global_quant_config=choice.config()).compile().mode == "static"
    purpose = "npu" if "npu" in hardware else "cpu" if static else "size"
    place = output.with_name(f"{output.stem}.auto{output.suffix}")
    words = ["quark", "auto", str(subject.model), *subject.source, "--for", purpose, "-o", str(place)]
    words += [word for name in subject.exclude for word in ("--exclude", name)]
    words += [] if subject.libraries is None else ["--custom-ops", str(subject.libraries)]
    return f"try everything, with more bits where they help: {command_line(words)}"


def remedies(subject: Subject, lines: Iterable[Line], bench: Bench | None = None) -> list[str]:
    """What helps where a line other than accuracy is bad: a command, tried where samples are at hand and it is quick,
    or why there is none."""
    bad = {line.subject for line in lines if line.bad}
    return [_REMEDIES[name](subject, bench) for name in _REMEDIES if name in bad]


def _tried(choice: Choice, bench: Bench | None, times: float) -> Comparison | None:
    """What comes of a command that takes some ``times`` as long as the quantization; None where that is too long."""
    if bench is None or times > bench.attempts:
        return None
    return bench.of(choice, TIMED_ENDS)


def _told(found: Comparison | None, why: str) -> str:
    """What a command does, in words: its price too, where it was tried."""
    if found is None or not found.seconds:
        return f"({why}; not tried: accuracy may change)"
    judged = worst(found.outputs, found.answers)
    price = "" if judged is None else f", accuracy {LEVELS[judged.level]}, {judged.reason}"
    return f"({why}; tried: {found.seconds[FLOAT] / found.seconds[QUANTIZED]:.2f} times as fast as float{price})"


def _is_lost(found: Comparison | None) -> bool:
    judged = None if found is None else worst(found.outputs, found.answers)
    return judged is not None and judged.level == 0


def _faster(subject: Subject, bench: Bench | None = None) -> str:
    """Timing on this CPU, which ends in float where nothing is faster."""
    if subject.choice is None:  # only the files are known: the result goes beside them
        place = subject.output.with_name(f"{subject.output.stem}_timed{subject.output.suffix}")
        subject = replace(subject, choice=Choice("A8W8_CPU"), output=place)
    choice = subject.choice
    if choice is not None and "TuneSpeed" not in choice.options:
        job = Config(global_quant_config=choice.config()).compile()
        if job.runs_samples:
            tuned = _option(choice, "TuneSpeed", True)
            found = _tried(tuned, bench, QUICKER.times)
            faster = found is None or found.seconds[FLOAT] > found.seconds[QUANTIZED] * (1 + SAME)
            if faster and not _is_lost(found):
                return f"{command(subject, tuned)}   {_told(found, 'times the forms here')}"
    return "use the float model here: there is nothing to win in time"


def _option(choice: Choice, name: str, value: bool) -> Choice:
    return replace(choice, options={**choice.options, name: value})


def _smaller(subject: Subject, bench: Bench | None = None) -> str:
    """The weights alone, in 4 bits or in the preset's, where that is smaller than the float file: it is tried."""
    only = () if subject.choice is None else (_weights_only(subject.choice),)
    before, found = file_bytes(subject.model), {}
    worth = largest_constant(subject.model) > FEW
    for choice in (Choice("MATMUL_NBITS"), *only) if worth else ():
        try:
            proto = ModelQuantizer(subject.config(choice)).run(subject.model, None, None).proto
        except QuarkError:  # it has no such weights
            continue
        if proto is not None and proto.ByteSize() * (1 + SAME) < before:
            found[proto.ByteSize()] = choice
    if not found:
        return "use the float model where size matters: it has too few weights for codes and scales to save anything"
    return f"{command(subject, found[min(found)])}   (tried: {before / min(found):.1f} times smaller)"


def _weights_only(choice: Choice) -> Choice:
    """Without the timing of forms, which weights have no share in, and which needs samples."""
    options = {name: value for name, value in choice.options.items() if name != "TuneSpeed"}
    return replace(choice, options={**options, "WeightsOnly": True})


def _fast_forms(choice: Choice) -> bool:
    """Whether the command chooses already in which forms the CPU's kernels compute."""
    job = Config(global_quant_config=choice.config()).compile()
    return job.options.FasterForms is not None or on_cpu(job)


def _explained(subject: Subject, bench: Bench | None = None) -> str:
    """Arithmetic in float32 for a float16 model, whose Casts keep integer kernels away; of any other the reason of the
    layer that multiplies most among those in float."""
    choice = subject.choice
    if choice is not None and not _fast_forms(choice) and is_float16(load(subject.model)):
        inside, why = _option(choice, "FasterForms", True), "float32 inside a float16 model, for integer kernels"
        return f"{command(subject, inside)}   {_told(_tried(inside, bench, 1.0), why)}"
    left = any(REASON in told for told in decisions(load(subject.output)).values())
    if choice is not None and left and not subject.shares.stored:
        whole = _option(choice, "FloatWhereFaster", False)
        found = _tried(whole, bench, 1.0)
        words = "stay in float here" if _is_lost(found) else command(subject, whole)
        return f"{words}   {_told(found, 'integers all the same')}"
    first = [one.name for one in float_layers(subject.shares)[:1]]
    named = [name for name in first if brief(name) == name]  # without a name it lists every layer
    typed = ["quark", "onnx", "explain", str(subject.output), *named]
    return f"why layers stay in float: {command_line(typed)}"


#: What helps where a line is bad, by its subject.
_REMEDIES: Mapping[str, Callable[[Subject, Bench | None], str]] = {
    "speed": _faster,
    "size": _smaller,
    "coverage": _explained,
}
