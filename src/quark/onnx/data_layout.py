"""Samples as the flow reads them: of loaders and datasets, and of a model whose channels are moved last."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np

from quark.errors import DataError
from quark.onnx.data import Feed, Samples, samples_of
from quark.onnx.graph.model import ModelInput as Source


class ChannelsLast(Samples):
    """The samples, the images among them moved from [N, C, H, W] to [N, H, W, C] as they are read.

    Args:
        samples: of the float model, as the user has them.
        names: the inputs that are images now.
    """

    def __init__(self, samples: Samples, names: Collection[str]) -> None:
        super().__init__(samples)
        self._samples, self._names = samples, frozenset(names)

    @property
    def total(self) -> int | None:
        """How many samples there will be, or None where the reader does not say."""
        return self._samples.total

    def __len__(self) -> int:
        total = self.total
        if total is None:
            raise TypeError("the reader does not say how many samples it has")
        return total

    def __iter__(self) -> Iterator[Any]:
        for sample in self._samples:
            if isinstance(sample, Mapping):
                yield {name: _moved(array) if name in self._names else array for name, array in sample.items()}
            else:
                yield _moved(sample)


def _moved(array: Any) -> np.ndarray:
    values = np.asarray(array)
    return np.moveaxis(values, -3, -1) if values.ndim >= 3 else values


def in_layout(reader: Any, names: Collection[str]) -> Any:
    """The reader itself, or its samples with the images ``names`` moved."""
    return reader if reader is None or not names else ChannelsLast(samples_of(reader), names)


def looked_at(reader: Any) -> Samples | None:
    """The samples of a reader of which it has been told what looks wrong."""
    return None if reader is None else samples_of(reader)


def widened(feed: Mapping[str, np.ndarray], wide: Set[str]) -> Feed:
    """A sample of a float16 model, as one takes it whose inputs ``wide`` are float32."""
    half = {name for name, array in feed.items() if array.dtype == np.float16}
    return {name: array.astype(np.float32) if name in half & wide else array for name, array in feed.items()}


def as_reader(model_input: Source, data: Any) -> Any:
    """What people give as samples: loaders, datasets, arrays and lists of tuples behind ``DatasetReader``; readers,
    lists of feeds, and what can be iterated only once, as they are.

    Raises:
        DataError: several data sets by name, as ``datasets.load_dataset`` gives without ``split``.
    """
    if isinstance(data, Mapping) and (parts := [name for name, rows in data.items() if _has_rows(rows)]):
        raise DataError(f"the calibration data are several data sets, {parts}, by name: give one, as [{parts[0]!r}]")
    if data is None or hasattr(data, "get_next") or isinstance(data, (Mapping, str, bytes, Samples)):
        return data
    from quark.onnx.data_sets import DatasetReader

    if isinstance(data, (list, tuple)):
        return DatasetReader(model_input, data) if data and _is_row(data[0]) else data
    if hasattr(data, "__getitem__"):
        return DatasetReader(model_input, data)
    if not isinstance(data, Iterable) or iter(data) is data or _is_feed(next(iter(data), None)):
        return data  # a feed needs nothing, and its iterable may tell how many there are
    return DatasetReader(model_input, data)


def _is_feed(item: Any) -> bool:
    return isinstance(item, Mapping) and all(isinstance(value, np.ndarray) for value in item.values())


def _has_rows(item: Any) -> bool:
    rows = isinstance(item, (list, tuple)) and bool(item) and isinstance(item[0], Mapping)
    return rows or hasattr(item, "column_names")


def _is_row(item: Any) -> bool:
    return isinstance(item, (tuple, list)) or hasattr(item, "detach")
