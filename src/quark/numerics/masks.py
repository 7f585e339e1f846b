"""Masks: constants with one very large number (or infinity) beside small ones, which decides which values count.

A scale that covers such a number leaves the values beside it no resolution, and no scale covers infinity.
"""

from __future__ import annotations

import numpy as np

#: A constant operand at or below this, beside which everything else is 0 or small, is a mask and no data.
MASK_VALUE = -1e3
#: The same for a positive one.
FAR_ABOVE = 1e6
#: How many times smaller the rest is: a bias that a mask was added to has a quarter of a step of 8 bits left.
_RATIO = 1024
#: Far numbers that a bias was added to are still one number.
_SAME = 1.01


def is_mask(numbers: np.ndarray) -> bool:
    """Whether an array of any shape holds infinity, or one number that is far out and beside it only small ones.

    That number may stand there with both signs: bounds that let some values through.
    """
    if numbers.size and float(numbers.min()) > MASK_VALUE and float(numbers.max()) < FAR_ABOVE:
        return False  # nothing is far out: most weights, which may be large
    numbers = np.asarray(numbers, np.float64)  # bounds that half precision does not have
    if np.isinf(numbers).any():
        return True
    out = (numbers <= MASK_VALUE) | (numbers >= FAR_ABOVE)
    far, rest = np.abs(numbers[out]), np.abs(numbers[~out]).max(initial=0.0)
    return bool(far.size and far.max() / _SAME <= far.min() and far.min() / _RATIO >= rest)
