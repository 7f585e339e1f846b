"""What each layer of a PyTorch model loses when it alone is quantized.

    kl       mean over positions of  Σ p log(p / q)  in nats, p, q: softmax of the first output along the last axis
    sqnr     of the worst output, dB; as a loss  Σ (x − y)² / Σ x²  summed over the outputs;  mse, cosine: likewise
    a function of the user's   |f(float model) − f(model with one layer quantized)|

``quark.torch.layer_runs`` calibrates a candidate once and switches single layers. With several workers every process
(joblib: loky, or a cluster) loads the model from its folder and takes some neighbouring layers at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import nn

from quark import parallel
from quark.dataclass import dataclass
from quark.errors import ConfigError, known
from quark.files.journal import Journal
from quark.files.private import private_folder
from quark.measure.outputs import loss_name
from quark.search.function import check_metric, digest_of
from quark.search.refine import FEWER, Alone, affordable
from quark.search.trials import (
    Measured,
    Pair,
    Progress,
    all_measured,
    by_function,
    loss_of,
    of_float,
    say_if_first,
    shown,
)
from quark.search.values import FLOAT, Study, Trial, check_distinct
from quark.torch import one_pass
from quark.torch.config.model import QConfig
from quark.torch.config_file import check_candidate, config_of, split
from quark.torch.digest import digest_of_samples, identity_of_model
from quark.torch.export import gguf_size
from quark.torch.export.layout import layout_of
from quark.torch.language import load_model
from quark.torch.layer_runs import FloatOutputs, TorchLayerRuns, Traffic, lay_out, open_runs, running, traffic_of
from quark.torch.layers import own_parameter
from quark.torch.machine import MI300X, Machine, seconds_of
from quark.torch.matching import Match, bind, choose_all, find_candidates, is_excluded, match
from quark.torch.quantized_layer import OWN
from quark.torch.stage import Stages

LLAMA = "llama.cpp"  # whose files have blocks of their own
MEASURES = ("kl", "sqnr", "mse", "cosine")
TRIED = 2
"""Samples on which layers are tried that a plan rests on, where the others are estimated."""


@dataclass(frozen=True)
class Source:
    """A model: an object of this process, or the folder that every process loads it from."""

    model: nn.Module | None = None
    folder: Path | None = None
    device: str = "cpu"
    trust_remote_code: bool = False

    def load(self) -> nn.Module:
        """The model."""
        if self.model is not None:
            return self.model
        return load_model(known(self.folder, "the folder of the model"), self.device, self.trust_remote_code)


@dataclass(frozen=True)
class Part:
    """Some layers under one candidate, the work of one process at a time."""

    source: Source
    values: str
    candidate: str
    common: FloatOutputs
    names: tuple[str, ...]
    metric: str


def sensitivity(
    model: nn.Module | str | Path,
    samples: Iterable[Any],
    candidates: Sequence[str],
    exclude: Sequence[str] | None = None,
    metric: str = "kl",
    workers: int = 1,
    ledger: str | Path | None = None,
    progress: Progress | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    also_exclude: Sequence[str] = (),
) -> Study:
    """The loss of every layer under every candidate, with only that layer quantized.

    Args:
        model: a float model, which is left as it was, or the folder of one.
        samples: of calibration and of the trials: tensors, mappings, tuples; a few are enough.
        candidates: schemes (``quark torch schemes``), with ``+gptq`` and the like behind for an algorithm; ``float``.
        exclude: names and globs of layers that stay float; ``None``: the usual ones of a language model.
        metric: a name in ``MEASURES``, or ``file.py:function``, called with the model.
        workers: processes; more than one need the model as a folder.
        ledger: a JSON file that finished trials are kept in; a run that was killed goes on with it.
        progress: called with the number of finished trials and of all.
        device, trust_remote_code: for a model that is loaded from a folder.
        also_exclude: layers that stay float beside those of ``exclude``.

    Raises:
        ConfigError: a candidate or metric that cannot work, or a ledger of another model, data or configuration.
        ModelError, DataError: as ``ModelQuantizer.quantize_model``.
    """
    base = {"scheme": first_scheme(candidates), "exclude": None if exclude is None else list(exclude)}
    base |= {"also_exclude": list(also_exclude)} if also_exclude else {}
    source = source_of(model, workers, device, trust_remote_code)
    check_metric(metric, MEASURES)
    kept, loaded = list(samples), source.load()
    with private_folder() as folder, Journal.held(ledger):
        left_float = {key: value for key, value in base.items() if key != "scheme"}
        book = open_ledger(ledger, loaded, kept, left_float, metric)
        common = lay_out(loaded, kept, folder)
        found = LayerTrials(source, loaded, common, base, metric, book, workers, progress).study(candidates)
        book.settle()
        return found


def source_of(model: nn.Module | str | Path, workers: int, device: str, remote: bool) -> Source:
    """Where the model comes from.

    Raises:
        ConfigError: several workers, and a model that only this process has.
    """
    if isinstance(model, nn.Module):
        if workers != 1:
            raise ConfigError(f"workers={workers}: every process loads the model itself; give its folder")
        return Source(model)
    source = Source(None, Path(model), device, remote)
    return source if workers != 1 else Source(source.load())


def first_scheme(candidates: Sequence[str]) -> str:
    """The scheme of the first candidate that has one, after all are checked.

    Raises:
        ConfigError: an unknown scheme, one that is listed twice, or none.
    """
    names = [split(name)[0] for name in candidates if name != FLOAT]
    for name in candidates:
        if name != FLOAT:
            check_candidate(name)
    check_distinct(candidates)
    if not names:
        raise ConfigError("no candidate quantizes")
    return names[0]


def values_of(model: nn.Module, base: Mapping[str, Any], candidate: str) -> dict[str, Any]:
    """Keys and values of a configuration that quantizes every layer that a candidate fits."""
    name, algorithms = split(candidate)
    kept = {key: base.get(key) for key in ("exclude", "also_exclude")}
    values = {**kept, "scheme": name, "algorithms": algorithms or None}
    return {**values, "layers": dict.fromkeys(unfit(model, config_of(values, model)), FLOAT)}


def unfit(model: nn.Module, config: QConfig) -> Iterator[str]:
    """Layers whose tensors a configuration does not fit: groups that do not divide an axis, and the like."""
    for layer in find_candidates(model):
        if is_excluded(layer, config):
            continue
        found, source = choose_all(layer, config)
        try:
            _ = None if found is None else bind(layer, found, source, False)
        except ConfigError:
            yield layer.name


# ---- ledgers ---------------------------------------------------------------------------------------------------------


def open_ledger(
    path: str | Path | None, model: nn.Module, samples: Sequence[Any], base: Mapping[str, Any], metric: str
) -> Journal:
    """The ledger of a study; refused where it belongs to another one."""
    if path is None:
        return Journal(None, {})
    own = {
        **identity_of_model(model),
        "data": digest_of_samples(samples),
        "metric": digest_of(metric) if ":" in metric else metric,
        **{f"configuration: {key}": json.dumps(value, sort_keys=True, default=str) for key, value in base.items()},
    }
    return Journal(path, own)


# ---- trials ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerTrials:
    """Layers that are tried alone.

    Attributes:
        source: of the model, for the processes that try.
        model: it, float.
        common: samples, and the float outputs for them.
        base: keys and values of the configuration that holds for the whole model.
        metric: what the layers are ranked by.
        ledger: where finished trials are kept.
        workers: processes.
        progress: called with the number of finished trials and of all.
        machine: of the latency.
        program: that will read the files whose size counts.
    """

    source: Source
    model: nn.Module
    common: FloatOutputs
    base: Mapping[str, Any]
    metric: str
    ledger: Journal
    workers: int = 1
    progress: Progress | None = None
    machine: Machine = MI300X
    program: str | None = None

    def study(self, candidates: Sequence[str], estimate: bool = False) -> Study:
        """All trials, finished ones from the ledger; or estimates by one backward pass (``quark.torch.one_pass``)."""
        start, model = time.perf_counter(), self.model
        say_if_first(self.metric, len(self.common.reference(0)))
        values = {name: values_of(model, self.base, name) for name in candidates if name != FLOAT}
        layers = {name: matched(model, chosen) for name, chosen in values.items()}
        order = list(dict.fromkeys(name for found in layers.values() for name in found))
        traffic = traffic_of(model, order, self.common.samples[0])
        reference = of_float(self.metric, model)
        pairs = [(name, c) for c, matches in layers.items() for name in matches]
        known = self.estimated(values, {name: list(one) for name, one in layers.items()}) if estimate else {}
        found = self.measured(pairs, values, known)
        made = []
        for name in order:
            item = next(matches[name] for matches in layers.values() if name in matches)
            for c in candidates:
                if c == FLOAT or name in layers[c]:
                    measured, here = (reference, None) if c == FLOAT else (found[name, c], layers[c][name])
                    costs = costs_of(item, here, traffic.get(name, Traffic()), self.machine, self.program)
                    loss = loss_of(measured, self.metric, reference.get("value", 0.0))
                    made.append(Trial(name, kind_of_layer(item), c, loss, dict(measured), costs))
        return Study(tuple(made), shown(self.metric), len(self.common.samples), time.perf_counter() - start)

    def alone(self, found: Study) -> Alone:
        """Who measures what the plan of an estimated study rests on: trials on few samples."""
        pairs, samples = sum(one.candidate != FLOAT for one in found.trials), len(self.common.samples)
        spent = one_pass.runs(samples, sum(name != FLOAT for name in found.candidates))
        each = min(TRIED, samples)
        allowed, few = pairs * samples / FEWER, pairs // FEWER
        return Alone(self.losses, lambda done: affordable(allowed, spent, done * each, each, few, done))

    def losses(self, pairs: Sequence[Pair]) -> list[float]:
        """The losses of layers under candidates on few samples, in their order."""
        few = replace(self.common, samples=self.common.samples[:TRIED])
        values = {c: values_of(self.model, self.base, c) for c in dict.fromkeys(c for _, c in pairs)}
        brief = replace(self, common=few, ledger=Journal(None, {}), workers=1, progress=None)
        found = brief.measured(pairs, values)
        return [found[pair][loss_name(self.metric)] for pair in pairs]

    def estimated(self, values: Mapping[str, dict[str, Any]], layers: Mapping[str, list[str]]) -> dict[Pair, Measured]:
        """The losses by one backward pass."""
        configs = {name: config_of(chosen, self.model) for name, chosen in values.items()}
        key = "kl" if self.metric == "kl" else "noise"
        losses = one_pass.losses(self.model, self.common, configs, layers, self.metric)
        return {place: {key: loss} for place, loss in losses.items()}

    def measured(
        self, pairs: Sequence[Pair], values: Mapping[str, dict[str, Any]], known: Mapping[Pair, Measured] | None = None
    ) -> dict[Pair, Measured]:
        """What was measured of all pairs; ``values``: of each candidate, ``known``: of pairs that need no trial."""

        def tried(pairs: Sequence[Pair]) -> Iterator[tuple[Pair, Measured]]:
            left: dict[str, list[str]] = {}
            for name, candidate in pairs:
                left.setdefault(candidate, []).append(name)
            parts = [part for c, names in left.items() for part in self.parts(c, values[c], names)]
            for part, name, measured in results(parts, self.model, self.workers):
                yield (name, part.candidate), measured

        return all_measured(pairs, self.metric, self.ledger, tried, self.progress, known)

    def parts(self, candidate: str, chosen: Mapping[str, Any], names: Sequence[str]) -> Iterator[Part]:
        """The work in parts that processes take one after the other; neighbours stay together."""
        size = len(names) if self.workers == 1 else max(1, -(-len(names) // (4 * self.workers)))
        values = json.dumps(chosen, sort_keys=True)
        for start in range(0, len(names), max(size, 1)):
            yield Part(self.source, values, candidate, self.common, tuple(names[start : start + size]), self.metric)


def matched(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Match]:
    """The layers that a configuration quantizes, by name."""
    return {found.layer.name: found for found in match(model, config_of(values, model)).quantized}


def kind_of_layer(item: Match) -> str:
    """What a layer is called by its class."""
    return type(item.layer.module).__name__.removeprefix("Quant")


def costs_of(
    item: Match, here: Match | None, traffic: Traffic, machine: Machine, program: str | None = None
) -> dict[str, float]:
    """Bytes of a layer's tensors in a file (of the program's format, if it is llama.cpp), bits that it reads, seconds
    by the roofline of ``machine``.
    """
    size = bits = 0.0
    widths: dict[str, float] = {}
    for slot in OWN:
        value = item.layer.module._parameters.get(slot)
        if value is None:
            continue
        stages = () if here is None else here.stages[slot]
        kept = float(value.element_size() * 8)
        widths[slot] = kept if not stages else bits_of(stages[-1])
        size += kept_bytes(value, program) if not stages else file_bytes(stages, tuple(value.shape), program)
        bits += widths[slot] * value.numel()
    stages = () if here is None else here.stages["input_tensors"]
    width = own_parameter(item.layer.module).element_size() * 8.0 if not stages else bits_of(stages[-1])
    costs, moved = {"size": size, "bits": bits + width * traffic.inputs}, size + width * traffic.inputs / 8
    return {**costs, "latency": seconds_of(machine, moved, traffic.macs, max(widths["weight"], width))}


def bits_of(stage: Any) -> float:
    """Bits per value of a stage, shares of block scales included."""
    return float(stage.format.bits)


def kept_bytes(value: torch.Tensor, program: str | None) -> float:
    """Bytes of a parameter that stays float."""
    return gguf_size.bytes_of(tuple(value.shape), ()) if program == LLAMA else float(value.nbytes)


def file_bytes(stages: Stages, shape: tuple[int, ...], program: str | None) -> float:
    """Bytes of the stored tensors of one parameter: codes, scales, zero points."""
    if program == LLAMA:
        return gguf_size.bytes_of(shape, stages)
    form = layout_of(stages, shape).form()
    return float(sum(int(np.prod(size, dtype=np.int64)) * kind.itemsize for size, kind in form.values()))


def results(parts: Sequence[Part], model: nn.Module, workers: int) -> Iterator[tuple[Part, str, Measured]]:
    """(part, layer, measures), as they are finished."""
    if workers == 1 or parallel.shares_memory("processes"):  # threads would change one model at the same time
        for part in parts:
            runs = open_runs(model, config_of(json.loads(part.values), model), part.common)
            try:
                yield from ((part, name, one_trial(runs, name, part.metric)) for name in part.names)
            finally:
                runs.undo.close()
        return
    calls = (parallel.delayed(work, part, number) for number, part in enumerate(parts))
    done = parallel.results(calls, workers, "processes", ordered=False)
    for number, found in done:
        yield from ((parts[number], name, measured) for name, measured in found.items())


#: One part at a time changes the model of a process, whatever threads a worker process has.
_MODEL = Lock()


def work(part: Part, number: int) -> tuple[int, dict[str, Measured]]:
    """One part, on the model of the worker process."""
    with _MODEL:
        runs = kept_runs(part)
        return number, {name: one_trial(runs, name, part.metric) for name in part.names}


#: The runs of a worker process, by where they come from; the last ones stay for the parts that follow.
_RUNS: dict[tuple[Source, str, Path], TorchLayerRuns] = {}


def kept_runs(part: Part) -> TorchLayerRuns:
    """The runs of a worker process for a part."""
    key = part.source, part.values, part.common.folder
    if key not in _RUNS:
        _RUNS.clear()
        model = part.source.load()
        _RUNS[key] = open_runs(model, config_of(json.loads(part.values), model), part.common)
    return _RUNS[key]


def one_trial(runs: TorchLayerRuns, name: str, metric: str) -> Measured:
    """Quantize one layer, and measure."""
    if ":" not in metric:
        return runs.trial(name)
    layer = runs.layers[name]
    runs.switch(name, layer, True)
    try:
        with running(runs.model):
            return by_function(metric, runs.model)
    finally:
        runs.switch(name, layer, False)
