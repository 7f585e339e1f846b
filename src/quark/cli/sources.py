"""From the options ``--data``, ``--random``, ``--samples``, ``--mean`` and ``--std`` to the feeds of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quark.cli.samples import Feed, ModelInput, Samples, Scaling, find_samples
from quark.errors import DataError
from quark.onnx.graph.model import load


@dataclass(frozen=True)
class Source:
    """Where samples come from, as typed."""

    data: Path | None
    random: bool
    samples: int | None
    mean: str
    std: str


def feeds(model: Path, source: Source) -> Samples | list[Feed]:
    """The feeds for ``model``.

    Raises:
        DataError: neither or both of ``--data`` and ``--random``, or nothing that fits the model.
    """
    if (source.data is None) != source.random:
        raise DataError("give the samples with --data PATH, or --random to use generated ones for a trial run")
    if source.data is not None:
        return find_samples(source.data, model_inputs(model), scaling(source)).first(source.samples)
    return random_feeds(model, source.samples or 1)


def scaling(source: Source) -> Scaling:
    """``--mean`` and ``--std`` as numbers."""
    return Scaling(_numbers("--mean", source.mean), _numbers("--std", source.std))


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise DataError(f"{name} {text!r}: write one number, or one per channel as in 0.485,0.456,0.406") from error


def model_inputs(path: Path) -> list[ModelInput]:
    """The inputs that a model needs."""
    values = [value for value in load(path).graph.inputs if not value.is_initializer()]
    return [
        ModelInput(
            str(value.name),
            tuple(size if isinstance(size, int) else None for size in value.shape or ()),
            np.dtype(value.dtype.numpy() if value.dtype is not None else np.float32),
        )
        for value in values
    ]
