"""Automatic mixed precision: which layers get the other precision, decided on the calibration data.

    score(layer)   metric of the whole quantized model in which only this layer has the target's precision
    the least harmful layers are chosen, as many as the metric of the model with all of them allows: a search
    (``quark.search.loop``) among plans in which every layer costs the same, measured in a few steps

Runs on the transformed float model, before placement: the result is one rule more, of the lowest rank, so that layers
that the configuration names keep what it says. Scales are those of calibration, before fine-tuning.

Not handled: bodies of If and Loop; choices that are not the first so many layers of the ranking.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from quark import parallel
from quark.config.job import Job, for_target
from quark.config.rules import NodeInfo, Rule, Rules
from quark.config.tensor import LayerSpec
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.ir.surgery import name_of
from quark.measure.outputs import metric_of
from quark.onnx import fingerprint, layer_runs
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.mixed import Mixed
from quark.onnx.algorithms.trial import Trials
from quark.onnx.data import Samples
from quark.onnx.layer_runs import MODEL, FloatModelFiles
from quark.onnx.qdq import slots
from quark.onnx.qdq.modes import MODES
from quark.onnx.qdq.op_rules import OP_RULES
from quark.onnx.qdq.selection import known_nodes
from quark.onnx.quantization.config.config import merged_layer, with_options
from quark.onnx.quantization.config.mixprecision import AutoMixprecisionConfig
from quark.onnx.ranges import samples_of
from quark.onnx.scratch import Scratch
from quark.search.changes import chosen_of, pairs_of, ranked
from quark.search.function import digest_of, load_function, number_of
from quark.search.loop import LOSS_OF
from quark.search.trials import Measured, Pair, all_measured
from quark.search.values import Trial, plan_key

SOURCE = "auto_mixprecision"
#: From a metric to what adds up over layers.
LOSSES = {"l2": lambda value: value * abs(value), "sqnr": LOSS_OF["sqnr"], "psnr": LOSS_OF["psnr"]}
log = logging.getLogger(__name__)


def mix(model: ir.Model, context: JobContext, config: AutoMixprecisionConfig) -> Mixed:
    """Decide which layers get the target's precision.

    Args:
        model: the prepared and transformed float model; comes back unchanged.
        context: the job, the data, finished work, the nodes that the user may name.

    Raises:
        ConfigError: a field that does not fit the model, or nothing that could be chosen.
        DataError: there is no data, and something has to be measured.
    """
    if context.job.mode != "static":
        raise ConfigError(f"AutoMixprecisionConfig is for static quantization, not for the mode {context.job.mode!r}")
    options, known = context.job.options, context.known
    if config.dual_quant_nodes:
        options = options.changed({"EnableDualQuantNodePairs": True})
    job = replace(context.job, options=options)
    _check_output(model, config)
    layers = tuple(None if one is None else _layer(one, job) for one, _ in config.targets())
    found = tuple(_candidates(model, job, config, known))
    pairs = [(name, str(target)) for name, _, targets in found for target in targets]
    if not found:
        sentence = f"no quantized layer may be chosen (target_op_type: {', '.join(config.target_op_type)})"
        if config.include_layers or config.subgraph_json or config.target_op_type != type(config)().target_op_type:
            raise ConfigError(f"AutoMixprecisionConfig: {sentence}")
        log.warning("mixed precision: %s; all tensors have the one data type", sentence)
        return Mixed(job)
    groups = {name: members for name, members, _ in found}
    decider = _Decider(model, job, config, layers, context, Trials(model, context), groups)
    if not needs_data(config):
        scores = [Trial(name, "", target, 0.0) for name, target in pairs]
        return decider.decided(scores, scores, None)
    try:
        return decider.measured(pairs)
    finally:
        layer_runs.opened.cache_clear()


def _check_output(model: ir.Model, config: AutoMixprecisionConfig) -> None:
    number, outputs = config.metric_output_index, [name_of(value) for value in model.graph.outputs]
    if number >= len(outputs):
        raise ConfigError(
            f"AutoMixprecisionConfig: metric_output_index is {number}, and the model has the outputs {outputs}"
        )


def foreseen(model: ir.Model, job: Job, known: Sequence[NodeInfo], config: AutoMixprecisionConfig) -> Job:
    """The job as ``mix`` will make it, where that can be told without data; otherwise as it is."""
    if needs_data(config):
        return job
    with Scratch(job.options) as scratch:
        context = JobContext(job, None, scratch, Journal(), lambda stage, done, total: None, known)
        return mix(model, context, config).job


def needs_data(config: AutoMixprecisionConfig) -> bool:
    """Whether anything has to be measured: not where all candidates get the one target."""
    return config.metric_threshold != 0 or len(config.targets()) > 1 or config.sensitivity_cache_file is not None


def _layer(one: Any, job: Job) -> LayerSpec | None:
    if isinstance(one, LayerSpec):
        return with_options(one, job.options)
    return merged_layer(one, job.rules.default, job.options)


# ---- what may be chosen ----------------------------------------------------------------------------------------------


def _candidates(
    model: ir.Model, job: Job, config: AutoMixprecisionConfig, known: Sequence[NodeInfo]
) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """Layers or subgraphs, in the order of the graph, those that share a weight together: their name, their nodes, the
    targets that they may get."""
    plan = MODES["static"].place(model.clone(), job, known)
    nodes, infos = {name_of(node): node for node in model.graph}, known_nodes(model)
    free = [n for n, one in plan.nodes.items() if one.quantized and one.reason == "global_config" and n in nodes]
    allowed = [_selected(names, infos, known) for _, names in config.targets()]
    for name, members in _groups(free, nodes, config, infos, known):
        targets = tuple(i for i, names in enumerate(allowed) if names is None or set(members) <= names)
        if members and targets:
            yield name, members, targets


def _groups(
    free: list[str],
    nodes: Mapping[str, ir.Node],
    config: AutoMixprecisionConfig,
    infos: list[NodeInfo],
    known: Sequence[NodeInfo],
) -> Iterator[tuple[str, tuple[str, ...]]]:
    if config.subgraph_json is not None:
        for name, subgraph in config.subgraphs():
            inside = _matched((subgraph,), infos, known, "subgraph_json")
            yield name, tuple(node for node in free if node in inside)
        return
    wanted = [name for name in free if nodes[name].op_type in config.target_op_type]
    for field, stays in (("include_layers", True), ("exclude_layers", False)):
        if (selectors := getattr(config, field)) is not None:
            found = _matched(tuple(selectors), infos, known, field)
            wanted = [name for name in wanted if (name in found) == stays]
    groups: dict[str, list[str]] = {}
    for name in wanted:
        groups.setdefault(_weight_of(nodes[name]) if config.shared_param_mode == "propagate" else name, []).append(name)
    yield from ((members[0], tuple(members)) for members in groups.values())


def _weight_of(node: ir.Node) -> str:
    """What tells layers of different weights apart: the name of the weight, or of the layer."""
    rule = OP_RULES.get(node.op_type)
    weight = None if rule is None else slots.weight_input(node, rule)
    return f"layer {node.name}" if weight is None else f"weight {weight.name}"


def _matched(selectors: tuple[Any, ...], now: list[NodeInfo], known: Sequence[NodeInfo], field: str) -> set[str]:
    """Names of the nodes that selectors find; an error where one finds none."""
    rules = Rules(LayerSpec(), (Rule(selectors, None, f"AutoMixprecisionConfig: {field}"),))
    return {name for name, decision in rules.bind(now, known).items() if decision.layer is None}


def _selected(names: tuple[str, ...] | None, now: list[NodeInfo], known: Sequence[NodeInfo]) -> set[str] | None:
    """The nodes of a target's operator types and layer names."""
    if names is None:
        return None
    kinds = {name for name in names if name in OP_RULES}
    layers = tuple(name for name in names if name not in OP_RULES)
    found = _matched(layers, now, known, "target_layer_config") if layers else set()
    return found | {info.name for info in now if info.op_type in kinds}


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class _Decider:
    """Makes and measures models with some layers in a target's precision."""

    model: ir.Model
    job: Job
    config: AutoMixprecisionConfig
    layers: tuple[LayerSpec | None, ...]
    context: JobContext
    trials: Trials
    groups: Mapping[str, tuple[str, ...]]
    reference: float | None = None

    def job_of(self, chosen: Sequence[Pair]) -> Job:
        """The job with layers in their targets' precision; entries of the configuration come later and win."""
        own = self.config.no_input_qdq_shared
        rules = []
        for number, layer in enumerate(self.layers):
            names = tuple(node for name, target in chosen if target == str(number) for node in self.groups[name])
            rules.append(Rule(names, layer, SOURCE, strict=False, inputs=layer is None, own_inputs=own))
        return for_target(self.job.ruled(rule for rule in rules if rule.selectors))

    def decided(self, scores: Sequence[Trial], chosen: Sequence[Trial], metric: float | None) -> Mixed:
        """The result, told in the log."""
        log.info("automatic mixed precision: %d of %d candidates are chosen", len(chosen), len(scores))
        names = tuple(one.layer for one in chosen)
        job = self.job_of(pairs_of(chosen))
        return Mixed(job, tuple(scores), names, metric, _metric_name(self.config), self.groups)

    def measured(self, pairs: Sequence[Pair]) -> Mixed:
        """Score the candidates, rank them, and choose."""
        common, data = self._common()
        if self.context.journal:
            self.context.journal.same("the samples of mixed precision", data.encode())
        ledger = self._ledger(data)
        self.quantized(())
        for number in range(len(self.layers)):  # the ranges of all trials are found before any of them
            self.quantized([pair for pair in pairs if pair[1] == str(number)])

        def measure(left: Sequence[Pair]) -> Iterator[tuple[Pair, Measured]]:
            calls = (parallel.delayed(self._metric, [pair], common) for pair in left)
            values = parallel.in_threads(calls, self.config.worker_num)
            return ((pair, {"value": value}) for pair, value in zip(left, values, strict=True))

        told = partial(self.context.progress, SOURCE)
        found = all_measured(pairs, self.config.metric_default, ledger, measure, told).items()
        scores = ranked([Trial(name, "", target, self._loss(one["value"]), one) for (name, target), one in found])

        def value(chosen: Sequence[Pair]) -> float:
            names, targets = [name for name, _ in chosen], [target for _, target in chosen]
            key = plan_key(names, targets, _metric_name(self.config), data)
            return ledger.number(key, lambda: self._metric(chosen, common))

        many = self.config.metric_optimize_object == "speed"
        chosen = chosen_of(scores, value, self._loss, self.config.metric_threshold, many)
        if not chosen.met:
            words = _metric_name(self.config), chosen.value, self.config.metric_threshold
            log.warning("automatic mixed precision: %s is %g and does not reach %g", *words)
        return self.decided(scores, chosen.trials, chosen.value)

    def _loss(self, value: float) -> float:
        """The metric as what adds up over layers, where it is one of ours; what is no number is the worst."""
        return math.inf if math.isnan(value) else LOSSES.get(_metric_name(self.config), float)(value)

    def _metric(self, chosen: Sequence[Pair], common: FloatModelFiles) -> float:
        """The metric of the model with some layers in their targets' precision; of the user's figure of merit how far
        it is from the float model's."""
        model = self.quantized(chosen)
        if self.config.metric_evaluate_fn is not None:
            call = _loaded(self.config.metric_evaluate_fn)
            if self.reference is None:
                self.reference = number_of(call(str(common.model)), "metric_evaluate_fn")
            return abs(number_of(common.called(model, call), "metric_evaluate_fn") - self.reference)
        runner, name = common.runner(model), common.outputs[0]
        pairs = ((reference[name], runner.run(feed).values[name]) for feed, reference in common.pairs())
        function = self.config.metric_distance_fn
        if function is not None:
            call = _loaded(function)
            return float(np.mean([number_of(call(x, y), "metric_distance_fn") for x, y in pairs]))
        return metric_of(self.config.metric_default, pairs)

    def quantized(self, chosen: Sequence[Pair]) -> ir.Model:
        """The model with some layers in their targets' precision, before any fine-tuning."""
        return self.trials.quantized(self.job_of(chosen))

    def _common(self) -> tuple[FloatModelFiles, str]:
        """The float model, the samples and the float output in a folder, and a digest of the data."""
        output = name_of(self.model.graph.outputs[self.config.metric_output_index])
        folder = self.context.scratch.folder("automatic mixed precision").resolve()
        ir.save(self.model.clone(), folder / MODEL, external_data=f"{MODEL}.data")
        options = self.job.options
        samples = samples_of(self.model, options, self.context.reader)
        if self.config.data_size:
            samples = Samples(samples, self.config.data_size)
        return layer_runs.lay_out(FloatModelFiles(folder, SOURCE, (output,), 0, self.job), samples)

    def _ledger(self, data: str) -> Journal:
        """Finished measurements, in the file of the configuration or with all else that is finished; what only says
        which of them are wanted does not count."""
        path = self.config.sensitivity_cache_file
        if path is None:
            return self.context.journal
        fields: dict[str, Any] = {"metric_threshold": 0, "metric_optimize_object": "speed", "worker_num": 1}
        config = replace(self.config, sensitivity_cache_file=None, **fields)
        words = fingerprint.of_job(replace(self.job, algorithms=(config,)))
        functions = [self.config.metric_distance_fn, self.config.metric_evaluate_fn]
        written = [digest_of(one) for one in functions if isinstance(one, str)]
        model = fingerprint.of_model(self.model)
        return Journal(path, {"model": model, "data": data, "functions": " ".join(written), **words})


def _metric_name(config: AutoMixprecisionConfig) -> str:
    if config.metric_evaluate_fn is not None:
        return "distance of metric_evaluate_fn"
    return config.metric_default if config.metric_distance_fn is None else "metric_distance_fn"


def _loaded(function: Any) -> Callable[..., Any]:
    return load_function(function, "AutoMixprecisionConfig") if isinstance(function, str) else function
