"""Top-1 against labels: one class a sample, in the order of the samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from quark.errors import DataError
from quark.numerics.array_files import load_array
from quark.onnx.data import Feed
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.model import load
from quark.onnx.graph.run import session_options
from quark.onnx.graph.session import open_session
from quark.reading import read_text


def read_labels(path: Path, count: int) -> list[int]:
    """The classes of ``count`` samples, from an .npy file, or from text with one number a line.

    Raises:
        DataError: no such file, another number of labels, or something that is no class.
    """
    if path.suffix == ".npy":
        given = [str(one) for one in np.asarray(load_array(path)).ravel().tolist()]
    else:
        given = [line.strip() for line in read_text(path, DataError, "--labels").splitlines() if line.strip()]
    wrong = next((one for one in given if not one.isdecimal()), None)
    if wrong is not None:
        raise DataError(f"--labels {str(path)!r}: {wrong!r} is no class; write one number from 0 on for each sample")
    if len(given) != count:
        raise DataError(f"--labels {str(path)!r} has {len(given)} labels for {count} samples")
    return [int(one) for one in given]


def top1(model: str | Path, feeds: Iterable[Feed], labels: Sequence[int], libraries: Libraries = None) -> float:
    """The share of samples whose largest value in the first output is that of the label's class.

    Raises:
        DataError: an output that is no list of classes, or a label that has no class.
    """
    session = open_session(load(model), session_options(libraries))
    right = 0
    for feed, label in zip(feeds, labels, strict=True):
        scores = np.asarray(session.run(None, dict(feed))[0])
        if scores.size <= label or scores.size != max(scores.shape, default=0):
            raise DataError(
                f"--labels: the first output has the shape {list(scores.shape)}, which has no class {label}"
            )
        right += int(scores.ravel().argmax()) == label
    return right / max(len(labels), 1)
