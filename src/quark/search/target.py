"""``sqnr>=30``, ``perplexity<=32``, ``top1>=0.85``: what a plan has to reach.

The built-in metrics have a side on which they are better; a metric of the user's own has the side that is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from quark.errors import ConfigError, nearest, unknown

#: Metrics that need no function: name -> whether more is better.
METRICS = {"sqnr": True, "psnr": True, "cosine": True, "mse": False, "kl": False, "perplexity": False}
_WRITTEN = re.compile(r"^\s*([A-Za-z_][\w.-]*)\s*(>=|<=)\s*(\S+)\s*$")


@dataclass(frozen=True)
class Target:
    """A bound on a metric.

    Attributes:
        metric: its name.
        least: whether ``value`` is the least that is allowed, or the most.
        value: the bound.
    """

    metric: str
    least: bool
    value: float

    def met(self, value: float) -> bool:
        """Whether a measured value is good enough; NaN never is."""
        return value >= self.value if self.least else value <= self.value

    def better(self, value: float, other: float) -> bool:
        """Whether ``value`` is nearer to the good side than ``other``."""
        if math.isnan(value) or math.isnan(other):
            return math.isnan(other) and not math.isnan(value)
        return value > other if self.least else value < other

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.least else '<='} {self.value:g}"


def parse_target(text: str, known: Iterable[str], function: bool = False) -> Target:
    """The target that ``text`` writes.

    Args:
        text: as in the title of this module.
        known: the metrics of the flow.
        function: whether the user gave a function, whose metric may have any name.

    Raises:
        ConfigError: no metric, sign and number; an unknown metric; the side on which the metric is worse.
    """
    found, names = _WRITTEN.match(text), sorted(known)
    if found is None:
        raise ConfigError(f"--target {text!r}: write a metric, >= or <=, and a number, as in 'sqnr>=30'")
    metric, sign, number = found.groups()
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"--target {text!r}: {number!r} is not a number")
    if metric not in names and not function:
        own = (
            "" if nearest(metric, names) else ". For a metric of your own give its function: --metric FILE.py:FUNCTION"
        )
        raise ConfigError(unknown("metric of --target", metric, names) + own)
    least = sign == ">="
    if not function and METRICS[metric] != least:
        right = ">=" if METRICS[metric] else "<="
        side = "larger" if METRICS[metric] else "smaller"
        raise ConfigError(f"--target {text!r}: {metric} is better when it is {side}; write {metric}{right}{number}")
    return Target(metric, least, value)
