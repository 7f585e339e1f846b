"""What every algorithm configuration of the torch dialect is: a value with a name, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from quark.errors import ConfigError, unknown


@dataclass
class AlgoConfig:
    """Base of the algorithms; ``name`` tells them apart in files.

    Attributes:
        registry: the classes by name, those of users too.
        layers: names and globs of the layers that are tuned; empty: all. For algorithms that tune quantized weights.
    """

    registry: ClassVar[dict[str, type[AlgoConfig]]] = {}
    name: str = ""
    layers: list[str] = field(default_factory=list, kw_only=True)

    def __init_subclass__(cls) -> None:
        AlgoConfig.registry[cls.name] = cls

    def __post_init__(self) -> None:
        if self.name != type(self).name:
            raise ConfigError(f"{type(self).__name__}: name is {type(self).name!r}, not {self.name!r}")
        self.check()

    def check(self) -> None:
        """Raise ``ConfigError`` for values that cannot work."""

    def need(self, condition: bool, field: str, allowed: str) -> None:
        """Raise unless ``condition``, in a sentence about ``field``."""
        if not condition:
            raise ConfigError(f"{type(self).__name__}: {field}={getattr(self, field)!r} must be {allowed}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``layers`` only where it says something, since other tools do not know it."""
        values = asdict(self)
        return {key: value for key, value in values.items() if key != "layers" or value}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> AlgoConfig:
        """The algorithm that ``to_dict``, or a file of the peer, describes.

        Raises:
            ConfigError: an unknown algorithm or field; the nearest is shown. Or no dictionary.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"the configuration of an algorithm is a dictionary, not {data!r:.80}")
        values = {LEGACY_FIELDS.get(key, key): value for key, value in data.items() if key not in DROPPED}
        name = LEGACY_NAMES.get(str(values.get("name", "")), values.get("name"))
        if name not in AlgoConfig.registry:
            raise ConfigError(unknown("algorithm", name, AlgoConfig.registry))
        cls = AlgoConfig.registry[name]
        allowed = [item.name for item in fields(cls)]
        for key in values:
            if key not in allowed:
                raise ConfigError(unknown(f"field of {cls.__name__}", key, allowed))
        return cls(**{**values, "name": name})


LEGACY_NAMES = {"quarot": "rotation", "smoothquant": "smooth"}
LEGACY_FIELDS = {"random": "random_r1"}
DROPPED = ("num_attention_heads", "num_key_value_heads")  # found from the model
