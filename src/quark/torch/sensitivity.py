"""What each layer of a PyTorch model loses when it alone is quantized.

    kl       mean over positions of  Σ p log(p / q)  in nats, p, q: softmax of the first output along the last axis
    sqnr     of the worst output, dB; as a loss  Σ (x − y)² / Σ x²  summed over the outputs;  mse, cosine: likewise
    a function of the user's   |f(float model) − f(model with one layer quantized)|

``quark.torch.layer_runs`` calibrates a candidate once and switches single layers. With several workers every process
(joblib: loky, or a cluster) loads the model from its folder and takes some neighbouring layers at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import nn

from quark import parallel
from quark.dataclass import dataclass
from quark.errors import ConfigError, known
from quark.files.journal import Journal
from quark.files.private import private_folder
from quark.search.function import check_metric
from quark.search.refine import Alone, by_trials
from quark.search.target import SearchGoal
from quark.search.trials import (
    MEASURES,
    ONE_BY_ONE,
    Measured,
    Pair,
    TriedLayer,
    TriedModel,
    Trying,
    ranked,
)
from quark.search.values import FLOAT, Study, check_distinct
from quark.torch import one_pass
from quark.torch.config.model import QConfig
from quark.torch.config_file import check_candidate, split
from quark.torch.digest import digest_of_samples, identity_of_model
from quark.torch.export import gguf_size
from quark.torch.export.layout import layout_of
from quark.torch.export.shards import nbytes
from quark.torch.from_values import config_of
from quark.torch.language import load_model
from quark.torch.layer_runs import FloatOutputs, TorchLayerRuns, Traffic, lay_out, open_runs, traffic_of
from quark.torch.layers import own_parameter
from quark.torch.machine import MI300X, Machine, seconds_of
from quark.torch.matching import Match, bind, choose_all, find_candidates, is_excluded, match
from quark.torch.quantized_layer import OWN
from quark.torch.stage import Stages

#: Nothing is said of layers that stay float.
USUAL_LAYERS: Mapping[str, Sequence[str]] = {}
LLAMA = "llama.cpp"  # whose files have blocks of their own
TRIED = 2
"""Samples on which layers are tried that a plan rests on, where the others are estimated."""


@dataclass(frozen=True)
class Source:
    """A model: an object of this process, or the folder that each of several processes (workers) loads it from."""

    model: nn.Module | None = None
    folder: Path | None = None
    device: str = "cpu"
    trust_remote_code: bool = False
    workers: int = 1

    def load(self) -> nn.Module:
        """The model."""
        if self.model is not None:
            return self.model
        return load_model(known(self.folder, "the folder of the model"), self.device, self.trust_remote_code)


@dataclass(frozen=True)
class TorchSearchGoal(SearchGoal):
    """What a search of a torch model is asked for.

    Attributes:
        machine: of the latency, by its roofline.
        program: that will read the result: the sizes of its files count, and "vllm" wants layers that it fuses in one
            scheme.
    """

    machine: Machine = MI300X
    program: str | None = None


NO_USE = TorchSearchGoal()


@dataclass(frozen=True)
class TorchTrying(Trying):
    """How layers of a torch model are tried; ``device`` and the other are for one that is loaded from a folder."""

    device: str = "cpu"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Part:
    """Some layers under one candidate, the work of one process at a time."""

    source: Source
    values: str
    candidate: str
    common: FloatOutputs
    names: tuple[str, ...]
    metric: str

    def tried(self, runs: TorchLayerRuns) -> Iterator[tuple[Pair, Measured]]:
        """Every layer, as it is finished."""
        return (((name, self.candidate), runs.trial(name, self.metric)) for name in self.names)


def sensitivity(
    model: nn.Module | str | Path,
    samples: Iterable[Any],
    candidates: Sequence[str],
    left_float: Mapping[str, Sequence[str]] = USUAL_LAYERS,
    metric: str = "kl",
    trying: Trying = ONE_BY_ONE,
) -> Study:
    """The loss of every layer under every candidate, with only that layer quantized.

    Args:
        model: a float model, which is left as it was, or the folder of one.
        samples: of calibration and of the trials: tensors, mappings, tuples; a few are enough.
        candidates: schemes (``quark torch schemes``), with ``+gptq`` and the like behind for an algorithm; ``float``.
        left_float: names and globs of layers that stay float, under the keys of a configuration file: ``exclude``, in
            the place of the usual ones of a language model; ``also_exclude``, beside them.
        metric: a name in ``MEASURES``, or ``file.py:function``, called with the model.
        trying: how many at a time, and where finished trials are kept; a ``TorchTrying`` for a folder.

    Raises:
        ConfigError: a candidate or metric that cannot work, or a ledger of another model, data or configuration.
        ModelError, DataError: as ``ModelQuantizer.quantize_model``.
    """
    first_scheme(candidates)
    base = {"exclude": None, **{key: list(names) for key, names in left_float.items()}}
    source = source_of(model, trying)
    check_metric(metric, MEASURES)
    kept, loaded = list(samples), source.load()
    with private_folder() as folder, Journal.held(trying.ledger):
        common = lay_out(loaded, kept, folder)
        return ranked(trials_of(source, loaded, common, base, candidates), metric, trying)


def source_of(model: nn.Module | str | Path, trying: Trying) -> Source:
    """Where the model comes from.

    Raises:
        ConfigError: several workers, and a model that only this process has.
    """
    if isinstance(model, nn.Module):
        if trying.workers != 1:
            raise ConfigError(f"workers={trying.workers}: every process loads the model itself; give its folder")
        return Source(model)
    how = trying if isinstance(trying, TorchTrying) else TorchTrying(trying.workers)
    source = Source(None, Path(model).expanduser().resolve(), how.device, how.trust_remote_code, how.workers)
    return source if how.workers != 1 else Source(source.load())


def first_scheme(candidates: Sequence[str]) -> str:
    """The scheme of the first candidate that has one, after all are checked.

    Raises:
        ConfigError: an unknown scheme, one that is listed twice, or none.
    """
    names = [name for name in candidates if name != FLOAT]
    for name in names:
        check_candidate(name)
    check_distinct(candidates)
    if not names:
        raise ConfigError("no candidate quantizes")
    return split(names[0])[0]


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


# ---- trials ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerTrials(TriedModel):
    """The layers of a torch model.

    Attributes:
        source: of the model, for the processes that try.
        common: samples, and the float outputs for them.
        values: keys and values of the configuration that quantizes all layers under a candidate, by candidate.
        base: of the configuration that holds for the whole model.
    """

    USUAL = "kl"
    source: Source
    common: FloatOutputs
    values: Mapping[str, dict[str, Any]]
    base: Mapping[str, Any]

    def belongs(self) -> dict[str, str]:
        """As the base says."""
        told = {f"configuration: {key}": json.dumps(one, sort_keys=True, default=str) for key, one in self.base.items()}
        return {**identity_of_model(self.model), "data": digest_of_samples(self.common.samples), **told}

    def tried(self, pairs: Sequence[Pair], metric: str) -> Iterator[tuple[Pair, Measured]]:
        """As the base says; neighbours under one candidate stay together, the work of one process at a time."""
        left: dict[str, list[str]] = {}
        for name, candidate in pairs:
            left.setdefault(candidate, []).append(name)
        parts = []
        for candidate, names in left.items():
            size = len(names) if self.source.workers == 1 else -(-len(names) // (4 * self.source.workers))
            chosen = json.dumps(self.values[candidate], sort_keys=True)
            each = (tuple(names[start : start + size]) for start in range(0, len(names), size))
            parts += [Part(self.source, chosen, candidate, self.common, some, metric) for some in each]
        return results(parts, self.model, self.source.workers)

    def estimated(self, metric: str) -> tuple[Study, Alone]:
        """As the base says, by one backward pass (``quark.torch.one_pass``); trials on few samples measure."""
        configs = {name: config_of(chosen, self.model) for name, chosen in self.values.items()}
        layers = {name: [one.name for one in self.layers if name in one.costs] for name in configs}
        losses = one_pass.losses(self.model, self.common, configs, layers, metric)
        few = replace(self.common, samples=self.common.samples[:TRIED])
        brief = replace(self, common=few, source=Source(self.model), samples=len(few.samples))
        return by_trials(self, metric, losses, one_pass.runs(self.samples, len(configs)), brief)


def trials_of(
    source: Source,
    model: nn.Module,
    common: FloatOutputs,
    base: Mapping[str, Any],
    candidates: Sequence[str],
    use: TorchSearchGoal = NO_USE,
) -> LayerTrials:
    """The layers of a model that candidates quantize, those excepted that the configuration has decided about.

    Args:
        source, model: where it comes from, for the processes that try, and it, float.
        common: samples, and the float outputs for them.
        base: keys and values of the configuration that holds for the whole model.
        candidates: schemes, ``float``.
        use: of the result.
    """
    values = {name: values_of(model, base, name) for name in candidates if name != FLOAT}
    matches = {name: matched(model, chosen) for name, chosen in values.items()}
    known = {name: item for found in reversed(matches.values()) for name, item in found.items()}
    order = [*dict.fromkeys(name for found in matches.values() for name in found)]
    decided = base.get("layers") or {}
    free = [name for name in order if name not in decided and not any(fnmatchcase(name, one) for one in decided)]
    traffic = traffic_of(model, free, common.samples[0])
    layers = []
    for name in free:
        fits = [one for one in candidates if one == FLOAT or name in matches[one]]
        read = traffic.get(name, Traffic())
        costs = {c: costs_of(known[name], None if c == FLOAT else matches[c][name], read, use) for c in fits}
        layers.append(TriedLayer(name, type(known[name].layer.module).__name__.removeprefix("Quant"), costs))
    outputs = len(common.reference(0))
    return LayerTrials(layers, model, len(common.samples), outputs, source, common, values, base)


def matched(model: nn.Module, values: Mapping[str, Any]) -> dict[str, Match]:
    """The layers that a configuration quantizes, by name."""
    return {found.layer.name: found for found in match(model, config_of(values, model)).quantized}


def costs_of(item: Match, here: Match | None, traffic: Traffic, use: TorchSearchGoal) -> dict[str, float]:
    """Bytes of a layer's tensors in a file (of the program's format, if it is llama.cpp), bits that it reads, seconds
    by the roofline of the machine; ``here``: as it is quantized.
    """
    size = bits = 0.0
    widths: dict[str, float] = {}
    for slot in OWN:
        value = item.layer.module._parameters.get(slot)
        if value is None:
            continue
        stages = () if here is None else here.stages[slot]
        kept = float(value.element_size() * 8)
        widths[slot] = kept if not stages else float(stages[-1].format.bits)
        size += file_bytes(value, stages, use.program)
        bits += widths[slot] * value.numel()
    stages = () if here is None else here.stages["input_tensors"]
    width = own_parameter(item.layer.module).element_size() * 8.0 if not stages else float(stages[-1].format.bits)
    costs, moved = {"size": size, "bits": bits + width * traffic.inputs}, size + width * traffic.inputs / 8
    return {**costs, "latency": seconds_of(use.machine, moved, traffic.macs, max(widths["weight"], width))}


def file_bytes(value: torch.Tensor, stages: Stages, program: str | None) -> float:
    """Bytes of the stored tensors of one parameter: codes, scales, zero points; without stages, of its floats."""
    shape = tuple(value.shape)
    if program == LLAMA:
        return gguf_size.bytes_of(shape, stages)
    return float(sum(nbytes(*one) for one in layout_of(stages, shape).form().values()) if stages else value.nbytes)


def results(parts: Sequence[Part], model: nn.Module, workers: int) -> Iterator[tuple[Pair, Measured]]:
    """Layers under candidates, as they are finished."""
    if workers == 1 or parallel.shares_memory("processes"):  # threads would change one model at the same time
        for part in parts:
            runs = open_runs(model, config_of(json.loads(part.values), model), part.common)
            with closing(runs.undo):
                yield from part.tried(runs)
        return
    calls = (parallel.delayed(work, part) for part in parts)
    for found in parallel.results(calls, workers, "processes", ordered=False):
        yield from found


#: One part at a time changes the model of a process, whatever threads a worker process has.
_MODEL = Lock()


def work(part: Part) -> list[tuple[Pair, Measured]]:
    """One part, on the model of the worker process."""
    with _MODEL:
        return list(part.tried(kept_runs(part)))


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
