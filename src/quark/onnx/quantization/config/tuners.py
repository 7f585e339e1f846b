"""Algorithms for single layers: what stands behind a candidate, as in ``uint8/int4+adaround``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from quark.algorithms.names import ONNX, parted
from quark.algorithms.own import OWN
from quark.errors import ConfigError, unknown
from quark.files.untrusted import parse_yaml
from quark.onnx.quantization.config.algorithm import (
    ALGO_NAME_TO_CLASS,
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoRoundConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    from_dict,
)

#: The settings that presets have.
_PRESET: dict[str, Any] = {"data_size": 1000, "batch_size": 2, "num_iterations": 1000, "early_stop": True}


@cache
def preset_tuners() -> dict[str, AlgoConfig]:
    """The package's own, with the settings that presets have; made when first asked for."""
    return {
        "adaround": replace(AdaRoundConfig(), **_PRESET),
        "adaquant": replace(AdaQuantConfig(), **_PRESET),
        "autoround": AutoRoundConfig(),
        "gptq": GPTQConfig(),
        "gptaq": GPTAQConfig(),
        "qronos": QronosConfig(),
    }


def tuners() -> dict[str, AlgoConfig]:
    """The algorithms that can tune single layers, those that are registered too."""
    return {**preset_tuners(), **{name: from_dict({"name": name}) for name in OWN}}


def algorithm(text: str) -> AlgoConfig:
    """The algorithm that ``--algorithm`` names, with the settings that presets have, or those behind a colon.

    Args:
        text: ``adaround``, or ``adaround:num_iterations=100,early_stop=false``; a file before the name, as in
            ``mine.py:descend``, is where a registered algorithm came from.

    Raises:
        ConfigError: no such algorithm or setting; the nearest name is shown.
    """
    name, _, told = parted(text)[1].partition(":")
    full = ONNX.get(name, name)
    if full not in ALGO_NAME_TO_CLASS:
        raise ConfigError(unknown("--algorithm", name, [*ALGO_NAME_TO_CLASS, *ONNX]))
    found = preset_tuners()[full] if full in preset_tuners() else from_dict({"name": full})
    return from_dict({**found.to_dict(), **_settings(text, told)}) if told else found


def _settings(text: str, told: str) -> dict[str, Any]:
    """``name=value`` pairs, the values as YAML has them."""
    pairs = [part.partition("=") for part in told.split(",")]
    if any(not sign or not value for _, sign, value in pairs):
        raise ConfigError(f"--algorithm {text!r}: write settings as in adaround:num_iterations=100,early_stop=false")
    return {
        name.strip(): parse_yaml(value, f"--algorithm {text!r}: the value {value!r:.80}") for name, _, value in pairs
    }


def split(candidate: str) -> tuple[str, tuple[str, ...]]:
    """Specs and algorithms of ``specs+algorithm``.

    Raises:
        ConfigError: an algorithm that cannot tune single layers.
    """
    name, *algorithms = candidate.split("+")
    for algorithm in algorithms:
        if algorithm not in tuners():
            raise ConfigError(f"the candidate {candidate!r}: {unknown('algorithm', algorithm, tuners())}")
    return name, tuple(algorithms)


def with_tuners(algorithms: Sequence[AlgoConfig], layers: Mapping[str, str]) -> list[AlgoConfig]:
    """The algorithms of a configuration and those of its single layers.

    An algorithm that the configuration has for all layers stays as it is; one that it has for some gets the others too,
    with the settings it has.
    """
    wanted: dict[str, list[str]] = {}
    for layer, value in layers.items():
        for name in split(value)[1]:
            wanted.setdefault(name, []).append(layer)
    found = list(algorithms)
    for name, names in wanted.items():
        place = next((k for k, one in enumerate(found) if one.name == name), None)
        if place is None:
            found.append(replace(tuners()[name], layers=tuple(names)))  # type: ignore[call-arg]
            continue
        known: Any = found[place]
        if name in tuners() and known.layers:
            found[place] = replace(known, layers=tuple(dict.fromkeys([*known.layers, *names])))
    return found
