"""From the options ``--data``, ``--random``, ``--samples``, ``--mean`` and ``--std`` to the feeds of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quark.cli.samples import Samples, find_samples
from quark.errors import DataError
from quark.onnx.data import Feed, RandomDataReader, inputs_of
from quark.onnx.graph.model import load
from quark.onnx.preprocessing import Preprocessing


@dataclass(frozen=True)
class Source:
    """Where samples come from, as typed; ``shapes`` and ``ranges`` of generated samples, per input name."""

    data: Path | None
    random: bool
    samples: int | None
    mean: str
    std: str
    shapes: Mapping[str, Sequence[int]] | None = None
    ranges: Mapping[str, Sequence[float]] | None = None


def feeds(model: Path, source: Source) -> Samples | list[Feed]:
    """The feeds for ``model``.

    Raises:
        DataError: neither or both of ``--data`` and ``--random``, or nothing that fits the model.
    """
    if (source.data is None) != source.random:
        raise DataError("give the samples with --data PATH, or --random to use generated ones for a trial run")
    loaded = load(model)
    if source.data is not None:
        return find_samples(source.data, inputs_of(loaded), scaling(source)).first(source.samples)
    return [dict(feed) for feed in RandomDataReader(loaded, source.shapes, source.ranges, source.samples or 1)]


def source_words(source: Source) -> list[str]:
    """The words of the command line that name the same samples."""
    words = ["--random"] if source.random else [] if source.data is None else ["--data", str(source.data)]
    words += [] if source.samples is None else ["--samples", str(source.samples)]
    for flag, value, default in (("--mean", source.mean, "0"), ("--std", source.std, "1")):
        words += [flag, value] if value != default else []
    return words


def scaling(source: Source) -> Preprocessing:
    """``--mean`` and ``--std`` as numbers."""
    return Preprocessing(_numbers("--mean", source.mean), _numbers("--std", source.std))


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise DataError(f"{name} {text!r}: write one number, or one per channel as in 0.485,0.456,0.406") from error
