"""Calibration data: readers, and the check that a sample fits the model before anything runs.

A reader is anything that gives samples one at a time: an object with ``get_next()`` (ONNX Runtime's interface: a
dictionary per sample, None at the end), or an iterable of dictionaries; for a model with one input bare arrays do.
Samples are read when they are needed and not kept; up to 32 MiB of them are read ahead where a method needs less once
it knows how many there will be. A reader with ``rewind()`` or ``reset_iter()`` can be read again.

Readers of our own: ``CachedDataReader`` (here: keeps samples in memory), ``RandomDataReader`` (``random_data``) and
``PathDataReader`` (files, in ``data_files``).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError, nearest
from quark.onnx.qdq.masks import mask_inputs

Feed = dict[str, np.ndarray]
Read = Callable[[], Feed]  # of one sample
REWINDS = ("rewind", "reset_iter")
#: Bytes of samples that are read ahead to learn how many there are.
AHEAD = 1 << 25


@dataclass(frozen=True)
class ModelInput:
    """An input of a model.

    Attributes:
        name: its name.
        shape: sizes, None where one is free; None altogether where the rank is unknown.
        dtype: element type; None where it is not a tensor of numbers.
        mask: it decides which scores of a Softmax count: it stays float, and infinity is one of its values.
    """

    name: str
    shape: tuple[int | None, ...] | None
    dtype: np.dtype | None
    mask: bool = False

    def __str__(self) -> str:
        sizes = "any shape" if self.shape is None else ["any" if size is None else size for size in self.shape]
        return f"{self.name!r} ({self.dtype}, {sizes})".replace("'any'", "any")


def inputs_of(model: ir.Model) -> list[ModelInput]:
    """The inputs that a caller must give."""
    masks = mask_inputs(model)
    return [_described(value, value.name in masks) for value in model.graph.inputs if not value.is_initializer()]


def _described(value: ir.Value, mask: bool) -> ModelInput:
    shape = None if value.shape is None else tuple(size if isinstance(size, int) else None for size in value.shape)
    dtype = value.dtype
    numeric = dtype is not None and dtype not in (ir.DataType.STRING, ir.DataType.UNDEFINED)
    return ModelInput(str(value.name), shape, dtype.numpy() if numeric and dtype is not None else None, mask)


# ---- readers ---------------------------------------------------------------------------------------------------------


class CalibrationDataReader(ABC):
    """Base class for readers, with the interface of ONNX Runtime's: subclass it and write ``get_next``."""

    generated: ClassVar[bool] = False  # nothing about the samples can be wrong that the user could mend

    @abstractmethod
    def get_next(self) -> Mapping[str, np.ndarray] | None:
        """The next sample, ``{input name: array}``, or None after the last."""

    def __iter__(self) -> Iterator[Mapping[str, np.ndarray]]:
        """The samples from here to the end."""
        return _until_none(self.get_next)

    def separate_reads(self) -> Sequence[Read] | None:
        """Functions that read one sample each, in this process or another; None: samples come one after the other.

        With them workers read what they count. They are pickled, and their paths are absolute.
        """
        return None


class CachedDataReader(CalibrationDataReader):
    """Samples kept in memory, to be read any number of times.

    Args:
        reader: where they come from; anything ``samples_of`` takes.
        data_size: read only this many.
    """

    def __init__(self, reader: Any, data_size: int | None = None) -> None:
        self._samples = [deepcopy(sample) for sample in samples_of(reader, data_size)]  # one may fill its arrays again
        self._next = 0

    def __len__(self) -> int:
        return len(self._samples)

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        """The next sample, or None after the last."""
        self._next += 1
        return self._samples[self._next - 1] if self._next <= len(self._samples) else None

    def reset_iter(self) -> None:
        """Start again from the first sample."""
        self._next = 0

    rewind = reset_iter


class Samples:
    """The samples of any reader, at most ``limit`` of them; later ones are not even read.

    Iterating again rewinds a reader that can be rewound; another one simply goes on where it stopped.
    """

    def __init__(self, reader: Any, limit: int | None = None) -> None:
        self._reader, self._limit = reader, limit

    @property
    def total(self) -> int | None:
        """How many samples there will be, or None where the reader does not say."""
        try:
            known = len(self._reader)
        except (TypeError, NotImplementedError):
            return None
        return known if self._limit is None else min(known, self._limit)

    def separate_reads(self) -> Sequence[Read] | None:
        """``CalibrationDataReader.separate_reads`` of the reader, as many as there are samples."""
        known = isinstance(self._reader, (Samples, CalibrationDataReader))
        found = self._reader.separate_reads() if known else None
        return None if found is None else found[: self._limit]

    @property
    def again(self) -> bool:
        """Whether they can be had a second time."""
        return readable_again(self._reader)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(_stream(self._reader), self._limit)


