"""SmoothQuant's scales, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quark.algorithms.smoothquant import shared_channels, smoothing_scales

X, W = np.array([8.0, 2.0, 0.0, 1e-9], np.float32), np.array([2.0, 0.5, 1.0, 0.0], np.float32)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(1.0, [8, 2, 1, 1e-3]), (0.0, [0.5, 2, 1, 1e5]), (0.5, [2, 2, 1, 1e-2])],
)
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_scales(alpha: float, expected: list[float], kind: object) -> None:
    found = smoothing_scales(kind(X), kind(W), alpha)  # type: ignore[operator]
    assert np.allclose(np.asarray(found), expected, rtol=1e-4)


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_channels_that_are_read_several_times_share_the_largest(kind: object) -> None:
    values, channels = np.array([1.0, 5.0, 2.0, 3.0], np.float32), np.array([0, 2, 0, 2])
    found = shared_channels(kind(values), kind(channels), 4)  # type: ignore[operator]
    assert np.asarray(found).tolist() == [2, 1, 5, 1]
