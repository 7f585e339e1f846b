"""Calibration: run the samples through the float model once and find a range for every tensor that needs one.

Only the requested tensors are observed. They are fetched, and counted in other threads (the counting releases the
interpreter lock), while the next sample runs if that saves time: not where counting is quick or there is one processor,
since two samples in memory cost more than one. Where extremes are enough and the tensors are large, the graph reduces
them itself and numbers come back. The threads are at most one sample behind and let go of every tensor as soon as it
is counted, so memory does not depend on the number of samples, and little on their size.

Not handled: tensors inside the bodies of If and Loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.errors import DataError, check_name
from quark.files.journal import Journal
from quark.numerics.affine import Grid
from quark.observers import SEARCHES, RangeMethod, Statistic
from quark.observers.registry import count
from quark.observers.statistics import MinMax, MovingMinMax
from quark.observers.tails import Tails
from quark.onnx.counted import CountedSamples
from quark.onnx.data import Feed, Samples, checked, inputs_of, samples_of
from quark.onnx.discretion import inherited
from quark.onnx.graph.run import Extremes, Observation, Runner, trim_heap
from quark.onnx.graph.session import ON_CPU, Runtime
from quark.report.process import lent

#: Extremes of tensors up to so many bytes a sample are taken here, of more in the graph: measured on ResNet-50 (67 MB),
#: 4 ms a sample against 24 ms for the graph's ReduceMin, ReduceMax and IsNaN.
FETCHED = 1 << 27
#: Statistics that take so little time that the runtime's threads may keep both cores meanwhile.
LIGHT = (MinMax, MovingMinMax, Tails)
#: Threads that count; each tensor is counted by one of them.
COUNTERS = 2

Range = tuple[float, float]
Progress = Callable[[int, int | None], None]
Statistics = dict[str, Statistic]


@dataclass(frozen=True)
class Request:
    """What range a tensor needs.

    Attributes:
        grid: the quantizer the range is for.
        method: name of a row of ``quark.observers.SEARCHES``.
        settings: of that method, by name.
        mirrored: the wider side of the range holds for both.
    """

    grid: Grid
    method: str = "minmax"
    settings: Mapping[str, Any] = field(default_factory=dict)
    mirrored: bool = False

    def __post_init__(self) -> None:
        check_name("calibration method", self.method, SEARCHES)
        self.search.check(self.settings)

    @property
    def search(self) -> RangeMethod:
        """The row of ``SEARCHES``."""
        return SEARCHES[self.method]

    def serves(self, other: Request) -> bool:
        """Whether the statistic of this request is that of the other."""
        return (self.method, self.settings) == (other.method, other.settings)

    def foreseeing(self, samples: int | None) -> Request:
        """The request of a job with so many samples (None: nobody knows); some methods need less then."""
        if samples is None or "samples" not in self.search.settings:
            return self
        return replace(self, settings={**self.settings, "samples": samples})


def calibrate(
    model: ir.Model,
    requests: Mapping[str, Request],
    samples: Any,
    runtime: Runtime = ON_CPU,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> dict[str, Range]:
    """The range of every requested tensor.

    Args:
        model: the float model; comes back unchanged.
        requests: tensor name -> what it needs.
        samples: anything ``quark.onnx.data.samples_of`` takes.
        runtime: how the model is run.
        progress: called after every sample with the number done and, if it is known, the number there will be.
        journal: where finished samples are remembered.

    Returns:
        Tensor name -> (lo, hi); (0, 0) for a tensor that was empty in every sample.

    Raises:
        DataError: samples do not fit the model, there is none, or an activation becomes NaN or infinite.
        ModelError: a requested tensor does not exist, or ONNX Runtime refuses the model.
        ConfigError: a setting that a method does not have.
    """
    statistics = observe(model, requests, samples, runtime, progress, journal)
    return find_ranges(requests, statistics)


def find_ranges(requests: Mapping[str, Request], statistics: Mapping[str, Statistic]) -> dict[str, Range]:
    """The range of every requested tensor, from what was observed."""
    return {name: _range(request, statistics[name]) for name, request in requests.items()}


def _range(request: Request, statistic: Statistic) -> Range:
    lo, hi = request.search.find(statistic, request.grid, request.settings)
    widest = max(abs(lo), abs(hi))
    return (-widest, widest) if request.mirrored else (lo, hi)


def observe(
    model: ir.Model,
    requests: Mapping[str, Request],
    samples: Any,
    runtime: Runtime = ON_CPU,
    progress: Progress | None = None,
    journal: Journal | None = None,
) -> Statistics:
    """The statistics of every requested tensor over all samples; arguments of ``calibrate``.

    Statistics of several calls over parts of the data can be merged (``Statistic.merge``) before ``find_ranges``.
    """
    statistics, counted, feeds = begun(model, requests, samples, progress, journal or Journal())
    if counted.complete:
        return statistics
    whole, reduced = split_by_need(model, requests)
    light = all(isinstance(statistic, LIGHT) for statistic in statistics.values())
    runner = Runner(model, whole, reduced, replace(runtime, spin=light), complete=True)
    with ThreadPoolExecutor(COUNTERS, "calibration", inherited()) as worker:
        _stream(runner, feeds, statistics, worker, counted, behind=not light and lent() > 1)
    counted.close()
    del runner
    trim_heap()
    return statistics


def begun(
    model: ir.Model, requests: Mapping[str, Request], samples: Any, progress: Progress | None, journal: Journal
) -> tuple[Statistics, CountedSamples, Iterable[Feed]]:
    """The statistics that finished samples are in, which those are, and the samples that are left."""
    statistics = {name: request.search.observe(request.settings) for name, request in requests.items()}
    counted, source = CountedSamples(journal, statistics), samples_of(samples)
    feeds = counted.unseen(reported(checked(source, inputs_of(model)), source, progress))
    if counted.complete:
        list(feeds)  # no sample is left; they are looked at because others would need other statistics
    return statistics, counted, feeds


def split_by_need(model: ir.Model, requests: Mapping[str, Request]) -> tuple[list[str], list[str]]:
    """The tensors to fetch whole, and those of which the graph gives the extremes."""
    whole = [name for name, request in requests.items() if request.search.needs_values]
    extremes = [name for name, request in requests.items() if not request.search.needs_values]
    fetched = extremes if _bytes_of(model, extremes) <= FETCHED else []
    return [*whole, *fetched], [name for name in extremes if name not in fetched]


def _bytes_of(model: ir.Model, names: Iterable[str]) -> int:
    """Bytes of one sample of these tensors, free sizes taken as 1."""
    values = {value.name: value for node in model.graph for value in node.outputs}
    shapes = [values[name].shape for name in names if name in values]
    sizes = [[size if isinstance(size, int) else 1 for size in shape] for shape in shapes if shape is not None]
    return sum(4 * math.prod(shape) for shape in sizes)


def _stream(
    runner: Runner,
    feeds: Iterable[Feed],
    statistics: Statistics,
    worker: ThreadPoolExecutor,
    counted: CountedSamples,
    behind: bool,
) -> None:
    """Run every sample and count it in ``worker``, ``behind``: while the next one runs."""
    counting: list[Future[None]] = []
    for index, feed in enumerate(feeds, counted.samples):
        observation = _run(runner, feed, index)
        _join(counting, counted)
        _add_extremes(statistics, observation.extremes, index)
        values = _kept(observation.values, feed)
        counting = [worker.submit(_count, statistics, values, index) for _ in range(COUNTERS)]
        del observation, values
        if not behind:
            _join(counting, counted)
            counting = []
    _join(counting, counted)


def _join(counting: list[Future[None]], counted: CountedSamples) -> None:
    """Wait until a sample is in the statistics, and remember it."""
    for counter in counting:
        counter.result()
    if counting:
        counted.count()


def count_sample(runner: Runner, feed: Feed, statistics: Statistics, index: int) -> None:
    """Run one sample and count it, one after the other."""
    observation = _run(runner, feed, index)
    _add_extremes(statistics, observation.extremes, index)
    _count(statistics, observation.values, index)


def _kept(values: dict[str, np.ndarray], feed: Feed) -> dict[str, np.ndarray]:
    """The tensors, inputs copied: a reader may fill the same array again while this sample is still being counted."""
    return {name: array.copy() if name in feed else array for name, array in values.items()}


def reported(feeds: Iterable[Feed], source: Samples, progress: Progress | None) -> Iterator[Feed]:
    """The same feeds; after each is done, ``progress`` hears of it."""
    total = source.total if progress is not None else None
    for index, feed in enumerate(feeds):
        yield feed
        if progress is not None:
            progress(index + 1, total)


def _run(runner: Runner, feed: Feed, index: int) -> Observation:
    try:
        return runner.run(feed)
    except DataError as error:
        raise DataError(f"sample {index}: {error}") from error


def _add_extremes(statistics: Statistics, extremes: Mapping[str, Extremes], index: int) -> None:
    for name, found in extremes.items():
        if found.has_nan or not np.isfinite([found.lo, found.hi]).all():
            if found.lo == np.inf and found.hi == -np.inf and not found.has_nan:
                continue  # the tensor was empty
            what = "NaN" if found.has_nan else "infinite values"
            raise _spoilt(name, index, what)
        statistics[name].update(np.array([found.lo, found.hi]))


def _count(statistics: Statistics, values: dict[str, np.ndarray], index: int) -> None:
    """Add one sample's tensors to their statistics and let go of them one by one."""
    while values:
        try:
            name, array = values.popitem()
        except KeyError:  # the other thread took the last one
            return
        try:
            count(statistics[name], array)
        except DataError as error:
            raise _spoilt(name, index, str(error)) from error


def _spoilt(name: str, index: int, what: str) -> DataError:
    return DataError(
        f"the activation {name!r} becomes not finite on calibration sample {index} ({what}): check how that sample was "
        "preprocessed, or exclude the node that makes it"
    )
