"""How long models take on ONNX Runtime's CPU provider, measured side by side.

The models take turns in short blocks of inferences, so that a slow moment of the machine hits them all; the median of
all counted inferences is what a user waits. The first ones of each block are not counted: they pay for cold caches, and
on few cores for the threads of the session before, which go on spinning for a while.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from quark.onnx.data import widened
from quark.onnx.graph.libraries import Libraries, library_files
from quark.onnx.graph.model import load
from quark.onnx.graph.session import open_session, quiet_options

BLOCK, SKIPPED = 10, 4
"""Inferences in a row, and how many of them are not counted."""


def median_seconds(
    models: Mapping[str, str | Path | onnx.ModelProto],
    feed: Mapping[str, np.ndarray],
    seconds: float = 2.0,
    rounds: int = 10,
    libraries: Libraries = None,
) -> dict[str, float]:
    """The median time of one inference of each model, in seconds.

    Args:
        models: paths or models by name.
        feed: one sample ``{input name: array}``.
        seconds: stop after the first round that ends later than this.
        rounds: blocks per model, at most.
        libraries: files with the models' custom operators.
    """
    sessions = {name: _session(model, libraries) for name, model in models.items()}
    feed = {name: np.asarray(value) for name, value in feed.items()}  # one of many numbers is no array of its own
    times: dict[str, list[float]] = {name: [] for name in sessions}
    end = time.perf_counter() + seconds
    for _ in range(rounds):
        for name, session in sessions.items():
            times[name] += _block(session, feed)
        if time.perf_counter() > end:
            break
    return {name: statistics.median(found) for name, found in times.items()}


def _session(model: str | Path | onnx.ModelProto, libraries: Libraries) -> onnxruntime.InferenceSession:
    """A session as a user opens it: with ONNX Runtime's own memory and thread settings."""
    options = quiet_options()
    for library in library_files(libraries):
        options.register_custom_ops_library(library)
    return open_session(load(model), options)


def _block(session: onnxruntime.InferenceSession, feed: Mapping[str, np.ndarray]) -> list[float]:
    """The seconds of the counted inferences of one block."""
    found = []
    feed = widened(feed, {one.name for one in session.get_inputs() if one.type == "tensor(float)"})
    for _ in range(BLOCK):
        start = time.perf_counter()
        session.run(None, feed)
        found.append(time.perf_counter() - start)
    return found[SKIPPED:]
