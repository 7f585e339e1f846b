"""Mixed precision of an ONNX model: which candidate each layer gets, so that a metric meets its target at least cost.

    sensitivities → integer programming → the whole plan quantized for real and measured → … → a configuration file

``quark.search`` decides; this module measures. A plan is a configuration with ``layers``: what is measured is what
``quark onnx quantize --config`` makes of the file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from quark.config.job import repeating
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.onnx import layer_runs
from quark.onnx.algorithms.samples import rereadable
from quark.onnx.config_file import config_of
from quark.onnx.data import Feed, samples_of
from quark.onnx.data_layout import as_reader, in_layout, looked_at
from quark.onnx.energy import macs_of, types_of
from quark.onnx.graph import model as files
from quark.onnx.kernel_times import with_latency
from quark.onnx.latency import quiet_seconds
from quark.onnx.layer_runs import FloatModelFiles, OnnxLayerRuns, open_runs
from quark.onnx.one_pass import planning
from quark.onnx.quantization.config.candidates import candidate
from quark.onnx.quantization.config.config import Config
from quark.onnx.quantization.config.tuners import split
from quark.onnx.quantizer import ModelQuantizer
from quark.search import parts
from quark.search.loop import question_of
from quark.search.loop import sums as sums_of
from quark.search.parts import Split
from quark.search.plan_file import base_values, question_words, write_found
from quark.search.plan_metric import PlanCosts, PlanMetric
from quark.search.solve import searched
from quark.search.target import Asked, SearchGoal, goal_of
from quark.search.trials import ONE_BY_ONE, Trying
from quark.search.values import Found, Study

Model = str | Path | onnx.ModelProto
ASKED = Asked(("sqnr", "psnr", "cosine", "mse", "kl"), "sqnr", "sqnr>=30", types_of)


@dataclass(frozen=True)
class FileMetric(PlanMetric):
    """The metric, and the costs, of a plan's file.

    Attributes:
        model: the float model.
        common: the data that plans are measured on.
        moved: inputs whose samples have their channels last in the prepared model.
        settings: what timing decided about a plan (``TuneSpeed``), which is timed once.
    """

    types = staticmethod(types_of)
    model: Model
    common: FloatModelFiles
    moved: frozenset[str]
    settings: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def priced(self, study: Study, budget: str) -> tuple[Study, str, PlanCosts | None]:
        """As the base says; seconds are measured, of layers and of whole plans."""
        if budget != "latency":
            return super().priced(study, budget)
        timed = with_latency(study, self.common, self.quantized)
        return timed, budget, partial(self.costs, timed)

    def macs(self, layers: Sequence[str]) -> Mapping[str, float]:
        """As the base says."""
        return macs_of(self.common)

    def costs(self, study: Study, plan: Mapping[str, str]) -> dict[str, float]:
        """The costs of a plan, with the seconds of the whole model: sums know nothing of borders between types."""
        feed = next(self.common.pairs())[0]
        before = self.ledger.number("float seconds", lambda: self.seconds({"float": self.common.model}, feed)["float"])
        ratio = self.ledger.number(self.key(plan, "seconds"), lambda: self.ratio(plan, feed))
        sums = sums_of(study, [plan[layer] for layer in study.layers])
        return {**sums, "latency": before * ratio}

    def ratio(self, plan: Mapping[str, str], feed: Feed) -> float:
        """Seconds of a plan's model over those of the float model, timed side by side."""
        with self.quantized(plan) as path:
            if path == str(self.common.model):
                return 1.0
            seconds = self.seconds({"float": self.common.model, "plan": Path(path)}, feed)
            return seconds["plan"] / seconds["float"]

    def seconds(self, models: Mapping[str, Path], feed: Feed) -> dict[str, float]:
        """Median seconds of models, timed side by side, with the user's own operators."""
        return quiet_seconds(models, feed, 1.0, libraries=self.common.job.options.UserCustomOpLibPath)

    def on(self, samples: Any, name: str) -> FileMetric:
        """The same on data of its own."""
        moved = samples_of(in_layout(samples, self.moved))
        common, data = layer_runs.lay_out(replace(self.common, data=name), moved)
        return replace(self, common=common, data=data)

    @contextmanager
    def quantized(self, plan: Mapping[str, str]) -> Iterator[str]:
        """The path of a plan's model; of the float model where the plan leaves everything as it is."""
        values = self.settled(in_order(plan))
        if values is None:
            yield str(self.common.model)
            return
        config = Config(config_of(values))
        config.global_quant_config.extra_options |= {"PrintSummary": False, **self.decided(plan)}
        with tempfile.TemporaryDirectory(dir=self.common.folder, ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "quantized.onnx"
            result = ModelQuantizer(config).run(self.model, path, looked_at(self.samples), lambda stage, done, of: None)
            self.settings[_key(plan)] = {**self.decided(plan), **repeating(result.plan)}
            yield str(path)

    def decided(self, plan: Mapping[str, str]) -> Mapping[str, Any]:
        """The options that timing an earlier model of the same plan decided."""
        return self.settings.get(_key(plan), {})

    def measures(self, model: str) -> Mapping[str, float]:
        """As the base says."""
        return self.common.measured(files.load(model), self.metric)


def search(
    model_input: Model,
    config: Mapping[str, Any] | str,
    samples: Any,
    candidates: Sequence[str],
    goal: SearchGoal | str,
    trying: Trying = ONE_BY_ONE,
) -> Found:
    """The cheapest plan that meets a target, or the most precise one within a limit; quantized for real and measured.

    No plan that was measured is better in all costs and in the metric. Where the target is out of reach, the plan that
    comes nearest comes back, and ``met`` is False.

    Args:
        model_input: the float model; it stays as it is.
        config: name of a preset, or keys and values of a configuration file; what holds for the whole model.
        samples: half of them calibrate and try single layers, a quarter chooses the plan, and a quarter, which decides
            nothing, says how good it is; of fewer than 4 samples none is set apart.
        candidates: what a layer may become.
        goal: what is asked for; a target such as ``sqnr>=30``.
        trying: how many layers at a time, and where finished trials and measurements are kept.

    Raises:
        ConfigError: an unknown name, a limit below the cheapest plan, or a ledger of something else.
        ModelError, DataError: as ``ModelQuantizer.quantize_model``.
    """
    values, asked = base_values(config, "preset"), goal_of(goal)
    if asked.estimate and asked.metric is not None:
        raise ConfigError("--estimate follows errors to the outputs: a function of your own needs whole models, trials")
    target, job = ASKED.target(asked, candidates), Config(config_of(values)).compile()
    reader, evaluation = as_reader(model_input, samples), as_reader(model_input, asked.evaluation)
    split = split_of(reader, evaluation, asked.metric is not None)
    settings: dict[str, Mapping[str, Any]] = {}
    with open_runs(model_input, job, candidates, split.fit, trying) as made:
        _check_bodies(made, asked.budget)
        question = question_of(asked, target, partial(planning, made))

        def plans(book: Journal) -> FileMetric:
            means = values, split.fit, target.metric, asked.metric, book, made.data
            return FileMetric(*means, model_input, made.common, made.moved, settings)

        found = searched(made, plans, split, question, trying)
    return replace(found, layers=in_order(found.layers), settings=settings.get(_key(found.layers), {}))


def _check_bodies(made: OnnxLayerRuns, budget: str) -> None:
    """Refuse, before any layer is tried, a budget that layers in bodies have no figures for."""
    inside = next((unit.name for unit in made.layers if made.common.place(unit.name)), None)
    if inside is not None and budget not in ("size", "bits"):
        told = "it is not told apart what layers in bodies of If and Loop take: use --budget size or --budget bits"
        raise ConfigError(f"--budget {budget}: {told} ({inside!r} is one)")


def _key(plan: Mapping[str, str]) -> str:
    """A plan's name, whatever the order of its layers."""
    return repr(sorted(plan.items()))


def split_of(samples: Any, evaluation: Any, function: bool) -> Split:
    """The samples of ``search`` in parts that are read when they are needed; ``function``: one of the user's judges."""
    if function:
        return parts.split_of(samples, None, True)
    if evaluation is not None:
        return parts.split_of(rereadable(samples), samples_of(rereadable(evaluation)), False)
    return parts.split_of(None if samples is None else samples_of(rereadable(samples)), None, False)


def in_order(layers: Mapping[str, str]) -> dict[str, str]:
    """The layers of a plan, the most precise last: later lines win where two layers share a tensor, so that none gets
    less than it asks for."""
    return dict(sorted(layers.items(), key=lambda item: _precision(item[1])))


def _precision(name: str) -> tuple[float, float]:
    """Bits of inputs and of weights."""
    layer = candidate(split(name)[0])
    if layer is None:
        return float("inf"), float("inf")
    bits = [float("inf") if spec is None else float(spec.row.bits) for spec in (layer.inputs, layer.weight)]
    return bits[0], bits[1]


def save_plan(path: Path, config: Mapping[str, Any] | str, found: Found, target: str | None, budget: str) -> None:
    """Write a plan as a configuration file that ``quark onnx quantize --config`` reads.

    Args:
        path: ends in .yaml, .yml or .json.
        config: as of ``search``.
        found: what it returned.
        target, budget: what was asked for, for the reader of the file.
    """
    values, asked = base_values(config, "preset"), question_words(target, budget)
    options = {**(values.get("options") or {}), **found.settings}
    values |= {"options": options} if options else {}
    how = (
        "Lines under layers: a preset or two data types (uint8/int4@32), with +adaround and the like behind, or float.",
        "Later lines win where layers share a tensor. Edit them, and run:",
        "quark onnx quantize MODEL -o OUT --config THIS_FILE --data SAMPLES",
    )
    asked_for = {"target": target or asked, "budget": budget}
    write_found(path, {**values, "found": asked_for}, found, asked, how)
