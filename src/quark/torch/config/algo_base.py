"""What every algorithm configuration of the torch dialect is: a value with a name, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any, ClassVar

from quark.algorithms.names import TORCH
from quark.algorithms.own import OwnAlgorithm
from quark.config.algorithm import AlgorithmSettings, plain, read
from quark.dataclass import dataclass


@dataclass
class AlgoConfig(AlgorithmSettings):
    """Base of the algorithms; ``name`` tells them apart in files.

    Attributes:
        registry: the classes by name, those of users too.
        name: of the algorithm; each class has its own, which cannot be changed.
        layers: names and globs of the layers that are tuned; empty: all. For algorithms that tune quantized weights.
    """

    NONE_IS_EMPTY: ClassVar[bool] = True
    registry: ClassVar[dict[str, type[AlgoConfig]]] = {}
    own: ClassVar[OwnAlgorithm | None] = None
    name: str = ""
    layers: list[str] = field(default_factory=list, kw_only=True)

    def __init_subclass__(cls) -> None:
        AlgoConfig.registry[cls.name] = cls

    def __post_init__(self) -> None:
        self.need(self.name == type(self).name, "name", repr(type(self).name))
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``layers`` only where it says something, since other tools do not know it."""
        values = asdict(self)
        return {key: plain(value) for key, value in values.items() if key != "layers" or value}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> AlgoConfig:
        """The algorithm that ``to_dict``, or a file of the peer, describes.

        Raises:
            ConfigError: an unknown algorithm or field; the nearest is shown. Or no dictionary.
        """
        if isinstance(data, Mapping):
            data = {LEGACY_FIELDS.get(key, key): value for key, value in data.items() if key not in DROPPED}
        return read(data, TORCH, AlgoConfig.registry)


LEGACY_FIELDS = {"random": "random_r1"}
DROPPED = ("num_attention_heads", "num_key_value_heads")  # found from the model
