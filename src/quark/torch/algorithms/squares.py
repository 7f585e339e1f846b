"""Sums of x x^T at about half of the multiplications: what is below the diagonal is what is above it.

for each panel of columns:  H[panel, panel and right of it] += X[:, panel]^T X[:, panel and right of it]
at the end:                 below the panels' diagonal blocks what is above them
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

NARROWEST = 128  # columns of a panel; narrower ones are slower by their calls
MOST = 16  # panels


def panels(size: int) -> Iterator[slice]:
    """Columns of a matrix in panels."""
    width = max(NARROWEST, -(-size // MOST))
    return (slice(start, min(start + width, size)) for start in range(0, size, width))


def add_squares(total: torch.Tensor, rows: torch.Tensor) -> None:
    """Add X^T X of ``rows`` [vectors, features] to ``total`` [features, features], as far as ``complete`` needs it."""
    for panel in panels(len(total)):
        total[panel, panel.start :].addmm_(rows[:, panel].T, rows[:, panel.start :])


def complete(total: torch.Tensor) -> None:
    """Fill in what is below the diagonal blocks of a sum."""
    for panel in panels(len(total)):
        total[panel.stop :, panel] = total[panel, panel.stop :].T
