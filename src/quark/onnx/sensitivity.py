"""What each layer of an ONNX model loses when it alone is quantized.

    noise, kl   how far the outputs are from those of the float model (``quark.measure.outputs``)
    a function of the user's   |f(float model) − f(model with one layer quantized)|

The calibration runs once for all candidates; see ``quark.onnx.layer_runs``. Trials are divided over threads, or over
what joblib is set to (``joblib.parallel_config``): processes, or a cluster that sees ``TmpDir``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quark import parallel
from quark.config.job import Job
from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.onnx import fingerprint, layer_runs
from quark.onnx.config_file import config_of
from quark.onnx.data_layout import as_reader
from quark.onnx.graph import model as files
from quark.onnx.layer_runs import FloatModelFiles, OnnxLayerRuns
from quark.onnx.layer_units import Tensors, Unit
from quark.onnx.quantization.config.config import Config, QuantizationConfig
from quark.onnx.quantization.config.tuners import split
from quark.onnx.scratch import Scratch
from quark.search.function import check_metric, digest_of
from quark.search.trials import Measured, Pair, Progress, all_measured, by_function, loss_of, of_float, say_if_first
from quark.search.values import FLOAT, Study, Trial

#: Measures that need no function; each is also a loss, in which ``sqnr`` and ``cosine`` are the noise.
MEASURES = ("sqnr", "mse", "cosine", "kl")
Task = tuple[Unit, str]
Settings = Config | QuantizationConfig | Mapping[str, Any] | str


def sensitivity(
    model_input: files.ModelInput,
    config: Settings,
    samples: Any,
    candidates: Sequence[str] | None = None,
    metric: str = "sqnr",
    workers: int = 1,
    ledger: str | Path | None = None,
    progress: Progress | None = None,
) -> Study:
    """The loss of every layer under every candidate, with only that layer quantized.

    Args:
        model_input: the float model; it stays as it is.
        config: of the whole model: the name of a preset, keys and values of a configuration file
            (``quark.onnx.config_file``), or what ``get_default_config`` gives. Its options, target, excluded nodes and
            the algorithms that change the float model hold for every trial.
        samples: of calibration and of the trials: a data reader, or an iterable of dictionaries. A few are enough.
        candidates: presets, pairs of data types, ``float``; ``quark.onnx.quantization.config.candidates``. The preset
            of the configuration when omitted.
        metric: a name in ``MEASURES``, or ``file.py:function``, called with the path of a model.
        workers: trials at a time.
        ledger: a JSON file that finished trials are kept in; a run that was killed goes on with it.
        progress: called with the number of finished trials and of all.

    Returns:
        The trials, with ``size`` and ``bits`` of every layer.

    Raises:
        ConfigError: a candidate, metric or configuration that cannot work, or a ledger of another model, data or
            configuration.
        ModelError, DataError: as ``ModelQuantizer.quantize_model``.
    """
    base, names = settings_of(config, candidates)
    job = Config(base).compile()
    with Scratch(job.options) as scratch, Journal.held(ledger):
        layers = layer_runs.candidate_layers(names, base.target, job)
        check_metric(metric, MEASURES)
        made = layer_runs.open_runs(model_input, job, layers, as_reader(model_input, samples), scratch, workers)
        try:
            say_if_first(metric, len(made.common.outputs))
            book = open_ledger(ledger, made, job, metric)
            found = study(made, names, metric, workers, book, progress)
            book.settle()
            return found
        finally:
            layer_runs.close()


def settings_of(config: Settings, candidates: Sequence[str] | None) -> tuple[QuantizationConfig, list[str]]:
    """The configuration of the whole model, and the candidates.

    Raises:
        ConfigError: no candidates, and a configuration that is not known by the name of a preset.
    """
    values = {"preset": config} if isinstance(config, str) else config
    base = config_of(values) if isinstance(values, Mapping) else getattr(values, "global_quant_config", values)
    if not isinstance(base, QuantizationConfig):
        raise ConfigError(f"config is the name of a preset or what get_default_config gives, not {config!r}")
    if candidates is not None:
        return base, list(candidates)
    if not isinstance(values, Mapping):
        raise ConfigError("give candidates, or the configuration as the name of a preset, which then is the candidate")
    return base, [str(values["preset"])]


def open_ledger(path: str | Path | None, made: OnnxLayerRuns, job: Job, metric: str) -> Journal:
    """The ledger of a study; refused where it belongs to another one."""
    own = {"model": made.model, "data": made.data, "metric": digest_of(metric) if ":" in metric else metric}
    return Journal(path, {**own, **fingerprint.of_job(job)})


def study(
    made: OnnxLayerRuns,
    names: Sequence[str],
    metric: str,
    workers: int,
    ledger: Journal,
    progress: Progress | None = None,
) -> Study:
    """All trials, finished ones from the ledger."""
    start = time.perf_counter()
    tasks = [(unit, name) for unit in made.units for name in names if name in unit.tensors]
    trials = tuple(_trials(made.common, tasks, metric, workers, ledger, progress))
    return Study(trials, metric, made.common.samples, time.perf_counter() - start)


def _trials(
    common: FloatModelFiles,
    tasks: Sequence[Task],
    metric: str,
    workers: int,
    ledger: Journal,
    progress: Progress | None = None,
) -> Iterator[Trial]:
    """The trials of tasks, in their order."""
    reference, path = 0.0, str(common.model)
    if ":" in metric:
        reference = ledger.number("the float model", lambda: of_float(metric, path)["value"])
    units = {(unit.name, name): unit for unit, name in tasks}

    def results(left: Sequence[Pair]) -> Iterator[tuple[Pair, Measured]]:
        return _results(common, [(units[pair], pair[1]) for pair in left], metric, workers)

    found = all_measured(list(units), metric, ledger, results, progress)
    for pair, unit in units.items():
        measured = dict(found[pair])
        costs = {**unit.costs[pair[1]], **({"size": measured.pop("size")} if "size" in measured else {})}
        loss = loss_of(measured, metric, reference)
        yield Trial(unit.name, unit.op_type, pair[1], loss, measured, costs)


def _results(
    common: FloatModelFiles, tasks: Sequence[Task], metric: str, workers: int
) -> Iterator[tuple[Pair, Measured]]:
    """(layer, candidate) and measures, as they are finished; what stays float loses nothing."""
    for unit, name in (task for task in tasks if task[1] == FLOAT):
        exact = of_float(metric, str(common.model))
        yield (unit.name, name), {key: value for key, value in exact.items() if key != "kl" or metric == "kl"}
    alike: dict[bytes, list[Task]] = {}
    for unit, name in (task for task in tasks if task[1] != FLOAT):
        alike.setdefault(_digest(unit, name), []).append((unit, name))
    calls = (
        parallel.delayed(trial, common, unit.name, unit.op_type, unit.tensors[name], metric, name)
        for (unit, name), *_ in alike.values()
    )
    for same, measured in zip(alike.values(), parallel.in_threads(calls, workers), strict=True):
        yield from (((unit.name, name), measured) for unit, name in same)


def _digest(unit: Unit, name: str) -> bytes:
    """Equal where two candidates make the same of a layer (an addition has no weights that could differ)."""
    arrays: dict[str, np.ndarray] = {}
    for tensor in unit.tensors[name]:
        spec = tensor.spec
        what = f"{split(name)[1]} {unit.name} {tensor.name} {spec.grid} {spec.granularity} {spec.rounding}"
        arrays |= {f"{what} scale": np.asarray(tensor.scale), f"{what} zero": np.asarray(tensor.zero_point)}
    return fingerprint.of_arrays(arrays)


def trial(
    common: FloatModelFiles, name: str, op_type: str, tensors: Tensors, metric: str, candidate: str = ""
) -> Measured:
    """Quantize one layer, with the weights that the candidate's algorithms gave it, and measure; ``size`` is that of
    its constants."""
    model = layer_runs.single(common, name, op_type, tensors, candidate)
    size = {"size": layer_runs.stored_bytes(common, name, tensors, model)}
    model = layer_runs.whole(common, name, model)
    if ":" in metric:
        return common.called(model, partial(by_function, metric)) | size
    return common.measured(model, metric) | size
