"""Calibration by several workers: each runs samples and counts them, the statistics are merged in the order of samples.

Workers are threads that share one session, or whatever joblib is set to: its processes, or a cluster.

    with joblib.parallel_config("loky"):          # processes; a cluster: "dask", "ray" (registered)
        ModelQuantizer(config).quantize_model(...)

Merging is exact, and the moving average, whose order matters, is merged sample by sample, so the result does not
depend on how the work was divided. Processes open the model from a file in ``TmpDir`` and map its weights, which the
system then keeps once; on a cluster ``TmpDir`` must be a folder that all machines see.

Not handled: GPUs shared among processes (each opens a session of its own).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any

import onnx_ir as ir

from quark import parallel
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.observers import Memory, MovingMinMax
from quark.onnx.algorithms.context import JobContext
from quark.onnx.calibration import Progress, Request, Statistics, begun, count_sample, split_by_need
from quark.onnx.data import Feed
from quark.onnx.graph.model import load
from quark.onnx.graph.run import Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.scratch import Scratch
from quark.report.process import lent

#: Samples that a worker counts before it hands its statistics over.
CHUNK = 4
Chunk = tuple[int, list[Feed]]


@dataclass
class WorkerTask:
    """What a worker needs. It travels to other processes without the session; they open one of their own.

    Attributes:
        requests: what each tensor needs.
        whole, reduced: tensors that are fetched, and those of which the graph gives the extremes.
        runtime: how they run it.
        runner: the session of this process.
        model: the model's file, for other processes.
    """

    requests: Mapping[str, Request]
    whole: list[str]
    reduced: list[str]
    runtime: Runtime
    runner: Runner | None = None
    model: str = ""

    def opened(self) -> Runner:
        """The runner of this process."""
        if self.runner is not None:
            return self.runner
        return _opened(self.model, tuple(self.whole), tuple(self.reduced), self.runtime)


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
    for count, found in _results(task, _chunks(feeds, counted.samples, 1 if ordered else CHUNK), workers):
        for name, statistic in found.items():
            statistics[name].merge(statistic)
        counted.count(count)
    counted.close()
    return statistics


def _task(
    model: ir.Model, requests: Mapping[str, Request], workers: int, scratch: Scratch, runtime: Runtime
) -> WorkerTask:
    """The model where the workers can reach it: this process's session, or a file."""
    whole, reduced = split_by_need(model, requests)
    runtime = replace(runtime, threads=max(1, lent() // workers))
    task = WorkerTask({name: _in_memory(request) for name, request in requests.items()}, whole, reduced, runtime)
    if parallel.shares_memory():
        return replace(task, runner=Runner(model, whole, reduced, runtime, complete=True))
    path = scratch.folder("calibration by processes (set joblib back to threads)") / "model.onnx"
    ir.save(model.clone(), path, external_data=f"{path.name}.data")
    return replace(task, model=str(path.resolve()))


def _in_memory(request: Request) -> Request:
    """A worker keeps the values of its few samples in memory; the stores of the job are this process's."""
    if "keep" not in request.settings:
        return request
    return replace(request, settings={**request.settings, "keep": Memory})


def _chunks(feeds: Iterable[Feed], first: int, size: int) -> Iterator[Chunk]:
    """(index of the first sample, samples); arrays are copied, since a reader may fill the same ones again."""
    source = iter(feeds)
    while chunk := [{name: array.copy() for name, array in feed.items()} for feed in islice(source, size)]:
        yield first, chunk
        first += len(chunk)


def _results(task: WorkerTask, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[int, Statistics]]:
    """(samples, their statistics), in order; a few chunks are under way at a time."""
    yield from parallel.results(
        (parallel.delayed(_work, task, *chunk) for chunk in chunks), workers, "threads", ahead=workers + 1
    )


def _work(task: WorkerTask, first: int, feeds: list[Feed]) -> tuple[int, Statistics]:
    """Run and count a few samples."""
    runner = task.opened()
    statistics = {name: request.search.observe(request.settings) for name, request in task.requests.items()}
    for index, feed in enumerate(feeds, first):
        count_sample(runner, feed, statistics, index)
    return len(feeds), statistics


@lru_cache(maxsize=1)
def _opened(model: str, whole: tuple[str, ...], reduced: tuple[str, ...], runtime: Runtime) -> Runner:
    """The session of a worker process; it stays open for the chunks that follow."""
    return Runner(load(model), whole, reduced, runtime, complete=True)
