"""``sqnr>=30``, ``perplexity<=32``, ``top1>=0.85``: what a plan has to reach.

The built-in metrics have a side on which they are better; a metric of the user's own has the side that is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

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

    def goal(
        self, target: str | None, limit: float | None, budget: str, function: str | None, candidates: Sequence[str] = ()
    ) -> Target:
        """The target; for a limit one that everything meets.

        Args:
            target, limit: one of them: what is to be reached, or the most of ``budget``.
            budget: a name in ``BUDGETS``, or the file of a table of energies.
            function: ``file.py:function`` of a metric of the user's.
            candidates: what the table must have lines for.

        Raises:
            ConfigError: neither or both, or an unknown metric or budget.
        """
        from quark.search.energy import check_table, is_table, read_table  # a quantization has no budget

        if is_table(budget):
            check_table(read_table(budget), candidates, self.types)
        elif budget not in BUDGETS:
            raise ConfigError(unknown("budget", budget, BUDGETS))
        check_one(target, limit, self.example)
        if function is not None:
            load_function(function)
        if target is not None:
            return parse_target(target, self.metrics, function is not None)
        least = METRICS[self.usual]
        name = self.usual if function is None else function.rpartition(":")[2]
        return Target(name, least, -math.inf if least else math.inf)
