"""A weight that stays in the model file itself: read whenever it is asked for, and never kept.

It is no view of the file, as external data are in onnx_ir: such a view starts anywhere, and what NumPy sums up depends
on how the values are aligned.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir


class WeightFile(Protocol):
    """The file that weights are in."""

    def array(self, tensor: ir.ExternalTensor) -> np.ndarray:
        """The values of one of them; ``ModelError``: the file has changed."""

    def check(self) -> None:
        """Raise ``ModelError`` where the file has changed."""


class InFile(ir.ExternalTensor):
    """One weight.

    Args:
        weights: the file.
        path: where it is.
        like: place, type and shape of the weight.
        name: its name.
    """

    __slots__ = ("weights",)

    def __init__(self, weights: WeightFile, path: str | os.PathLike[str], like: ir.ExternalTensor, name: str) -> None:
        shape = ir.Shape(like.shape.numpy())
        super().__init__(Path(path), like.offset, like.length, like.dtype, shape=shape, name=name)
        self.weights = weights

    def alias(self, name: str) -> InFile:
        """The same weight under another name."""
        return InFile(self.weights, self.location, self, name)

    def numpy(self) -> np.ndarray:
        """The values, read-only; ``ModelError``: the file has changed."""
        array = self.weights.array(self)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return self.numpy().__array__(dtype)

    def tobytes(self) -> bytes:
        """The bytes as they lie in the file; ``ModelError``: it has changed."""
        return self.numpy().tobytes()

    def tofile(self, file: Any) -> None:
        """Write these bytes to a file; ``ModelError``: the model file has changed."""
        file.write(self.numpy().reshape(-1).view(np.uint8).data)
