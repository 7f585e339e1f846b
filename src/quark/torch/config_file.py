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

Nothing here needs torch: mistakes are told before it is loaded. ``from_values.py`` has what a file means for a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from quark.algorithms.names import TORCH, TUNING
from quark.algorithms.own import OWN, chooses_codes
from quark.errors import ConfigError, check_names
from quark.search.plan_file import read_config
from quark.search.values import FLOAT
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.config.model import QConfig
from quark.torch.config.schemes import GGUF, base_name, scheme

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
    check_names("algorithm", map(str, values.get("algorithms") or ()), [*AlgoConfig.registry, *TORCH])
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
    check_names("algorithm for single layers", algorithms, [*TUNING, *OWN])
    for algorithm in algorithms:
        if name in GGUF and chooses_codes(algorithm):
            raise ConfigError(f"{candidate!r}: {name} chooses codes with its scales, so {algorithm!r} cannot")
