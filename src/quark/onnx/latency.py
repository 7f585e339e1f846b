"""How long models take on ONNX Runtime's CPU provider, measured side by side.

The models take turns in short blocks of inferences, so that a slow moment of the machine hits them all. The fast tenth
of all counted inferences tells what the model takes: where other programs keep the cores busy, an inference longer than
a slice of the scheduler's waits for them and a shorter one does not, so that medians say nothing of the models
(SqueezeNet on two cores with four busy programs: 7 to 18 times as fast as float, and 2.4 to 2.5 by the fast tenth). The
first ones of each block are not counted: they pay for cold caches. Of
slow models a block has fewer. Threads of a session go on spinning behind its last inference, on the cores of the next
one's: where sessions have several, each block waits until they sleep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import onnxruntime

from quark.numerics.metrics import lowest_tenth, median
from quark.onnx.data_layout import widened
from quark.onnx.graph.libraries import Libraries, library_files
from quark.onnx.graph.model import load
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.graph.session import open_session, quiet_options

SKIPPED, COUNTED = 4, 6
"""Inferences in a row that are not counted, and that are, at most."""
ROUNDS = 10
"""Blocks of a model, at most."""
WARM, LONG = 0.02, 0.1
"""Seconds after which no more are left uncounted, and after which two that count are enough."""

REST = 0.05
"""Seconds that a block waits for the threads of the session before; they were seen to spin for 0.03."""


FEWEST = 4
"""Samples that are compared however long they take."""
KEPT = 16
"""Samples, one of which the models are timed on."""
HELD = 1 << 26
"""Bytes of outputs that may wait for those of the other model, and of samples that are kept."""
RESTLESS, LATER = 1.25, 1.0
"""How far above it the median may be before the machine counts as busy; the seconds that a busy one gets at least."""


def quiet_seconds(
    models: Mapping[str, str | Path | onnx.ModelProto],
    feed: Mapping[str, np.ndarray],
    seconds: float = 2.0,
    rounds: int = ROUNDS,
    libraries: Libraries = None,
) -> dict[str, float]:
    """The time of one inference of each model, in seconds, as where nothing else runs.

    Args:
        models: paths or models by name.
        feed: one sample ``{input name: array}``.
        seconds: stop after the first round that ends later than this, or ``LATER`` where the machine is busy.
        rounds: blocks per model, at most.
        libraries: files with the models' custom operators.
    """
    return session_seconds(
        {name: (usual_session(one, libraries), feed) for name, one in models.items()}, seconds, rounds
    )


def session_seconds(
    sessions: Mapping[str, tuple[onnxruntime.InferenceSession, Mapping[str, np.ndarray]]],
    seconds: float,
    rounds: int = ROUNDS,
) -> dict[str, float]:
    """The same of sessions, each with its sample."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    start = time.perf_counter()
    rest = pause_of([session for session, _ in sessions.values()])
    for _ in range(rounds):
        for name, (session, feed) in sessions.items():
            time.sleep(rest)
            times[name] += _block(session, feed)
        took = time.perf_counter() - start
        if took > seconds and (took > LATER or not any(map(is_restless, times.values()))):
            break
    return {name: quiet(found) for name, found in times.items()}


Run: TypeAlias = Callable[[Feed], list[np.ndarray]]


def in_turns(
    feeds: Iterable[Feed],
    runs: Mapping[str, Run],
    runners: Sequence[Runner],
    timed: float | None,
    seconds: dict[str, float],
) -> Iterator[tuple[Feed, list[np.ndarray], list[np.ndarray]]]:
    """Every sample, and what both models say on it.

    Where ``FEWEST`` samples take at least ``timed`` seconds, those behind the first run in a block of each model, whose
    times are put into ``seconds``: such models are not run for their time alone, unless the machine is busy. A block
    has all samples or none.
    """
    left, (first, second) = iter(feeds), runs.values()
    for feed in islice(left, 1):
        start = time.perf_counter()
        x, y = first(feed), second(feed)
        slow = timed is not None and FEWEST * (time.perf_counter() - start) >= timed
        held = FEWEST * sum(array.nbytes for array in (*x, *y))
        yield feed, x, y
        sessions = [runner.session for runner in runners if runner.session is not None]
        block = list(islice(left, FEWEST - 1)) if slow and held <= HELD and len(sessions) == len(runners) else []
        pause = pause_of(sessions) if block else 0.0
        blocks = {name: _timed(run, block, pause) for name, run in runs.items()}
        if len(block) == FEWEST - 1 and not any(is_restless(times) for _, times in blocks.values()):
            seconds.update((name, quiet(times)) for name, (_, times) in blocks.items())
        yield from zip(block, *(said for said, _ in blocks.values()), strict=True)
    yield from ((feed, first(feed), second(feed)) for feed in left)


