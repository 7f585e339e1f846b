"""Configuration files: YAML or JSON to read, and the one that a search writes, made to be edited by hand.

scheme: int4_wo_32          # of every layer that no line below names (ONNX: preset)
layers:
  model.layers.0.mlp.down_proj: int8_wo_per_channel   # loss 0.0042 under int4_wo_32
  model.layers.1.mlp.down_proj: float
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quark.errors import ConfigError, unknown
from quark.files.ours import MARK
from quark.files.outputs import Output, write_output
from quark.files.untrusted import read_settings
from quark.search.values import Found, Trial

KINDS = (".yaml", ".yml", ".json")


def read_config(path: Path, allowed: Sequence[str]) -> dict[str, Any]:
    """The mapping in a configuration file.

    Args:
        path: a YAML or JSON file.
        allowed: the keys that it may have.

    Raises:
        ConfigError: no such file, not YAML or JSON, not a mapping, an unknown key (the nearest is shown).
    """
    check_kind(path, "--config")
    found = read_settings(path, "--config: the file")
    if not isinstance(found, Mapping):
        raise ConfigError(f"--config: {str(path)!r} must hold a mapping with keys among {', '.join(allowed)}")
    if {"tensors", "nodes"} <= {*found}:
        raise ConfigError(f"--config {path}: a plan that --plan wrote; --plan-from {path} repeats its decisions")
    for key in found:
        if key not in allowed:
            raise ConfigError(f"--config {path}: {unknown('key', key, allowed)}")
    return dict(found)


def check_kind(path: Path, option: str) -> None:
    """Raise where a configuration file has no known kind."""
    if path.suffix not in KINDS:
        raise ConfigError(f"{option} {str(path)!r}: a configuration file ends in {', '.join(KINDS)}")


def write_plan(path: Path, values: Mapping[str, Any], notes: Mapping[str, str], head: Sequence[str]) -> None:
    """Write a plan, whole or not at all.

    Raises:
        OutputError: it cannot be written.

    Args:
        path: ends in .yaml, .yml or .json.
        values: what the file says; ``layers`` is a mapping.
        notes: a remark for a layer's line (YAML only).
        head: lines of comment above (YAML only).
    """
    if "found" in values:
        values = {**values, "found": {"by": MARK, **values["found"]}}
    text = json.dumps(values, indent=2) + "\n" if path.suffix == ".json" else _yaml(values, notes, head)
    write_output(Output(path, "the plan"), text)


def loss_words(trial: Trial, metric: str) -> str:
    """What a layer loses alone, as people read it: the measure that a study ranks by; what a function of the user's
    returned."""
    value = trial.metrics.get(metric, trial.metrics.get("value", trial.loss))
    return f"{value:.1f} dB" if metric == "sqnr" else f"{value:.4g}"


def notes_of(found: Found) -> dict[str, str]:
    """For every layer: what it loses alone under what it got and under the other candidates."""
    notes, metric = {}, found.study.metric
    for layer, name in found.layers.items():
        one = found.study.of(layer, name)
        if one is not None:
            others = [t for t in found.study.trials if t.layer == layer and t.candidate != name]
            said = ", ".join(f"{trial.candidate} {loss_words(trial, metric)}" for trial in others)
            notes[layer] = f"{one.kind}, alone {loss_words(one, metric)}; {said}"
    return notes


def write_found(path: Path, values: Mapping[str, Any], found: Found, asked: str, how: Sequence[str]) -> None:
    """Write the plan that a search has found, with what was measured on it.

    Args:
        path: as of ``write_plan``.
        values: of the configuration that the search was under; ``found``: what was asked for.
        found: the plan.
        asked: what was asked for, in words.
        how: what may stand in the file, and the command that reads it.
    """
    reported = {} if found.reported is None else {"reported": found.reported}
    figures = {"met": found.met, "measured_on": found.study.samples, found.metric: found.value, **reported}
    said = f"Measured on the whole quantized model: {found.metric} {found.value:.6g}"
    if found.reported is None:
        said += ", on the samples that chose it."
    else:
        said += f" on the samples that chose it, {found.reported:.6g} on samples that decided nothing."
    told = {**values["found"], **figures, **found.costs}
    layers = {**found.layers, **(values.get("layers") or {})}
    head = (f"A mixed-precision plan: {asked}.", said, *how)
    write_plan(path, {**values, "found": told, "layers": layers}, notes_of(found), head)


def base_values(config: Mapping[str, Any] | str, key: str) -> dict[str, Any]:
    """Keys and values of a configuration file, of which the name under ``key`` may be all that is given."""
    return {key: config} if isinstance(config, str) else dict(config)


def question_words(target: str | None, budget: str) -> str:
    """What a search was asked for."""
    return f"{target}, {budget} as small as possible" if target else f"least loss within the limit of {budget}"


def _yaml(values: Mapping[str, Any], notes: Mapping[str, str], head: Sequence[str]) -> str:
    import yaml

    lines = [f"# {line}".rstrip() for line in head]
    for key, value in values.items():
        if key != "layers":
            lines += yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True).splitlines()
    lines.append("layers:" if values["layers"] else "layers: {}")
    entries = [(f"  {_scalar(name)}: {_scalar(value)}", notes.get(name)) for name, value in values["layers"].items()]
    width = min(max((len(entry) for entry, _ in entries), default=0), 72)
    lines += [entry if note is None else f"{entry:<{width}}  # {note}" for entry, note in entries]
    return "\n".join(lines) + "\n"


def _scalar(text: str) -> str:
    """A string as YAML writes it, in quotes where it must be; always on one line."""
    import yaml

    return yaml.safe_dump(text, width=float("inf"), allow_unicode=True).splitlines()[0]
