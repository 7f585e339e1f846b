"""What every algorithm configuration is: a frozen value with a name, checked field by field when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from quark.algorithms.own import OwnAlgorithm
from quark.errors import ConfigError


@dataclass(frozen=True)
class AlgoConfig:
    """Base of the algorithm configurations. ``name`` is what dictionaries call them."""

    name: ClassVar[str] = ""
    own: ClassVar[OwnAlgorithm | None] = None

    def to_dict(self) -> dict[str, Any]:
        """The name and the fields that differ from their defaults."""
        defaults = {f.name: f.default for f in fields(self)}
        changed = {key: getattr(self, key) for key, value in defaults.items() if getattr(self, key) != value}
        return {"name": self.name, **changed}

    def _require(self, field: str, allowed: bool, what: str) -> None:
        if not allowed:
            raise ConfigError(f"{type(self).__name__}: the field {field} cannot be {getattr(self, field)!r}; {what}")


def is_number(value: Any, low: float, high: float = float("inf")) -> bool:
    """Whether a value is a number (no bool) from ``low`` to ``high``."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def is_names(value: Any) -> bool:
    """Whether a value is a list of texts."""
    return isinstance(value, (tuple, list)) and all(isinstance(one, str) for one in value)


def is_whole(value: Any, low: int) -> bool:
    """Whether a value is a whole number (no bool) of at least ``low``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
