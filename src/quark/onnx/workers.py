"""Calibration by several workers: each runs samples and counts them, the statistics are merged in the order of samples.

Workers are threads that share one session, or whatever joblib is set to: its processes, or a cluster.

    with joblib.parallel_config("loky"):          # processes; a cluster: "dask", "ray" (registered)
        ModelQuantizer(config).quantize_model(...)

A worker reads the files of its samples itself where the reader tells them apart (``separate_reads``), and hands its
statistics over once for each shard; other samples are read and shipped by this process. Merging is exact, and the
moving average, whose order matters, is merged sample by sample, so the result does not depend on how the work was
divided. Processes open the model from a file in ``TmpDir`` and map its weights, which the system then keeps once; on a
cluster ``TmpDir`` must be a folder that all machines see.

Not handled: GPUs shared among processes (each opens a session of its own).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from math import ceil
from typing import Any, NamedTuple

import onnx_ir as ir

from quark import parallel
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.observers import Memory, MovingMinMax
from quark.onnx.algorithms.context import JobContext
from quark.onnx.calibration import Progress, Request, Statistics, begun, count_sample, split_by_need
from quark.onnx.data import Feed, ModelInput, Read, fitted, holds, inputs_of, nothing_held, samples_of
from quark.onnx.graph.model import load
from quark.onnx.graph.run import Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.scratch import Scratch
from quark.report.process import lent

#: Samples that a worker counts before it hands its statistics over, where this process reads them or a statistic keeps
#: them; shards for each worker where it reads them itself.
CHUNK, SHARDS = 4, 4


class Shard(NamedTuple):
    """Neighbouring samples: the index of the first one, and they themselves or what reads them where it is called."""

    first: int
    samples: Sequence[Feed | Read]


class ShardResult(NamedTuple):
    """What a worker found in a shard: how many samples it has, whether one holds a value, their statistics."""

    samples: int
    held: bool
    statistics: Statistics


@dataclass
class WorkerTask:
    """What a worker needs. It travels to other processes without the session; they open one of their own.

    Attributes:
        requests: what each tensor needs.
        whole, reduced: tensors that are fetched, and those of which the graph gives the extremes.
        runtime: how they run it.
        inputs: of the model.
        workers: how many share a machine's processors.
        runner: the session of this process.
        model: the model's file, for other processes.
    """

    requests: Mapping[str, Request]
    whole: list[str]
    reduced: list[str]
    runtime: Runtime
    inputs: Sequence[ModelInput]
    workers: int
    runner: Runner | None = None
    model: str = ""

    def opened(self) -> Runner:
        """The runner of this process."""
        if self.runner is not None:
            return self.runner
        return _opened(self.model, tuple(self.whole), tuple(self.reduced), shared_out(self.runtime, self.workers))


def shared_out(runtime: Runtime, workers: int) -> Runtime:
    """The threads of one of the workers of this machine."""
    return replace(runtime, threads=max(1, lent() // workers))


def observe_with_workers(
    model: ir.Model, requests: Mapping[str, Request], samples: Any, context: JobContext, progress: Progress | None
) -> Statistics:
    """``quark.onnx.calibration.observe`` by the workers of a job; the same statistics.

    Raises:
        ConfigError: more than 1,024 workers; or they are processes and ``CryptoMode`` keeps the model off the disk.
    """
    options = context.job.options
    workers = options.CalibWorkerNum
    if workers > parallel.MOST:
        raise ConfigError(f"CalibWorkerNum is {workers}; at most {parallel.MOST} workers are taken")
    statistics, counted, feeds = begun(model, requests, samples, progress, context.journal)
    if counted.complete:
        return statistics
    task = _task(model, requests, workers, context.scratch, Runtime.of(options))
    ordered = counted or any(isinstance(statistic, MovingMinMax) for statistic in statistics.values())
    reads = None if counted else samples_of(samples).separate_reads()
    size = 1 if ordered else CHUNK if reads is None or _keeps(requests) else ceil(len(reads) / (SHARDS * workers))
    shards = _shards(counted.samples, size, feeds) if reads is None else _shards(0, size, reads)
    done, held = 0, False
    for found in _results(task, shards, workers):
        for name, statistic in found.statistics.items():
            statistics[name].merge(statistic)
        counted.count(found.samples)
        done, held = done + found.samples, held or found.held
        if reads is not None and progress is not None:
            progress(done, len(reads))
    if reads is not None and not held:
        raise nothing_held(done, task.inputs)
    counted.close()
    return statistics


def _task(
    model: ir.Model, requests: Mapping[str, Request], workers: int, scratch: Scratch, runtime: Runtime
) -> WorkerTask:
    """The model where the workers can reach it: this process's session, or a file."""
    whole, reduced = split_by_need(model, requests)
    own = {name: _in_memory(request) for name, request in requests.items()}
    task = WorkerTask(own, whole, reduced, runtime, inputs_of(model), workers)
    if parallel.shares_memory():
        return replace(task, runner=Runner(model, whole, reduced, shared_out(runtime, workers), complete=True))
    path = scratch.folder("calibration by processes (set joblib back to threads)") / "model.onnx"
    ir.save(model.clone(), path, external_data=f"{path.name}.data")
    return replace(task, model=str(path.resolve()))


def _in_memory(request: Request) -> Request:
    """A worker keeps the values of its few samples in memory; the stores of the job are this process's."""
    if "keep" not in request.settings:
        return request
    return replace(request, settings={**request.settings, "keep": Memory})


def _keeps(requests: Mapping[str, Request]) -> bool:
    """Whether statistics grow with the samples of a shard."""
    return any("keep" in request.settings for request in requests.values())


def _shards(first: int, size: int, samples: Iterable[Feed | Read]) -> Iterator[Shard]:
    """The samples in portions; arrays are copied, since a reader may fill the same ones again."""
    source = iter(samples)
    while portion := [_copied(one) for one in islice(source, size)]:
        yield Shard(first, portion)
        first += len(portion)


def _copied(sample: Any) -> Any:
    return sample if callable(sample) else {name: array.copy() for name, array in sample.items()}


def _results(task: WorkerTask, shards: Iterator[Shard], workers: int) -> Iterator[ShardResult]:
    """What was found, in order; a few shards are under way at a time."""
    calls = (parallel.delayed(_work, task, shard) for shard in shards)
    yield from parallel.results(calls, workers, "threads", ahead=workers + 1)


def _work(task: WorkerTask, shard: Shard) -> ShardResult:
    """Read, run and count a few samples."""
    runner, held = task.opened(), False
    statistics = {name: request.search.observe(request.settings) for name, request in task.requests.items()}
    for index, sample in enumerate(shard.samples, shard.first):
        feed: Feed = fitted(sample(), task.inputs, index) if callable(sample) else sample
        held |= holds(feed)
        count_sample(runner, feed, statistics, index)
    return ShardResult(len(shard.samples), held, statistics)


@lru_cache(maxsize=1)
def _opened(model: str, whole: tuple[str, ...], reduced: tuple[str, ...], runtime: Runtime) -> Runner:
    """The session of a worker process; it stays open for the chunks that follow."""
    return Runner(load(model), whole, reduced, runtime, complete=True)
