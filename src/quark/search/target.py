"""``sqnr>=30``, ``perplexity<=32``, ``top1>=0.85``: what a plan has to reach.

The built-in metrics have a side on which they are better; a metric of the user's own has the side that is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quark.dataclass import dataclass
from quark.errors import ConfigError, nearest, unknown
from quark.search.function import load_function
from quark.search.values import BUDGETS

#: Metrics that need no function: name -> whether more is better.
METRICS = {"sqnr": True, "psnr": True, "cosine": True, "mse": False, "kl": False, "perplexity": False}
#: The least and the largest value of metrics that have one; ``kept`` is a share.
RANGES = {"cosine": (-1.0, 1.0), "kept": (0.0, 1.0), "mse": (0.0, math.inf), "kl": (0.0, math.inf)}
RANGES["perplexity"] = (1.0, math.inf)
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


def check_reachable(said: str, metric: str, value: float) -> None:
    """Refuse a bound that says nothing or that no model meets; ``said``: as it was typed, with its option.

    Raises:
        ConfigError: the range of the metric.
    """
    if value == -math.inf:
        raise ConfigError(f"{said}: every model has a {metric} of -inf or more; write a finite number")
    least, largest = RANGES.get(metric, (-math.inf, math.inf))
    if not least <= value <= largest:
        allowed = f"from {least:g} to {largest:g}" if math.isfinite(largest) else f"{least:g} or more"
        raise ConfigError(f"{said}: {metric} is {allowed}, and never {value:g}")


def parse_target(text: str, known: Iterable[str], function: bool = False) -> Target:
    """The target that ``text`` writes.

    Args:
        text: as in the title of this module.
        known: the metrics of the flow.
        function: whether the user gave a function, whose metric may have any name.

    Raises:
        ConfigError: no metric, sign and number; an unknown metric; the side on which the metric is worse; a value that
            it never has.
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
    if not function:
        check_reachable(f"--target {text!r}", metric, value)
    return Target(metric, least, value)


#: A target for language models, for messages.
LANGUAGE = "perplexity<=32"


def check_one(target: str | None, limit: float | None, example: str) -> None:
    """Refuse a search that has neither a target nor a limit, or both; ``example``: a target, for the message.

    Raises:
        ConfigError: what is to be given.
    """
    if (target is None) == (limit is None):
        both = "" if target is None else ", not both"
        raise ConfigError(f"give a target such as {example!r} or a limit of the budget{both}")


@dataclass(frozen=True)
class SearchGoal:
    """What a search is asked for.

    Attributes:
        target: such as ``sqnr>=30``; any name where ``metric`` is given.
        budget: what is to be small: ``size``, ``bits``, ``latency``, or the file of a table of energies.
        limit: the most of ``budget``, in the place of a target: bytes, bits or seconds.
        metric: ``file.py:function``, called with the path of an ONNX model or a torch model, gives the metric of the
            target.
        evaluation: samples that plans are measured on, half to choose and half to report; all others then calibrate.
        rounds: plans that are measured, at most.
        compare: also measure every candidate for all layers.
        estimate: layers by a few passes, and more of them where the plan rests on them.
    """

    target: str | None = None
    budget: str = "size"
    limit: float | None = None
    metric: str | None = None
    evaluation: Any = None
    rounds: int = 8
    compare: bool = False
    estimate: bool = False


def goal_of(goal: SearchGoal | str) -> SearchGoal:
    """What is asked for, where it may be the target alone."""
    return SearchGoal(goal) if isinstance(goal, str) else goal


@dataclass(frozen=True)
class Asked:
    """What a flow can be asked for.

    Attributes:
        metrics: those that need no function.
        usual: the metric of a search within a limit.
        example: a target, for messages.
        types: ``inputs/weights`` of a candidate, for a table of energies.
    """

    metrics: tuple[str, ...]
    usual: str
    example: str
    types: Callable[[str], str]

    def target(self, goal: SearchGoal, candidates: Sequence[str] = ()) -> Target:
        """The target; for a limit one that everything meets.

        Args:
            goal: with a target or a limit.
            candidates: what a table of energies must have lines for.

        Raises:
            ConfigError: neither or both, or an unknown metric or budget.
        """
        from quark.search.energy import check_table, is_table, read_table  # a quantization has no budget

        function = goal.metric
        if is_table(goal.budget):
            check_table(read_table(goal.budget), candidates, self.types)
        elif goal.budget not in BUDGETS:
            raise ConfigError(unknown("budget", goal.budget, BUDGETS))
        check_one(goal.target, goal.limit, self.example)
        if function is not None:
            load_function(function)
        if goal.target is not None:
            return parse_target(goal.target, self.metrics, function is not None)
        least = METRICS[self.usual]
        name = self.usual if function is None else function.rpartition(":")[2]
        return Target(name, least, -math.inf if least else math.inf)
