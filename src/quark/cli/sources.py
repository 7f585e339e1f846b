"""From the options about samples to the feeds of a model."""

from __future__ import annotations

import re
from pathlib import Path

from quark.cli.output import say
from quark.cli.samples import FileSamples, find_samples
from quark.cli.source_options import SampleSource
from quark.errors import ConfigError, DataError
from quark.onnx.data import Feed, RandomDataReader, inputs_of
from quark.onnx.data_files import ARRAYS, is_picture
from quark.onnx.graph.model import load, load_ahead
from quark.onnx.preprocess_file import FILE, read_beside
from quark.onnx.preprocessing import Preprocessing, doubts
from quark.search.function import load_function

WANTED = "give the samples with --data PATH, or --random to use generated ones for a trial run"
PICTURES = ("size", "resize", "bgr", "scale", "mean", "std")  # what is typed about pictures alone


def feeds(
    model: Path, source: SampleSource, first: bool = False, made: Path | None = None, judged_on: Path | None = None
) -> FileSamples | list[Feed]:
    """The feeds for ``model``; what looks wrong about the first one is said.

    Args:
        model: the file.
        source: what was typed.
        first: the model is loaded next, and need not be read twice.
        judged_on: other samples that the options of ``source`` are for as well (``--eval-data``).
        made: the quantized model, whose ``preprocess.yaml`` says how pictures are read where ``source`` does not.

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
        found = [dict(feed) for feed in RandomDataReader(loaded, source.shapes, source.ranges, source.samples or 1)]
        shapes = {one.name: (0, None) if one.shape is None else one.shape for one in inputs_of(loaded)}
        free = {name: list(found[0][name].shape) for name, shape in shapes.items() if None in shape[1:]}
        if free:
            say(f"note: free sizes of generated data: {free} (option RandomDataReaderInputShape)")
        return found
    settings = preprocessing(source)
    if made is not None and settings == Preprocessing() and is_picture(source.data):
        settings = beside(made) or settings
    files = find_samples(source.data, inputs_of(loaded), settings, source.strict).first(source.samples)
    pictures = settings if settings.function is None and is_picture(source.data) else None
    for doubt in doubts(loaded, files.raw(), pictures):
        say(f"warning: {doubt}")
    return files


def beside(model: Path) -> Preprocessing | None:
    """What the file beside ``model`` says about pictures; it is said that it is used."""
    settings = read_beside(model)
    if settings is not None and settings != Preprocessing():
        words = ", ".join(f"{name} {value}" for name, value in settings.to_dict().items())
        say(f"note: pictures are read as {str(model.with_name(FILE))!r} has it ({words})")
    return settings


def check_pictures(source: SampleSource, judged_on: Path | None = None) -> None:
    """Options stand beside samples that heed them: what nobody heeds would calibrate on other values in silence.

    Raises:
        DataError: they stand beside arrays, sounds or generated samples.
    """
    usual, data = SampleSource(), source.data
    given = [f"--{name}" for name in PICTURES if getattr(source, name) != getattr(usual, name)]
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
