"""What every algorithm configuration is: a frozen value with a name, checked field by field when it is made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from quark.algorithms.own import OwnAlgorithm
from quark.config.algorithm import AlgorithmSettings


@dataclass(frozen=True)
class AlgoConfig(AlgorithmSettings):
    """Base of the algorithm configurations. ``name`` is what dictionaries call them."""

    name: ClassVar[str] = ""
    own: ClassVar[OwnAlgorithm | None] = None

    def to_dict(self) -> dict[str, Any]:
        """The name and the fields that differ from their defaults."""
        defaults = {f.name: f.default for f in fields(self)}
        changed = {key: getattr(self, key) for key, value in defaults.items() if getattr(self, key) != value}
        return {"name": self.name, **changed}
