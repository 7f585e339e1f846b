"""Samples as training code has them: a ``torch.utils.data.DataLoader``, a Hugging Face ``datasets.Dataset``, a list.

An item may be an array or a tensor, a tuple or list whose first entries are the model's inputs (labels follow), or a
dictionary that has the inputs among its keys. torch is not imported: what has ``detach`` and ``numpy`` is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.errors import DataError
from quark.onnx.data import CalibrationDataReader, Feed, ModelInput, inputs_of
from quark.onnx.graph.model import ModelInput as Source
from quark.onnx.graph.model import load


class DatasetReader(CalibrationDataReader):
    """Samples from anything that can be iterated, read when they are needed.

    Args:
        model_input: path or model; its inputs say what is taken of an item.
        data: the items; iterated anew by ``rewind``.
        transform: called with each item first, for instance to turn a picture of a dataset into an array.

    Raises:
        DataError: ``data`` cannot be iterated; in ``get_next``, an item that does not have the model's inputs. A batch
            of a loader is cut into samples where the model's batch axis is fixed.
    """

    def __init__(self, model_input: Source, data: Iterable[Any], transform: Callable[[Any], Any] | None = None) -> None:
        if not (isinstance(data, Iterable) or hasattr(data, "__getitem__")) or isinstance(data, (str, bytes)):
            raise DataError(f"the data is {data!r:.80}; it must be a loader, a dataset or a list of samples")
        self._inputs = inputs_of(model_input if isinstance(model_input, ir.Model) else load(model_input))
        self._data, self._transform = data, transform
        self._feeds = self._stream()

    def get_next(self) -> Feed | None:
        """The next sample, or None after the last."""
        return next(self._feeds, None)

    def rewind(self) -> None:
        """Start again from the first item."""
        self._feeds = self._stream()

    def _stream(self) -> Iterator[Feed]:
        for index, item in enumerate(self._data):
            taken = _taken(item if self._transform is None else self._transform(item), self._inputs, index)
            yield from _samples(taken, self._inputs)


def _taken(item: Any, inputs: Sequence[ModelInput], index: int) -> Feed:
    names = [one.name for one in inputs]
    if isinstance(item, Mapping):
        missing = next((name for name in names if name not in item), None)
        if missing is not None:
            held = ", ".join(map(repr, item)) or "nothing"
            raise DataError(
                f"item {index} lacks the input {missing!r}; it has {held}: name them like the inputs, or give "
                "quark.onnx.DatasetReader(model, data, transform=...) a function that does"
            )
        return {name: as_array(item[name]) for name in names}
    entries = list(item) if isinstance(item, (tuple, list)) else [item]
    if len(entries) < len(names) or not all(_is_array(entry) for entry in entries[: len(names)]):
        kinds = ", ".join(type(entry).__name__ for entry in entries)
        raise DataError(
            f"item {index} is {type(item).__name__} of ({kinds}); the model takes arrays or tensors for "
            f"{', '.join(names)}: give quark.onnx.DatasetReader(model, data, transform=...) a function that makes them "
            "of an item"
        )
    return {name: as_array(entry) for name, entry in zip(names, entries, strict=False)}


def _is_array(entry: Any) -> bool:
    return hasattr(entry, "__array__") or hasattr(entry, "detach") or isinstance(entry, (int, float, list))


def as_array(entry: Any) -> np.ndarray:
    """An array of an array, a tensor of any device, a list of numbers or a picture of Pillow."""
    if hasattr(entry, "detach"):
        entry = entry.detach().cpu()
        entry = (entry.float() if "bfloat16" in str(entry.dtype) else entry).numpy()
    return np.asarray(entry)


def _samples(feed: Feed, inputs: Sequence[ModelInput]) -> Iterator[Feed]:
    """The feed itself with missing batch axes, or one a row where a fixed batch of one meets a larger one."""
    ranks = {one.name: len(one.shape) for one in inputs if one.shape is not None}
    feed = {name: array[None] if array.ndim == ranks.get(name, 0) - 1 else array for name, array in feed.items()}
    fixed = [one.name for one in inputs if one.shape and one.shape[0] == 1 and feed[one.name].ndim == len(one.shape)]
    counts = {len(feed[name]) for name in fixed}
    if len(fixed) == len(inputs) and len(counts) == 1 and counts != {1}:
        yield from ({name: array[row : row + 1] for name, array in feed.items()} for row in range(counts.pop()))
    else:
        yield feed
