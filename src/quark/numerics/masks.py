"""Masks: constants of 0 and one very large number (or infinity) that decide which values count.

A scale that covers such a number leaves the values beside it no resolution, and no scale covers infinity.
"""

from __future__ import annotations

import numpy as np

#: A constant operand at or below this, beside which everything else is 0, is a mask and no data.
MASK_VALUE = -1e3
#: The same for a positive one.
FAR_ABOVE = 1e6


def is_mask(numbers: np.ndarray) -> bool:
    """Whether an array of any shape, not empty, holds infinity, or 0 and one number that is far out.

    That number may stand there with both signs: bounds that let some values through.
    """
    low, high = float(numbers.min()), float(numbers.max())  # bounds that half precision does not have
    far_above = high >= FAR_ABOVE and (low >= 0 or low == -high)
    extreme = high if far_above else low if low <= MASK_VALUE and high <= 0 else None
    one = extreme is not None and bool(np.isin(numbers, (extreme, 0.0, -extreme)).all())
    return one or bool(np.isinf(numbers).any())
