"""What every algorithm configuration is: a frozen value with a name, checked field by field when it is made."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

from quark.algorithms.own import OwnAlgorithm
from quark.config.algorithm import AlgorithmSettings, plain
from quark.dataclass import dataclass


@dataclass(frozen=True)
class AlgoConfig(AlgorithmSettings):
    """Base of the algorithm configurations. ``name`` is what dictionaries call them."""

    name: ClassVar[str] = ""
    own: ClassVar[OwnAlgorithm | None] = None

    def to_dict(self) -> dict[str, Any]:
        """The name and the fields that differ from their defaults."""
        values = {f.name: plain(getattr(self, f.name)) for f in fields(self)}
        changed = {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}
        return {"name": self.name, **changed}
