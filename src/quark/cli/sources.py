"""From the options about samples to the feeds of a model; files are read by ``quark.onnx.data_files``.

Unlike there, float64 is stored as float32 where the model wants that: who typed a command has no say in the type that
NumPy writes. A value that float32 does not hold is refused as infinite.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

import numpy as np

from quark.cli.output import say
from quark.cli.source_options import SampleSource
from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError
from quark.onnx import data_files
from quark.onnx.audio_files import UnreadableSound
from quark.onnx.data import Feed, ModelInput, inputs_of
from quark.onnx.data_files import ARRAYS, is_picture
from quark.onnx.graph.model import load, load_ahead
from quark.onnx.image_files import UnreadableImage
from quark.onnx.preprocess_file import FILE, read_beside
from quark.onnx.preprocessing import Preprocessing, doubts
from quark.search.function import load_function

WANTED = "give the samples with --data PATH, or --random to use generated ones for a trial run"
PICTURES = ("size", "resize", "bgr", "scale", "mean", "std")  # what is typed about pictures alone


@dataclass(frozen=True)
class FileSamples:
    """Feeds that are read when asked for; iterate as often as needed.

    Attributes:
        readers: one function a sample.
        types: what the inputs hold.
        strict: a broken picture or sound is an error; otherwise it is skipped, and named the first time.
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
            except (UnreadableImage, UnreadableSound) as error:
                if self.strict:
                    raise
                self._skip(str(error))
                continue
            given += 1
            yield feed
        if self.readers and not given:
            raise DataError(f"no file can be read; the first: {next(iter(self.skipped))}")

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


def at(samples: FileSamples | Sequence[Feed], places: Sequence[int]) -> FileSamples | list[Feed]:
    """The samples at these places, in their order."""
    if isinstance(samples, FileSamples):
        return replace(samples, readers=[samples.readers[place] for place in places])
    return [samples[place] for place in places]


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


def feeds(
    model: Path, source: SampleSource, first: bool = False, judged_on: Path | None = None
) -> FileSamples | list[Feed]:
    """The feeds for ``model``; what looks wrong about the first one is said.

    Args:
        model: the file.
        source: what was typed.
        first: the model is loaded next, and need not be read twice.
        judged_on: other samples that the options of ``source`` are for as well (``--eval-data``).

    Raises:
        DataError: neither or both of ``--data`` and ``--random``, or nothing that fits the model.
    """
    if source.data is not None and source.random:
        raise DataError("--data and --random exclude each other: samples are read or generated")
    if source.data is None and not source.random:
        raise DataError(WANTED)
    check_pictures(source, judged_on)
    loaded = load_ahead(model) if first else load(model)
    if source.data is None:
        from quark.onnx.random_data import RandomDataReader

        found = [dict(feed) for feed in RandomDataReader(loaded, source.shapes, source.ranges, source.samples or 1)]
        shapes = {one.name: (0, None) if one.shape is None else one.shape for one in inputs_of(loaded)}
        free = {name: list(found[0][name].shape) for name, shape in shapes.items() if None in (shape[1:] or shape)}
        if free:
            say(f"note: free sizes of generated data: {free} (option RandomDataReaderInputShape)")
        return found
    settings = preprocessing(source)
    files = find_samples(source.data, inputs_of(loaded), settings, source.strict).first(source.samples)
    pictures = settings if settings.function is None and is_picture(source.data) else None
    for doubt in (*data_files.folder_doubts(source.data), *doubts(loaded, files.raw(), pictures)):
        say(f"warning: {doubt}")
    return files


def as_made(source: SampleSource, made: Path) -> SampleSource:
    """``source`` as if it were typed what ``preprocess.yaml`` beside the quantized model has, where pictures are read
    and nothing about them was typed; it is said that the file is used."""
    if source.data is None or preprocessing(source) != Preprocessing() or not is_picture(source.data):
        return source
    settings = read_beside(made)
    if settings is None or settings == Preprocessing():
        return source
    words = ", ".join(f"{name} {value}" for name, value in settings.to_dict().items())
    say(f"note: pictures are read as {str(made.with_name(FILE))!r} has it ({words})")
    mean, std = (",".join(str(one).removesuffix(".0") for one in each) for each in (settings.mean, settings.std))
    size = None if settings.size is None else "x".join(map(str, settings.size))
    typed = {name: getattr(settings, name) for name in ("resize", "bgr", "scale")}
    return replace(source, mean=mean, std=std, size=size, **typed)


def check_pictures(source: SampleSource, judged_on: Path | None = None) -> None:
    """Options stand beside samples that heed them: what nobody heeds would calibrate on other values in silence.

    Raises:
        DataError: they stand beside arrays, sounds or generated samples.
    """
    usual, data = SampleSource(), source.data
    given = [f"--{name}" for name in PICTURES if getattr(source, name) != getattr(usual, name)]
    if given and source.preprocess:
        raise DataError(f"--preprocess makes the arrays, so that {given[0]} changes nothing: leave one of them out")
    if given and not any(one is not None and (not one.exists() or is_picture(one)) for one in (data, judged_on)):
        what = "--random" if data is None else f"--data {str(data)!r}"
        raise DataError(
            f"{given[0]} is for pictures, and {what} has none: leave it out. Arrays and sounds are taken as they are; "
            f"--preprocess FILE.py:FUNCTION prepares them"
        )
    if source.preprocess and all(one is None or one.suffix.lower() in ARRAYS for one in (data, judged_on)):
        what = "--random has no files" if data is None else f"{str(data)!r} is one file with all samples"
        raise DataError(f"--preprocess is called with the path of each sample, and {what}: give a folder or a list")


def preprocessing(source: SampleSource) -> Preprocessing:
    """What is done with pictures.

    Raises:
        DataError: a number or word that cannot be meant.
    """
    size = None
    if source.size is not None:
        match = re.fullmatch(r"([1-9]\d{0,5})[xX]([1-9]\d{0,5})", source.size)
        if match is None:
            raise DataError(f"--size {source.size!r}: write height x width, as in 224x224")
        size = int(match[1]), int(match[2])
    try:
        function = None if source.preprocess is None else load_function(source.preprocess, "--preprocess")
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"--preprocess {source.preprocess!r} cannot be loaded: {error}") from error
    mean, std = _numbers("--mean", source.mean), _numbers("--std", source.std)
    return Preprocessing(mean, std, source.scale, size, source.resize, source.bgr, function)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise DataError(f"{name} {text!r}: write one number, or one per channel as in 0.485,0.456,0.406") from error
