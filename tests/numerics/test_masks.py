"""What is a mask: infinity, or one number far out beside small ones."""

from __future__ import annotations

import numpy as np
import pytest

from quark.numerics.masks import is_mask


@pytest.mark.parametrize(("numbers", "expected"), [
    ([np.inf], True), ([0.0, -np.inf], True),
    ([-1e3], True), ([-1e3, 0.0], True), ([-999.0, 0.0], False),
    ([1e6, 0.0], True), ([999_999.0, 0.0], False), ([1e3, 0.0], False),
    ([-1024.0, 1.0, -1.0], True), ([-1024.0, -1.01], False), ([-1024.0, 1.01], False),
    ([-1e9, 1e9, 0.0], True), ([-1e9, -1.005e9, 3.0], True), ([-1e9, -1.02e9, 3.0], False),
    ([-1024.0, -1030.0, 1.003], False), ([-1024.0, -1030.0, 1.0], True),
    ([-1e9, -1.01e9, 3.0], True), ([0.0, 1.0], False), ([], False),
])  # fmt: skip
def test_one_number_far_out_beside_small_ones(numbers: list[float], expected: bool) -> None:
    """At -1000 or below, or from a million on; what else there is, a 1024th of it at most; one number to 1 %."""
    assert is_mask(np.array(numbers, np.float32)) is expected
    assert is_mask(np.array(numbers, np.float64).reshape(1, -1)) is expected
