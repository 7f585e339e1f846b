"""Mixed precision of a PyTorch model: which candidate each layer gets, so that a metric meets its target at least cost.

    sensitivities → integer programming → the whole plan quantized for real and measured → … → a configuration file

``quark.search`` decides; this module measures. The model is quantized in place for every measurement and put back.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from quark.errors import ConfigError, unknown
from quark.search.function import digest_of, load_function, number_of
from quark.search.ledger import Ledger, plan_key
from quark.search.loop import cheapest, within
from quark.search.plan_file import write_plan
from quark.search.target import Target, parse_target
from quark.search.values import BUDGETS, FLOAT, Found, Study, total
from quark.torch.bench import Site, lay_out, measure, running
from quark.torch.config_file import WHOLE, check_values, config_of
from quark.torch.digest import digest_of_samples
from quark.torch.machine import MI300X, Machine
from quark.torch.quantizer import ModelQuantizer
from quark.torch.sensitivity import Progress, first_scheme, open_ledger, source_of, study

METRICS = ("kl", "perplexity", "sqnr", "cosine", "mse")


@dataclass(frozen=True)
class Whole:
    """Measures whole plans.

    Attributes:
        model: the float model.
        values: of the configuration file, without the plan's layers.
        samples: of the calibration.
        site: the data that plans are measured on.
        metric: its name.
        function: ``file.py:function`` of a metric of the user's.
        ledger: where finished measurements are kept.
        layers: names, in the order of the plans.
    """

    model: nn.Module
    values: Mapping[str, Any]
    samples: Sequence[Any]
    site: Site
    metric: str
    function: str | None
    ledger: Ledger
    layers: Sequence[str]

    def __call__(self, plan: Sequence[str]) -> float:
        """The metric of the model quantized by a plan."""
        key = plan_key(self.layers, plan, self.metric, digest_of_samples(self.site.samples))
        return self.ledger.number(key, lambda: self.measured(plan))

    def measured(self, plan: Sequence[str]) -> float:
        """Quantize, measure, and put the float model back."""
        chosen = dict(zip(self.layers, plan, strict=True))
        with ExitStack() as undo:
            if set(plan) != {FLOAT} or self.values.get("layers"):
                values = {**self.values, "layers": {**chosen, **(self.values.get("layers") or {})}}
                ModelQuantizer(config_of(values, self.model)).quantize(self.model, self.samples, undo)
            return self.now()

    def now(self) -> float:
        """The metric of the model as it is."""
        if self.function is not None:
            with running(self.model):
                return number_of(load_function(self.function)(self.model), self.metric)
        return measure(self.model, self.site)[self.metric]


def search(
    model: nn.Module | str | Path,
    samples: Iterable[Any],
    candidates: Sequence[str],
    target: str | None = None,
    budget: str = "size",
    limit: float | None = None,
    config: Mapping[str, Any] | str | None = None,
    metric: str | None = None,
    evaluation: Iterable[Any] | None = None,
    workers: int = 1,
    ledger: str | Path | None = None,
    rounds: int = 8,
    compare: bool = False,
    progress: Progress | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    machine: Machine = MI300X,
) -> Found:
    """The cheapest plan that meets a target, or the most precise one within a limit; quantized for real and measured.

    Args:
        model: a float model, which is left as it was, or the folder of one.
        samples: of the calibration and of the trials of single layers.
        candidates: what a layer may become: schemes, ``scheme+gptq``, ``float``.
        target: such as ``perplexity<=32`` or ``kl<=0.01``; any name where ``metric`` is given.
        budget: ``size``, ``bits`` or ``latency``: what is to be small; latency is the roofline of ``machine``.
        limit: the most of ``budget``, in the place of a target: bytes, bits or seconds.
        config: a scheme, or keys and values of a configuration file: what holds for the whole model.
        metric: ``file.py:function``, called with the model, gives the metric of the target.
        evaluation: samples that plans are measured on; ``samples`` when omitted.
        workers: processes; more than one need the model as a folder.
        ledger: a JSON file that finished trials and measurements are kept in.
        rounds: plans that are measured, at most (and the most precise one, where none of them met the target).
        compare: also measure every candidate for all layers.
        progress: called with the number of finished trials and of all.
        device, trust_remote_code: for a model that is loaded from a folder.
        machine: of the latency.

    Raises:
        ConfigError: an unknown metric, budget or candidate, a target that cannot be reached (the best value is told),
            or a ledger of something else.
        ModelError, DataError: as ``ModelQuantizer.quantize_model``.
    """
    values = whole_values(config, candidates)
    goal = checked_goal(target, limit, budget, metric)
    if metric is not None:
        load_function(metric)
    source, kept = source_of(model, workers, device, trust_remote_code), list(samples)
    loaded = source.load()
    with tempfile.TemporaryDirectory(prefix="quark-", ignore_cleanup_errors=True) as folder, Ledger.held(ledger):
        site = lay_out(loaded, kept, made(Path(folder) / "trials"))
        name = goal.metric if goal.metric in ("sqnr", "cosine", "mse") and metric is None else "kl"
        book = open_ledger(ledger, loaded, site, values, f"{name} for {goal.metric} by {digest_of(metric)}")
        found = without_pinned(
            study(source, loaded, site, values, candidates, name, workers, book, progress, machine), values
        )
        other = site if evaluation is None else lay_out(loaded, list(evaluation), made(Path(folder) / "plans"))
        whole = Whole(loaded, values, kept, other, goal.metric, metric, book, found.layers)
        return solved(found, goal, limit, budget, whole, rounds, compare)


def whole_values(config: Mapping[str, Any] | str | None, candidates: Sequence[str]) -> dict[str, Any]:
    """Keys and values of what holds for the whole model.

    Raises:
        ConfigError: a candidate or value that cannot work, or a whole ``QConfig``.
    """
    first = first_scheme(candidates)
    values: dict[str, Any] = (
        {"scheme": first} if config is None else {"scheme": config} if isinstance(config, str) else {}
    )
    values |= {} if config is None or isinstance(config, str) else dict(config)
    if WHOLE in values:
        raise ConfigError("a search needs a configuration file with the key scheme, not a whole QConfig")
    check_values(values)
    return values


def checked_goal(target: str | None, limit: float | None, budget: str, function: str | None) -> Target:
    """The target; for a limit one that everything meets.

    Raises:
        ConfigError: neither or both, or an unknown metric or budget.
    """
    if budget not in BUDGETS:
        raise ConfigError(unknown("budget", budget, BUDGETS))
    if (target is None) == (limit is None):
        raise ConfigError("give either a target such as 'perplexity<=32' or a limit of the budget")
    if target is not None:
        return parse_target(target, METRICS, function is not None)
    return Target("kl" if function is None else function.rpartition(":")[2], False, math.inf)


def made(folder: Path) -> Path:
    """A new folder."""
    folder.mkdir()
    return folder


def without_pinned(found: Study, values: Mapping[str, Any]) -> Study:
    """The study without the layers that the configuration has decided about."""
    from fnmatch import fnmatchcase

    patterns = list(values.get("layers") or {})
    kept = [t for t in found.trials if not any(t.layer == p or fnmatchcase(t.layer, p) for p in patterns)]
    if not kept:
        raise ConfigError("the configuration names a scheme for every layer, so there is nothing to search")
    return Study(tuple(kept), found.metric, found.samples, found.seconds)


def solved(
    found: Study, goal: Target, limit: float | None, budget: str, whole: Whole, rounds: int, compare: bool
) -> Found:
    """The plan and what it costs."""
    if limit is None:
        plan, value, count = cheapest(found, budget, goal, whole, rounds)
    else:
        plan = within(found, budget, limit)
        value, count = whole(plan), 1
    costs = {name: total(found, name, plan) for name in found.trials[0].costs}
    uniform = {}
    for name in found.candidates if compare else ():
        if all(found.of(layer, name) is not None for layer in found.layers):
            same = (name,) * len(plan)
            uniform[name] = whole(same), {key: total(found, key, same) for key in costs}
    whole.ledger.settle()
    return Found(dict(zip(found.layers, plan, strict=True)), goal.metric, value, costs, count, found, uniform)


def save_plan(
    path: Path, config: Mapping[str, Any] | str | None, found: Found, target: str | None, budget: str
) -> None:
    """Write a plan as a configuration file that ``quark torch quantize --config`` reads.

    Args:
        path: ends in .yaml, .yml or .json.
        config: as of ``search``.
        found: what it returned.
        target, budget: what was asked for, for the reader of the file.
    """
    values = whole_values(config, found.study.candidates)
    asked = f"{target}, {budget} as small as possible" if target else f"least loss within the limit of {budget}"
    summary = {"target": asked, "measured_on": found.study.samples, found.metric: found.value, **found.costs}
    layers = {**found.layers, **(values.get("layers") or {})}
    head = (
        f"A mixed-precision plan: {asked}.",
        f"Measured on the whole quantized model: {found.metric} {found.value:.6g}.",
        "Lines under layers: a scheme (`quark torch schemes`), with +gptq and the like behind, or float.",
        "Edit them, and run: quark torch quantize MODEL_DIR -o OUT_DIR --config THIS_FILE --data TEXT",
    )
    write_plan(path, {**values, "found": summary, "layers": layers}, notes_of(found), head)


def notes_of(found: Found) -> dict[str, str]:
    """For every layer: what it loses alone under what it got, and under the other candidates."""
    notes = {}
    for layer, name in found.layers.items():
        trials = [trial for trial in found.study.trials if trial.layer == layer]
        own = next(trial for trial in trials if trial.candidate == name)
        others = ", ".join(f"{t.candidate} {t.loss:.2g}" for t in trials if t is not own)
        notes[layer] = f"alone {own.loss:.2g}; {others}"
    return notes
