"""What the configuration of an algorithm is, for both dialects: fields of a type, each within a bound of its own.

A class says its bounds once, by field (``BOUNDS``); types are those of its annotations. What takes several fields
together is its ``check``. Files name an algorithm and its fields, which ``read`` makes a configuration of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, ClassVar, TypeVar, get_type_hints

import numpy as np

from quark.config.known_fields import KnownFields
from quark.dataclass import dataclass
from quark.errors import ConfigError, check_name, check_names, is_of, unknown, words_of


@dataclass(frozen=True)
class Allowed:
    """What a value of the right type may be: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


Bounds = Mapping[str, Allowed]

COUNT = Allowed("a positive integer", lambda value: value > 0)
INDEX = Allowed("an integer of 0 or more", lambda value: value >= 0)
POSITIVE = Allowed("positive", lambda value: value > 0)
NOT_NEGATIVE = Allowed("0 or more", lambda value: value >= 0)
RATIO = Allowed("1 or more", lambda value: value >= 1)
SHARE = Allowed("between 0 and 1", lambda value: 0 <= value <= 1)
SHARES = Allowed("None, or numbers between 0 and 1", lambda found: found is None or shares(found))
ON = Allowed("True", lambda value: value is True)


def shares(values: Any) -> bool:
    """Whether there are numbers, and all between 0 and 1."""
    return len(values) > 0 and all(0 <= value <= 1 for value in values)


def one_of(*allowed: object) -> Allowed:
    """One of these values."""
    return Allowed(" or ".join(map(repr, allowed)), lambda value: value in allowed)


_ROUNDS: Bounds = {"block_size": COUNT, "static_groups": ON}
_TRAINS: Bounds = {
    **dict.fromkeys(("num_iterations", "batch_size", "data_size"), COUNT),
    "fixed_seed": INDEX,
    "learning_rate": POSITIVE,
    "drop_ratio": SHARE,
}
#: With 1 or less the pull on a weight in the very middle of two codes is no number.
_FALLING = Allowed("two numbers above 1", lambda pair: len(pair) == 2 and min(pair) > 1)
#: What the settings may be that both dialects call alike, by algorithm.
ALIKE: Mapping[str, Bounds] = {
    "cle": {"cle_weight_threshold": NOT_NEGATIVE},
    "channel_equalization": {"steps": COUNT, "widest": RATIO},
    "smoothquant": {"alpha": SHARE},
    "svdquant": {"svd_rank": COUNT, "min_layer_size": INDEX, "smooth_alpha": SHARE, "alpha_candidates": SHARES},
    "gptq": {"block_size": COUNT},
    "gptaq": {**_ROUNDS, "damp_percent": NOT_NEGATIVE, "alpha": SHARE},
    "qronos": {**_ROUNDS, "alpha": POSITIVE, "beta": POSITIVE},
    "adaquant": _TRAINS,
    "adaround": {**_TRAINS, "reg_param": NOT_NEGATIVE, "warm_start": SHARE, "beta_range": _FALLING},
}


class AlgorithmSettings(KnownFields):
    """Base of the configurations of both dialects.

    Attributes:
        BOUNDS: field -> what its value may be, beyond its type.
        NONE_IS_EMPTY: a text or list may be None; files of AMD Quark's torch flow hold such.
    """

    BOUNDS: ClassVar[Bounds] = {}
    NONE_IS_EMPTY: ClassVar[bool] = False

    def __post_init__(self) -> None:
        owner: Any = type(self)  # hashable, as all classes are: mypy asks it of the instances
        for name, hint in types_of(owner).items():
            if not is_of(getattr(self, name), hint, self.NONE_IS_EMPTY):
                self.need(False, name, words_of(hint))
        for name, bound in self.BOUNDS.items():
            self.need(bound.holds(getattr(self, name)), name, bound.words)
        self.check()

    def check(self) -> None:
        """Raise ``ConfigError`` for values that cannot work together."""

    def need(self, condition: bool, field: str, allowed: str) -> None:
        """Raise unless ``condition``, in a sentence about ``field``."""
        if not condition:
            raise ConfigError(f"{type(self).__name__}: {field}={getattr(self, field)!r:.80} must be {allowed}")


Kind = TypeVar("Kind", bound=AlgorithmSettings)


def read(data: Mapping[str, Any], names: Mapping[str, str], known: Mapping[str, type[Kind]]) -> Kind:
    """The configuration that a dictionary with the ``name`` of an algorithm and its fields describes.

    Args:
        data: the dictionary.
        names: other names of the algorithms -> their names.
        known: the classes by name.

    Raises:
        ConfigError: no dictionary, an unknown algorithm or field; the nearest is shown.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"an algorithm is a dictionary such as {{name: cle}}, not {data!r:.80}")
    given = dict(data)
    name = given.pop("name", None)
    name = names.get(name, name) if isinstance(name, str) else repr(name)
    check_name("algorithm", name, known)
    kind = known[name]
    allowed = [item.name for item in fields(kind)]  # type: ignore[arg-type]
    check_names(f"field of {kind.__name__}", given, allowed)
    return kind(**given)


def not_one(entry: object, kinds: Iterable[type[AlgorithmSettings]]) -> str:
    """Why an entry of ``algo_config`` is no algorithm of a dialect, in words.

    Args:
        entry: the entry.
        kinds: the classes of the dialect.
    """
    names = {kind.__name__: kind for kind in kinds}
    kind: Any = entry if isinstance(entry, type) else type(entry)
    if entry in names.values():
        return f"{kind.__name__} is a class: write {kind.__name__}()"
    if issubclass(kind, AlgorithmSettings):
        flow = ".".join(kind.__module__.split(".")[:2])
        return f"this {kind.__name__} is of {flow}; the other flow has classes of its own: {', '.join(names)}"
    return unknown("algorithm", entry, names)


def plain(value: Any) -> Any:
    """A value as files hold it: NumPy's numbers are those of Python."""
    return value.item() if isinstance(value, np.generic) else value


@cache
def types_of(owner: Any) -> Mapping[str, Any]:
    """Types of the fields by name; none of a user's class whose annotations name what only a function knows."""
    try:
        hints = get_type_hints(owner)
    except NameError:
        return {}
    return {item.name: hints[item.name] for item in fields(owner)}
