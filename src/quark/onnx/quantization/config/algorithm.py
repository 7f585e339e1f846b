"""The algorithms of ``algo_config``: plain frozen values with every field checked by name when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from quark.errors import ConfigError, unknown
from quark.onnx.quantization.config.algo_base import AlgoConfig, is_number, is_whole
from quark.onnx.quantization.config.finetune import AdaQuantConfig, AdaRoundConfig

__all__ = [
    "ALGO_NAME_TO_CLASS",
    "AdaQuantConfig",
    "AdaRoundConfig",
    "AlgoConfig",
    "BiasCorrectionConfig",
    "CLEConfig",
    "ChannelEqualizationConfig",
    "checked",
    "from_dict",
]


@dataclass(frozen=True)
class CLEConfig(AlgoConfig):
    """Cross-layer equalization of neighbouring Conv and Gemm layers before anything is quantized.

    Attributes:
        cle_balance_method: "max": channels are compared by their largest magnitude.
        cle_steps: times the whole model is gone through; -1 until nothing changes any more.
        cle_weight_threshold: channels whose largest magnitudes on both sides sum to less stay as they are.
        cle_scale_append_bias: count the bias as one more weight of its channel.
        cle_scale_use_threshold: use ``cle_weight_threshold``.
        cle_total_layer_diff_threshold: with ``cle_steps=-1``, the sum of mean weight changes that counts as nothing.
    """

    name: ClassVar[str] = "cle"
    cle_balance_method: str = "max"
    cle_steps: int = 1
    cle_weight_threshold: float = 0.5
    cle_scale_append_bias: bool = True
    cle_scale_use_threshold: bool = True
    cle_total_layer_diff_threshold: float = 1.9e-7

    def __post_init__(self) -> None:
        self._require("cle_balance_method", self.cle_balance_method == "max", "allowed: 'max'")
        whole = type(self.cle_steps) is int and (self.cle_steps > 0 or self.cle_steps == -1)
        self._require("cle_steps", whole, "it is a positive number of steps, or -1 for until nothing changes")
        for field in ("cle_weight_threshold", "cle_total_layer_diff_threshold"):
            self._require(field, is_number(getattr(self, field), 0), "it is a number of at least 0")
        for field in ("cle_scale_append_bias", "cle_scale_use_threshold"):
            self._require(field, isinstance(getattr(self, field), bool), "it is True or False")


@dataclass(frozen=True)
class BiasCorrectionConfig(AlgoConfig):
    """Move the bias of every quantized Conv, ConvTranspose and Gemm so that its channels keep their means."""

    name: ClassVar[str] = "bias_correction"


@dataclass(frozen=True)
class ChannelEqualizationConfig(AlgoConfig):
    """Scale channels between convolutions so that weights and activations can share one scale per tensor.

    Like ``CLEConfig``, but it measures the activations, and goes through SiLU, Concat and pooling. For power-of-two
    scales, and networks whose channels differ widely.

    Attributes:
        steps: times all chains are gone through.
        through_silu: scale through u · Sigmoid(u) as well, which takes one Mul more per layer.
        widest: largest ratio of two scales of one layer.
        data_size: samples used at most.
    """

    name: ClassVar[str] = "channel_equalization"
    steps: int = 3
    through_silu: bool = True
    widest: float = 64.0
    data_size: int = 64

    def __post_init__(self) -> None:
        for field in ("steps", "data_size"):
            self._require(field, is_whole(getattr(self, field), 1), "it is a whole number of at least 1")
        self._require("through_silu", isinstance(self.through_silu, bool), "it is True or False")
        self._require("widest", is_number(self.widest, 1), "it is a number of at least 1")


ALGO_NAME_TO_CLASS: dict[str, type[AlgoConfig]] = {
    kind.name: kind
    for kind in (CLEConfig, ChannelEqualizationConfig, BiasCorrectionConfig, AdaRoundConfig, AdaQuantConfig)
}


def from_dict(data: Mapping[str, Any]) -> AlgoConfig:
    """The configuration that ``to_dict`` wrote.

    Raises:
        ConfigError: no such algorithm, or a field that it does not have.
    """
    given = dict(data)
    name = given.pop("name", None)
    if name not in ALGO_NAME_TO_CLASS:
        raise ConfigError(unknown("algorithm", name, ALGO_NAME_TO_CLASS))
    kind = ALGO_NAME_TO_CLASS[name]
    known = [f.name for f in fields(kind)]
    for key in given:
        if key not in known:
            raise ConfigError(unknown(f"field of {kind.__name__}", key, known))
    return kind(**given)


def checked(algorithms: Any, field: str = "algo_config") -> tuple[AlgoConfig, ...]:
    """The entries of an ``algo_config`` list.

    Raises:
        ConfigError: an entry that is no algorithm configuration, or an algorithm that is listed twice.
    """
    if isinstance(algorithms, AlgoConfig) or not isinstance(algorithms, (list, tuple)):
        raise ConfigError(f"{field} is a list of algorithm configurations such as CLEConfig(), not {algorithms!r}")
    for entry in algorithms:
        if not isinstance(entry, AlgoConfig) or not entry.name:
            kinds = [kind.__name__ for kind in ALGO_NAME_TO_CLASS.values()]
            shown = entry.__name__ if isinstance(entry, type) else entry
            raise ConfigError(f"{field}: {unknown('algorithm', shown, kinds)}")
    names = [entry.name for entry in algorithms]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{field}: {ALGO_NAME_TO_CLASS[name].__name__} is listed {names.count(name)} times")
    return tuple(algorithms)
