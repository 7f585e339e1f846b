"""The configuration that keys and values of a file stand for (``config_file.py``), of one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from quark.errors import ModelError
from quark.search.values import FLOAT
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.config.model import QConfig
from quark.torch.config_file import WHOLE, check_values, split
from quark.torch.template import LLMTemplate


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
