"""Time bare inference: models side by side in one process, one sample of each in turn, default sessions.

{"models": {"float": path, ...}, "feeds", "rounds": 3}
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.peers.job import Feeds, main, read_feeds, timed, version


def open_session(path: str) -> onnxruntime.InferenceSession:
    """A session as a user gets it, but quiet."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def interleave(sessions: dict[str, onnxruntime.InferenceSession], feeds: list[Feeds], rounds: int) -> dict[str, Any]:
    """Seconds of each run by model, after one warm-up; neighbours in time share the machine's mood."""
    runs: dict[str, list[float]] = {name: [] for name in sessions}
    for session in sessions.values():
        session.run(None, feeds[0])
    for feed in feeds * rounds:
        for name, session in sessions.items():
            runs[name].append(timed(partial(session.run, None, feed))[0])
    return runs


def infer(job: dict[str, Any]) -> dict[str, Any]:
    """Median milliseconds of one run, and the median of a pass over all samples, by model."""
    feeds = list(read_feeds(job["feeds"]))
    sessions = {name: open_session(path) for name, path in job["models"].items()}
    rounds = job.get("rounds", 1)
    runs = interleave(sessions, feeds, rounds)
    passes = {name: np.reshape(times, (rounds, len(feeds))).sum(1) for name, times in runs.items()}
    return {
        "milliseconds": {name: 1e3 * statistics.median(times) for name, times in runs.items()},
        "pass_seconds": {name: float(np.median(each)) for name, each in passes.items()},
        "version": version("onnxruntime"),
    }


if __name__ == "__main__":
    main(infer)