def samples_of(reader: Any, limit: int | None = None) -> Samples:
    """The samples of a reader, lazily.

    Args:
        reader: an object with ``get_next()``, an iterable of dictionaries or arrays, or one dictionary.
        limit: read at most this many (``CalibDataSize``).

    Raises:
        DataError: it is none of these.
        ConfigError: the limit is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"CalibDataSize is {limit}; it must be at least 1")
    if isinstance(reader, Samples):
        return Samples(reader, limit)
    if isinstance(reader, Mapping):
        return Samples([reader], limit)
    if isinstance(reader, (str, bytes)) or not (hasattr(reader, "get_next") or isinstance(reader, Iterable)):
        raise DataError(
            f"the calibration data reader is {reader!r:.80}; it must have get_next() or be an iterable of dictionaries "
            "{input name: array}. For a folder or an .npz file use quark.onnx.PathDataReader"
        )
    return Samples(reader, limit)


def told_ahead(samples: Samples) -> Samples:
    """The same samples, to be read once, that tell how many they are if copies of all fit into ``AHEAD`` bytes.

    What a reader raises meanwhile is raised when it is the turn of that sample.
    """
    if samples.total is not None:
        return samples
    kept: list[Any] = []
    rest, room = iter(samples), AHEAD
    try:
        for sample in rest:
            kept.append(deepcopy(sample))  # a reader may fill the same arrays again
            room -= _bytes_of(sample, room)
            if room <= 0:
                return Samples(itertools.chain(kept, rest))
    except Exception as error:  # noqa: BLE001 (the caller meets it where it would have, whatever it is)
        return Samples(itertools.chain(kept, _raising(error)))
    return Samples(kept)


def _bytes_of(sample: Any, unknown: int) -> int:
    """Bytes of the arrays of a sample; ``unknown`` for one that does not tell."""
    arrays = sample.values() if isinstance(sample, Mapping) else (sample,)
    return sum(int(getattr(array, "nbytes", unknown)) for array in arrays)


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield


def readable_again(reader: Any) -> bool:
    """Whether the samples of a reader can be had a second time."""
    if isinstance(reader, Samples):
        return reader.again
    if hasattr(reader, "get_next"):
        return any(callable(getattr(reader, name, None)) for name in REWINDS)
    return isinstance(reader, Iterable) and iter(reader) is not reader


class Remembering(CalibrationDataReader):
    """A reader that can be read once, with copies of its first ``count`` samples."""

    def __init__(self, reader: Any, count: int) -> None:
        self._reader, self._samples = reader, iter(samples_of(reader))
        self._count, self._first, self._ahead = count, list[Any](), list[Any]()

    def __len__(self) -> int:
        return len(self._reader)

    def get_next(self) -> Any:
        """The next sample, or None after the last."""
        return self._ahead.pop(0) if self._ahead else self._read()

    def _read(self) -> Any:
        sample = next(self._samples, None)
        if sample is not None and len(self._first) < self._count:
            self._first.append(deepcopy(sample))  # a reader may fill the same arrays again
        return sample

    def first(self) -> list[Any]:
        """The first samples, whoever has read them; who reads on has them all the same."""
        while len(self._first) < self._count and self._read() is not None:
            self._ahead.append(deepcopy(self._first[-1]))
        return self._first


def _stream(reader: Any) -> Iterator[Any]:
    """From the first sample, as far as the reader can be rewound."""
    if not hasattr(reader, "get_next"):
        return iter(reader)
    rewind = next((getattr(reader, name) for name in REWINDS if callable(getattr(reader, name, None))), None)
    if rewind is not None:
        rewind()
    return _until_none(reader.get_next)


def _until_none(get_next: Callable[[], Any]) -> Iterator[Any]:
    while (sample := get_next()) is not None:
        yield sample


# ---- checking --------------------------------------------------------------------------------------------------------


def checked(samples: Iterable[Any], inputs: Sequence[ModelInput]) -> Iterator[Feed]:
    """Every sample as a feed that the model takes.

    An array of another type is converted only if that changes no value (float16 to float32, int64 to int32 within its
    range); float64 that needs its precision is refused, because the loss should be the caller's decision.

    Args:
        samples: dictionaries; bare arrays for a model with one input.
        inputs: the inputs of the model.

    Raises:
        DataError: a name, shape or type does not fit, a value is NaN or infinite, or no sample holds a value. The
            message names the input and the number of the sample (from 0).
    """
    index, held = -1, not inputs
    for index, sample in enumerate(samples):
        feed = fitted(sample, inputs, index)
        held |= holds(feed)
        yield feed
    if index < 0:
        raise DataError(
            "the calibration data reader gave no sample. Check the folder or list it reads; a reader that was read "
            "before is used up: create a new one, or give it a rewind() method"
        )
    if not held:
        raise nothing_held(index + 1, inputs)


def holds(feed: Feed) -> bool:
    """Whether a sample holds a value."""
    return any(array.size for array in feed.values())


def nothing_held(count: int, inputs: Sequence[ModelInput]) -> DataError:
    """What is wrong with samples of which none ``holds``."""
    return DataError(f"none of the {count} samples holds a value: all arrays of {_names(inputs)} are empty")


def fitted(sample: Any, inputs: Sequence[ModelInput], index: int) -> Feed:
    """``checked`` for the sample ``index``."""
    if not isinstance(sample, Mapping):
        if len(inputs) != 1 or not hasattr(sample, "__array__"):
            raise DataError(
                f"sample {index} is {type(sample).__name__}; it must be a dictionary {{input name: array}} with the "
                f"inputs {_names(inputs)}. For a loader or dataset with labels use quark.onnx.DatasetReader"
            )
        sample = {inputs[0].name: sample}
    _check_names(sample, inputs, index)
    return {one.name: _fitted(np.asarray(sample[one.name]), one, index) for one in inputs}


def _names(inputs: Sequence[ModelInput]) -> str:
    return ", ".join(repr(one.name) for one in inputs)


def _check_names(sample: Mapping[str, Any], inputs: Sequence[ModelInput], index: int) -> None:
    wanted = [one.name for one in inputs]
    for name in sample:
        if name not in wanted:
            near = nearest(str(name), wanted)
            raise DataError(
                f"sample {index} has {name!r}, which is not an input of the model.{near} Inputs: {_names(inputs)}. "
                "Items of a loader or dataset that hold more are read by quark.onnx.DatasetReader"
            )
    for name in wanted:
        if name not in sample:
            given = ", ".join(map(repr, sample)) or "nothing"
            raise DataError(f"sample {index} lacks the input {name!r}; it has {given}")


def _fitted(array: np.ndarray, one: ModelInput, index: int) -> np.ndarray:
    _check_shape(array, one, index)
    if one.dtype is None:
        return array
    array = _typed(array, one, index)
    if array.dtype.kind not in "biu" and not (~np.isnan(array) if one.mask else np.isfinite(array)).all():
        nans = int(np.isnan(array).sum())
        infinite = int((~np.isfinite(array)).sum()) - nans
        raise DataError(
            f"sample {index}, input {one.name!r}: {nans} NaN and {infinite} infinite values among {array.size}. "
            "Remove the sample or repair it: such values make every range meaningless"
        )
    return array


def _fits(wanted: Sequence[int | None], given: Sequence[int]) -> bool:
    return len(wanted) == len(given) and all(one in (None, size) for one, size in zip(wanted, given, strict=True))


def _turned(one: ModelInput, array: np.ndarray) -> str:
    """A hint where the channels of pictures stand at the other end."""
    for order in ((0, 3, 1, 2), (0, 2, 3, 1)):
        if array.ndim == 4 and _fits(one.shape or (), [array.shape[axis] for axis in order]):
            return f" (its channels are at the other end: array.transpose{order})"
    return ""


def _check_shape(array: np.ndarray, one: ModelInput, index: int) -> None:
    if one.shape is None:
        return
    if not _fits(one.shape, array.shape):
        hint = " (add the batch axis: array[None])" if array.ndim == len(one.shape) - 1 else _turned(one, array)
        raise DataError(f"sample {index}: the array of shape {list(array.shape)} does not fit the input {one}{hint}")


def _typed(array: np.ndarray, one: ModelInput, index: int) -> np.ndarray:
    """``array`` in the type of the input, if no value changes."""
    if array.dtype == one.dtype or one.dtype is None:
        return array
    truth = array.dtype.kind == "b" and one.dtype.kind not in "biu"  # a mask may be whole numbers, an image none
    if truth or array.dtype.kind in "OSUmMc":
        raise DataError(f"sample {index}: values of type {array.dtype} do not fit the input {one}")
    if np.can_cast(array.dtype, one.dtype, "safe"):
        return array.astype(one.dtype)
    with np.errstate(all="ignore"):
        converted = array.astype(one.dtype)
        same = np.array_equal(converted.astype(array.dtype), array)
    if not same:
        raise DataError(
            f"sample {index}: values of type {array.dtype} do not fit the input {one} without loss; convert them "
            f"yourself if that is intended: array.astype(numpy.{one.dtype})"
        )
    return converted