class Stopwatch:
    """What two models take on each sample, and some of the samples, to time both on one that stands for all.

    Numbers below float32's smallest normal one slow float kernels down, in some samples many times.

    Attributes:
        runs: those given, by name, which note their seconds.
    """

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self._took: dict[str, list[float]] = {name: [] for name in runs}
        self._kept: list[Feed] = []
        self.runs = {name: self._noting(run, self._took[name]) for name, run in runs.items()}

    @staticmethod
    def _noting(run: Run, took: list[float]) -> Run:
        def noting(feed: Feed) -> list[np.ndarray]:
            start = time.perf_counter()
            said = run(feed)
            took.append(time.perf_counter() - start)
            return said

        return noting

    def keep(self, feed: Feed) -> None:
        """Keep the next sample, if there is room."""
        size = sum(np.asarray(array).nbytes for array in feed.values())
        if not self._kept or (len(self._kept) < KEPT and (len(self._kept) + 1) * size <= HELD):
            self._kept.append(feed)

    def typical(self) -> Feed:
        """The sample at which the ratio of both times is in the middle; the first one's are of cold caches."""
        first, second = (times[: len(self._kept)] for times in self._took.values())
        ratios = [one / other for one, other in zip(first, second, strict=True)]
        order = sorted(range(min(1, len(ratios) - 1), len(ratios)), key=ratios.__getitem__)
        return self._kept[order[(len(order) - 1) // 2]]


def _timed(run: Run, block: Iterable[Feed], pause: float) -> tuple[list[list[np.ndarray]], list[float]]:
    """What a model says on samples in a row, and the seconds of each."""
    time.sleep(pause)
    answers, marks = [], [time.perf_counter()]
    for feed in block:
        answers.append(run(feed))
        marks.append(time.perf_counter())
    return answers, [after - before for before, after in pairwise(marks)]


def pause_of(sessions: Sequence[onnxruntime.InferenceSession]) -> float:
    """Seconds that a block of inferences waits for the threads of the other sessions."""
    return REST if len(sessions) > 1 and any(map(_spins, sessions)) else 0.0


def quiet(found: Sequence[float]) -> float:
    """What inferences that took so many seconds take where nothing else runs."""
    return lowest_tenth(np.asarray(found))


def is_restless(found: Sequence[float]) -> bool:
    """Whether other work got in the way of them."""
    return bool(median(np.asarray(found)) > RESTLESS * quiet(found))


def usual_session(model: str | Path | onnx.ModelProto, libraries: Libraries) -> onnxruntime.InferenceSession:
    """A session as a user opens it: with ONNX Runtime's own memory and thread settings."""
    options = quiet_options()
    for library in library_files(libraries):
        options.register_custom_ops_library(library)
    return open_session(load(model), options)


def _spins(session: onnxruntime.InferenceSession) -> bool:
    """Whether a session has threads beside the caller's; 0 of its options: as many as there are cores."""
    return (session.get_session_options().intra_op_num_threads or os.cpu_count() or 1) > 1


def _block(session: onnxruntime.InferenceSession, feed: Mapping[str, np.ndarray]) -> list[float]:
    """The seconds of the counted inferences of one block."""
    feed = {name: np.asarray(value) for name, value in feed.items()}  # one of many numbers is no array of its own
    feed = widened(feed, {one.name for one in session.get_inputs() if one.type == "tensor(float)"})

    def run() -> float:
        start = time.perf_counter()
        session.run(None, feed)
        return time.perf_counter() - start

    warm, found = [run()], [0.0] * 0
    while len(warm) < SKIPPED and sum(warm) < WARM:
        warm.append(run())
    while len(found) < 2 or (len(found) < COUNTED and sum(found) < LONG):
        found.append(run())
    return found
