"""What every algorithm configuration of the torch dialect is: a value with a name, checked when it is made."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from quark.algorithms.names import TORCH
from quark.algorithms.own import OwnAlgorithm
from quark.errors import ConfigError, unknown


@dataclass
class AlgoConfig:
    """Base of the algorithms; ``name`` tells them apart in files.

    Attributes:
        registry: the classes by name, those of users too.
        layers: names and globs of the layers that are tuned; empty: all. For algorithms that tune quantized weights.
    """

    registry: ClassVar[dict[str, type[AlgoConfig]]] = {}
    own: ClassVar[OwnAlgorithm | None] = None
    name: str = ""
    layers: list[str] = field(default_factory=list, kw_only=True)

    def __init_subclass__(cls) -> None:
        AlgoConfig.registry[cls.name] = cls

    def __post_init__(self) -> None:
        if self.name != type(self).name:
            raise ConfigError(f"{type(self).__name__}: name is {type(self).name!r}, not {self.name!r}")
        for name, hint in types_of(type(self)).items():
            if not is_of(getattr(self, name), hint):
                raise ConfigError(wrong_type(type(self), name, getattr(self, name), hint))
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
        name = TORCH.get(str(values.get("name", "")), values.get("name"))
        if not isinstance(name, str) or name not in AlgoConfig.registry:
            raise ConfigError(unknown("algorithm", name if isinstance(name, str) else repr(name), AlgoConfig.registry))
        cls = AlgoConfig.registry[name]
        allowed = [item.name for item in fields(cls)]
        for key in values:
            if key not in allowed:
                raise ConfigError(unknown(f"field of {cls.__name__}", key, allowed))
        return cls(**{**values, "name": name})


LEGACY_FIELDS = {"random": "random_r1"}
DROPPED = ("num_attention_heads", "num_key_value_heads")  # found from the model


def types_of(owner: type[AlgoConfig]) -> dict[str, Any]:
    """Types of the fields by name; none of a user's class whose annotations name what only a function knows."""
    try:
        hints = get_type_hints(owner)
    except NameError:
        return {}
    return {item.name: hints[item.name] for item in fields(owner)}


def is_of(value: object, hint: Any) -> bool:
    """Whether a value is of the type of a field; what is not a number, text, list or dictionary is left to ``check``.

    A text or list that is left out may be None. Numbers are finite, and True is none.
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(is_of(value, one) for one in inner)
    if kind in (int, float):
        number: Any = value if isinstance(value, Integral if kind is int else Real) else math.inf
        return not isinstance(value, bool) and bool(abs(number) <= sys.float_info.max)
    if kind is list:
        return value is None or (isinstance(value, list | tuple) and all(is_of(one, inner[0]) for one in value))
    if kind is str:
        return value is None or isinstance(value, str)
    kinds: dict[Any, type] = {bool: bool, dict: Mapping, NoneType: NoneType}
    return isinstance(value, kinds.get(kind, object))


def wrong_type(owner: type, name: str, value: object, hint: Any) -> str:
    """The sentence about a value of another type than its field's."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    allowed = " or ".join(WORDS.get(get_origin(one) or one, str(one)) for one in kinds)
    return f"{owner.__name__}: {name}={value!r:.80} must be {allowed}"


WORDS = {
    int: "an integer",
    float: "a finite number",
    bool: "True or False",
    str: "text",
    list: "a list, each entry of its type",
    dict: "a dictionary",
    NoneType: "None",
}
