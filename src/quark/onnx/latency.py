"""How long models take on ONNX Runtime's CPU provider, measured side by side.

The models take turns, one inference each per round, so that a slow moment of the machine hits them all; the median of
the rounds is what a user waits. The first rounds (allocation, page faults) are not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx

from quark.onnx.graph.model import load
from quark.onnx.graph.session import open_session

WARM_UP = 3


def median_seconds(
    models: Mapping[str, str | Path | onnx.ModelProto],
    feed: Mapping[str, np.ndarray],
    seconds: float = 2.0,
    rounds: int = 100,
) -> dict[str, float]:
    """The median time of one inference of each model, in seconds.

    Args:
        models: paths or models by name.
        feed: one sample ``{input name: array}``.
        seconds: stop after about this long; five rounds are measured in any case.
        rounds: and at most so many rounds.
    """
    sessions = {name: open_session(load(model)) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in sessions}
    end = time.perf_counter() + seconds
    for number in range(WARM_UP + rounds):
        for name, session in sessions.items():
            start = time.perf_counter()
            session.run(None, dict(feed))
            times[name].append(time.perf_counter() - start)
        if number >= WARM_UP + 5 and time.perf_counter() > end:
            break
    return {name: statistics.median(found[WARM_UP:]) for name, found in times.items()}
