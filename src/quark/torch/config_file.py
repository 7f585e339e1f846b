"""The configuration file of the torch flow (YAML or JSON): what ``quark torch quantize --config`` reads.

    scheme: int4_wo_32                 # required
    algorithms: [gptq]                 # in order
    kv_cache: fp8
    exclude: [lm_head]                 # stay float, in the place of the usual ones
    also_exclude: ["*.mlp.gate"]       # beside them
    layers:                            # single layers or globs: a scheme, with +algorithm behind, or float
      model.layers.0.mlp.down_proj: int8_wo_per_channel
      model.layers.0.mlp.up_proj: int4_wo_32+gptq
    found: {…}                         # what a search measured; nothing reads it

A file that holds ``global_quant_config`` instead is a whole ``QConfig`` as ``to_dict`` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from quark.algorithms.own import OWN
from quark.errors import ConfigError, ModelError, check_names
from quark.search.plan_file import read_config
from quark.search.values import FLOAT
from quark.torch.algorithms.registry import ALGORITHMS, chooses_codes
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.config.model import QConfig
from quark.torch.config.schemes import GGUF, base_name, scheme
from quark.torch.template import LLMTemplate

KEYS = ("scheme", "algorithms", "kv_cache", "exclude", "also_exclude", "layers", "found")
WHOLE = "global_quant_config"


def read_values(path: Path) -> dict[str, Any]:
    """The keys and values of a file, checked as far as that needs no model.

    Raises:
        ConfigError: the file cannot be read, or a key or value cannot work; the message names it.
    """
    names = [field.name for field in fields(QConfig)]
    values = read_config(path, (*KEYS, *(name for name in names if name not in KEYS)))
    try:
        check_values(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return values


def check_values(values: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for keys and values that can work with no model."""
    if WHOLE in values:
        QConfig.from_dict(values)
        return
    strange = [key for key in values if key not in KEYS]
    if strange:
        raise ConfigError(f"the key {strange[0]} belongs to a whole QConfig, which has {WHOLE}; here are {KEYS}")
    if not isinstance(values.get("scheme"), str):
        raise ConfigError("the key scheme is required: the name of a scheme (`quark torch schemes` lists them)")
    scheme(values["scheme"])
    lists = ("algorithms", "exclude", "also_exclude")
    for key, kind in (*((key, list) for key in lists), ("layers", dict), ("kv_cache", str)):
        if values.get(key) is not None and not isinstance(values[key], kind):
            raise ConfigError(f"the key {key} must be a {kind.__name__}, not {values[key]!r}")
    for name, value in (values.get("layers") or {}).items():
        if not isinstance(value, str):
            raise ConfigError(f"layers: {name!r} is {value!r}; it must be a scheme or {FLOAT!r}")
        try:
            if value != FLOAT:
                check_candidate(value)
        except ConfigError as error:
            raise ConfigError(f"layers: {name!r}: {error}") from error


def schemes_of(values: Mapping[str, Any]) -> list[str]:
    """The schemes that keys and values name, whatever finds their ranges; none of a whole ``QConfig``."""
    named = [] if WHOLE in values else [values["scheme"], *(values.get("layers") or {}).values()]
    return [base_name(split(value)[0]) for value in named if value != FLOAT]


def config_of(values: Mapping[str, Any], model: nn.Module) -> QConfig:
    """The configuration that keys and values stand for, of one model.

    Raises:
        ConfigError: as ``check_values``.
    """
    check_values(values)
    if WHOLE in values:
        return QConfig.from_dict(values)
    layers = values.get("layers") or {}
    chosen = {name: split(value)[0] for name, value in layers.items() if value != FLOAT}
    template = template_of(model, values.get("exclude") is not None and not values.get("kv_cache"))
    config = template.get_config(
        values["scheme"],
        values.get("algorithms") or None,
        values.get("kv_cache"),
        layer_config=chosen,
        exclude_layers=values.get("exclude"),
    )
    floats = [name for name, value in layers.items() if value == FLOAT]
    algorithms = [*(config.algo_config or []), *tuning_of(layers, values.get("algorithms") or ())]
    more = values.get("also_exclude") or ()
    return replace(config, exclude=[*config.exclude, *more, *floats], algo_config=algorithms or None)


def tuning_of(layers: Mapping[str, str], everywhere: Iterable[str]) -> list[AlgoConfig]:
    """The algorithms of single layers, each once with the layers that it is for."""
    found: dict[str, list[str]] = {}
    for layer, value in layers.items():
        for name in split(value)[1]:
            found.setdefault(name, []).append(layer)
    return [AlgoConfig.registry[name](layers=names) for name, names in found.items() if name not in everywhere]


def split(candidate: str) -> tuple[str, list[str]]:
    """Scheme and algorithms of ``scheme+algorithm``."""
    name, *algorithms = candidate.split("+")
    return name, algorithms


def check_candidate(candidate: str) -> None:
    """Raise for a candidate that is unknown.

    Raises:
        ConfigError: no such scheme or algorithm, or an algorithm that changes the float model as a whole.
    """
    name, algorithms = split(candidate)
    scheme(name)
    tuning = [*(row.config.name for row in ALGORITHMS if row.tunes), *OWN]
    check_names("algorithm for single layers", algorithms, tuning)
    for algorithm in algorithms:
        if name in GGUF and chooses_codes(algorithm):
            raise ConfigError(f"{candidate!r}: {name} chooses codes with its scales, so {algorithm!r} cannot")


def template_of(model: nn.Module, told: bool) -> LLMTemplate:
    """The template of a model; an empty one for a model that is not a language model.

    Args:
        model: any model.
        told: whether the configuration says which layers stay float.

    Raises:
        ModelError: a language model that is not recognized, and nobody says which layers stay float.
    """
    try:
        return LLMTemplate.for_model(model)
    except ModelError:
        if not told and hasattr(model, "get_output_embeddings"):
            raise
        return LLMTemplate(type(model).__name__)
