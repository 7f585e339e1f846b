"""The digits that the demo network was trained and is tested on.

1,797 images of handwritten digits, 8×8 pixels of 0..16, with their labels (Alpaydin and Kaynak, "Optical Recognition of
Handwritten Digits", UCI, CC BY 4.0). The network sees them as float32 of 0..1, enlarged to 32×32 by bilinear
interpolation (pixel centres, edges repeated). The last 450 images are held out: training never saw them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np

HELD_OUT = 450
SIDE = 32
INPUT = "image"


def load() -> tuple[np.ndarray, np.ndarray]:
    """All images as stored, uint8 ``[1797, 8, 8]``, and their labels, uint8 ``[1797]``."""
    with resources.files("quark.demo").joinpath("digits.npz").open("rb") as file, np.load(file) as archive:
        return archive["images"], archive["labels"]


def model_path() -> Path:
    """The trained network (opset 17, ``image`` float32 ``[N, 1, 32, 32]`` to ``logits`` ``[N, 10]``)."""
    return Path(str(resources.files("quark.demo").joinpath("digits.onnx")))


def interpolation(size: int, side: int = SIDE) -> np.ndarray:
    """The matrix ``[side, size]`` that resamples a row of ``size`` pixels to ``side`` pixels, linearly."""
    position = np.clip((np.arange(side) + 0.5) * size / side - 0.5, 0, size - 1)
    left = np.minimum(position.astype(int), size - 2)
    matrix = np.zeros((side, size), np.float32)
    matrix[np.arange(side), left] = 1 - (position - left)
    matrix[np.arange(side), left + 1] = position - left
    return matrix


def preprocess(images: np.ndarray) -> np.ndarray:
    """Stored images ``[N, 8, 8]`` as the network's input, float32 ``[N, 1, 32, 32]``."""
    matrix = interpolation(images.shape[-1])
    return np.ascontiguousarray((matrix @ (images.astype(np.float32) / 16) @ matrix.T)[:, None])


def split() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """``(inputs, labels)`` of the training part and of the held-out part."""
    images, labels = load()
    inputs = preprocess(images)
    return (inputs[:-HELD_OUT], labels[:-HELD_OUT]), (inputs[-HELD_OUT:], labels[-HELD_OUT:])


class Reader:
    """Calibration data as ONNX Runtime expects it: ``get_next`` gives one feed after the other, then None."""

    def __init__(self, inputs: np.ndarray, batch: int = 1) -> None:
        """Feed ``inputs`` ``[N, ...]`` to the network in batches."""
        self.feeds: Iterator[dict[str, np.ndarray]] = iter(
            [{INPUT: inputs[start : start + batch]} for start in range(0, len(inputs), batch)]
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next feed, or None after the last."""
        return next(self.feeds, None)
