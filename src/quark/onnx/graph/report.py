"""What one graph pass did: how often it fired, and why it did not where it might have.

Every pass is a function ``run(model, …) -> PassReport`` that edits the model it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from quark.dataclass import dataclass


@dataclass(frozen=True)
class PassReport:
    """Result of one pass.

    Attributes:
        name: The pass.
        fired: Number of places it changed.
        refused: One sentence for each place that looked like a match and was left alone, with the reason.
    """

    name: str
    fired: int = 0
    refused: Sequence[str] = field(default_factory=tuple)

    def __add__(self, other: PassReport) -> PassReport:
        """Both, for a pass that goes over a model twice."""
        return PassReport(self.name, self.fired + other.fired, (*self.refused, *other.refused))
