"""The configuration file of the ONNX flow (YAML or JSON): what ``quark onnx quantize --config`` reads.

preset: A8W8_CPU               # required
target: cpu                    # any or cpu; the preset's when omitted
options: {Percentile: 99.9}    # as --set
exclude: [head, ^/decoder/]    # nodes in float
algorithms: [{name: adaround, num_iterations: 500}]    # in the place of the preset's
layers:                        # single layers; later lines win at tensors that two layers share
  conv1: A16W8                 # a preset, two data types (uint8/int4@32), or float
  fc: uint8/int4+adaround      # and what tunes this layer's weights
calibrate: half                # of the samples every second one (all where they are fewer than 4), as auto does; or all
found: {…}                     # what a search measured; nothing reads it
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quark.errors import ConfigError, check_name, unknown
from quark.onnx.quantization.config.algorithm import from_dict
from quark.onnx.quantization.config.candidates import candidate
from quark.onnx.quantization.config.config import QuantizationConfig, get_default_config
from quark.onnx.quantization.config.tuners import split, with_tuners
from quark.search.plan_file import read_config

KEYS = ("preset", "target", "options", "exclude", "algorithms", "layers", "calibrate", "found")
TARGETS = ("any", "cpu")
SHARES = ("all", "half")


def load_config(path: Path) -> QuantizationConfig:
    """The configuration in a file.

    Raises:
        ConfigError: the file cannot be read, or a key or value cannot work; the message names it.
    """
    values = read_values(path)
    try:
        return config_of(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_values(path: Path) -> dict[str, Any]:
    """The keys and values of a file; ``config_of`` looks at what they mean."""
    return read_config(path, KEYS)


def config_of(values: Mapping[str, Any]) -> QuantizationConfig:
    """The configuration that the keys and values of a file stand for."""
    if not isinstance(values.get("preset"), str):
        raise ConfigError("the key preset is required: the name of a preset (`quark presets` lists them)")
    config = get_default_config(values["preset"])
    share_of(values)
    if values.get("target") is not None:
        check_name("target", values["target"], TARGETS)
        config.target = values["target"]
    config.extra_options.update(_checked(values, "options", dict))
    config.nodes_to_exclude = [*config.nodes_to_exclude, *map(str, _checked(values, "exclude", list))]
    if values.get("algorithms") is not None:
        config.algorithms = [from_dict(entry) for entry in _checked(values, "algorithms", list)]
    layers = _checked(values, "layers", dict)
    config.layers = {str(name): _layer(str(name), value) for name, value in layers.items()}
    config.algorithms = with_tuners(config.algorithms, {str(name): value for name, value in layers.items()})
    return config


def share_of(values: Mapping[str, Any]) -> str:
    """Which of the samples calibrate: a word of ``SHARES``.

    Raises:
        ConfigError: another word.
    """
    share = values.get("calibrate") or "all"
    if share not in SHARES:
        raise ConfigError(unknown("calibrate", str(share), SHARES))
    return str(share)


def _layer(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        raise ConfigError(f"layers: {name!r} is {value!r}; it must be a preset, two data types or 'float'")
    try:
        return candidate(split(value)[0])
    except ConfigError as error:
        raise ConfigError(f"layers: {name!r}: {error}") from error


def _checked(values: Mapping[str, Any], key: str, kind: type) -> Any:
    value = values.get(key)
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"the key {key} must be a {'mapping' if kind is dict else 'list'}, not {value!r}")
    return value or kind()
