"""Samples from files: what ``--data`` may name. The files are read by ``quark.onnx.data_files``.

Unlike there, float64 is stored as float32 where the model wants that: who typed a command has no say in the type that
NumPy writes. A value that float32 does not hold is refused as infinite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

import numpy as np

from quark.cli.output import say
from quark.dataclass import dataclass
from quark.errors import DataError
from quark.onnx import data_files
from quark.onnx.data import Feed, ModelInput
from quark.onnx.image_files import UnreadableImage
from quark.onnx.preprocessing import Preprocessing


@dataclass(frozen=True)
class FileSamples:
    """Feeds that are read when asked for; iterate as often as needed.

    Attributes:
        readers: one function a sample.
        types: what the inputs hold.
        strict: a broken picture is an error; otherwise it is skipped, and named the first time.
    """

    readers: Sequence[Callable[[], Feed]]
    types: Mapping[str, np.dtype | None] = field(default_factory=dict)
    strict: bool = True
    skipped: set[str] = field(default_factory=set, compare=False)

    def __len__(self) -> int:
        return len(self.readers)

    def __iter__(self) -> Iterator[Feed]:
        return (_stored(feed, self.types) for feed in self._read())

    def _read(self) -> Iterator[Feed]:
        given = 0
        for read in self.readers:
            try:
                feed = read()
            except UnreadableImage as error:
                if self.strict:
                    raise
                self._skip(str(error))
                continue
            given += 1
            yield feed
        if self.readers and not given:
            raise DataError(f"no picture can be read; the first: {next(iter(self.skipped))}")

    def _skip(self, words: str) -> None:
        if words not in self.skipped:
            self.skipped.add(words)
            say(f"warning: skipped: {words}")

    def raw(self) -> Feed:
        """The first sample before its types are fitted; empty where there is none."""
        return next(self._read(), {})

    def first(self, count: int | None) -> FileSamples:
        """The first ``count`` samples; all of them for None."""
        return replace(self, readers=self.readers[:count])


def find_samples(
    path: Path, inputs: Sequence[ModelInput], settings: Preprocessing | None = None, strict: bool = True
) -> FileSamples:
    """The samples at ``path`` for a model with these inputs.

    Raises:
        DataError: nothing there that can be read as samples; the message says what would be.
    """
    types = {one.name: one.dtype for one in inputs}
    return FileSamples(data_files.find_samples(path, inputs, settings), types, strict)


def _stored(feed: Feed, types: Mapping[str, np.dtype | None]) -> Feed:
    """A sample with its floats in the width of the inputs."""
    with np.errstate(over="ignore"):  # what overflows is infinite, and refused as that
        return {name: _narrow(array, types.get(name)) for name, array in feed.items()}


def _narrow(array: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    """The same numbers in the input's type; whole numbers that it does not hold are left for the check to refuse."""
    if dtype is None or array.dtype.kind not in "iuf" or not np.can_cast(array.dtype, dtype, "same_kind"):
        return array
    converted = array.astype(dtype)
    return converted if array.dtype.kind == "f" or np.array_equal(converted.astype(array.dtype), array) else array
