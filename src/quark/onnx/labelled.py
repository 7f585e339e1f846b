"""Metrics that ``--metric`` names, on samples with labels.

What the labels are read from:

    top1, topN    classes: one a line, an .npy file, a .csv of file and class, or the folders that the samples lie in
    map50         boxes: a COCO-style JSON file
    miou          masks: a folder of .png files named like the samples, or an .npy file [samples, height, width]
    si-sdr        clean sounds: a folder, or an .npz or .npy file, read as the samples are
    perplexity    nothing: the tokens are their own labels

A metric is a row of ``METRICS``: ``read`` gives one label a sample, ``judge`` what one sample says, ``total`` the
metric of some of the samples. Every value is larger for the better model: a perplexity comes with a minus.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError, DataError, nearest, unknown
from quark.measure import labelled as arrays
from quark.measure.detections import DetectionLayout, average_precision, layout_of, read, scored
from quark.measure.score import Score, score
from quark.onnx.data import Feed, inputs_of
from quark.onnx.data_files import file_of, find_samples
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.model import load
from quark.onnx.graph.run import as_array, run_in_time, session_options
from quark.onnx.graph.session import Runtime, open_session
from quark.onnx.labels import LabelSource, boxes_of, classes_of, mask_of, masks_of

Outputs = dict[str, np.ndarray]
Total = Callable[[Sequence[int]], float]


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        read: the labels of the samples, one each.
        judge: (outputs, feed, label, known) → what one sample says.
        total: of all that samples said, the metric of some by their indices.
        words: a value of it, for people.
        know: what has to be known of the float model's first outputs.
        labels: whether labels have to be given.
    """

    read: Callable[[LabelSource], Sequence[Any]]
    judge: Callable[[Outputs, Feed, Any, Any], Any]
    total: Callable[[Sequence[Any]], Total]
    words: str = "{:.4g}"
    know: Callable[[Outputs, LabelSource], Any] = field(default=lambda outputs, given: None)
    labels: bool = True


def metric_of(name: str) -> Metric:
    """The metric of a name.

    Raises:
        ConfigError: none of this name.
    """
    first = re.fullmatch(r"top([1-9]\d{0,3})", name)
    if first is not None:
        count = int(first[1])
        return Metric(
            classes_of, partial(_among_first, count), _mean, "{:.1%}", partial(_classes, most=count), labels=False
        )
    if name not in METRICS:
        own = "" if nearest(name, NAMES) else ", or FILE.py:FUNCTION for your own"
        raise ConfigError(unknown("--metric", name, NAMES) + own)
    return METRICS[name]


def is_name(text: str) -> bool:
    """Whether ``--metric`` names a built-in metric, not a function of the user's."""
    return ":" not in text


def measured(
    model: str | Path, metric: Metric, labelled: Iterable[tuple[Feed, Any]], known: Any, libraries: Libraries = None
) -> Score:
    """The metric of a model on (sample, label) pairs.

    Raises:
        DataError: outputs that the metric cannot read.
    """
    feeds, labels = tee(labelled)
    outputs = outputs_of(model, (feed for feed, _ in feeds), libraries)
    said = [metric.judge(out, feed, label, known) for (feed, out), (_, label) in zip(outputs, labels, strict=True)]
    return score(metric.total(said), len(said))


def outputs_of(model: str | Path, feeds: Iterable[Feed], libraries: Libraries = None) -> Iterator[tuple[Feed, Outputs]]:
    """Every sample with what the model makes of it."""
    session = open_session(load(model), session_options(Runtime(libraries=libraries)))
    names = [one.name for one in session.get_outputs()]
    for feed in feeds:
        found = run_in_time(session, None, feed, None)
        yield feed, {name: as_array(value) for name, value in zip(names, found, strict=True)}


def metrics_on(
    name: str,
    model: Path,
    given: LabelSource,
    parts: Sequence[tuple[Iterable[Feed], Sequence[int]]],
    libraries: Libraries = None,
) -> list[Callable[[str], Score]]:
    """The metric by its name, as functions of a model's path, on parts of the samples.

    Args:
        name: of the metric.
        model: the float model, which decides how outputs are read.
        given: the labels and the samples' files.
        parts: samples, and their indices among all.
        libraries: files with the models' custom operators.

    Raises:
        ConfigError, DataError: no such metric, labels that do not fit, or outputs that cannot be read.
    """
    metric = metric_of(name)
    if metric.labels and given.labels is None:
        raise ConfigError(f"--metric {name} needs --labels: {_WANTED[name]}")
    if given.labels is not None and name == "perplexity":
        raise ConfigError("--metric perplexity takes no --labels: the tokens are their own")
    _, first = next(outputs_of(model, parts[0][0], libraries))
    known, labels = metric.know(first, given), metric.read(given)
    if len(labels) != given.count:
        raise DataError(f"--labels {str(given.labels)!r} has {len(labels)} labels for {given.count} samples")

    def on(feeds: Iterable[Feed], part: Sequence[int]) -> Callable[[str], Score]:
        return lambda path: measured(path, metric, zip(feeds, (labels[k] for k in part), strict=True), known, libraries)

    return [on(feeds, part) for feeds, part in parts]


# ---- rows ------------------------------------------------------------------------------------------------------------


def _mean(said: Sequence[Any]) -> Total:
    return lambda chosen: float(np.mean([said[k] for k in chosen]))


def _of_sums(value: Callable[[np.ndarray], float]) -> Callable[[Sequence[Any]], Total]:
    return lambda said: lambda chosen: value(np.asarray([said[k] for k in chosen]))


def _classes(outputs: Outputs, given: LabelSource, most: int) -> int:
    """How many classes the first output tells apart; more than ``most``, of which every answer would be right."""
    scores = next(iter(outputs.values()))
    if scores.size != max(scores.shape, default=0):
        raise DataError(
            f"the first output has the shape {list(scores.shape)}: it is not a list of classes for one sample"
        )
    if scores.size <= most:
        raise DataError(
            f"--metric top{most}: the first output has {scores.size} classes, so every answer is among them"
        )
    folders = given.folders()
    if given.labels is None and len(folders) != scores.size and not all(one.isdecimal() for one in folders):
        raise DataError(
            f"the samples lie in {len(folders)} folders and the model tells {scores.size} classes apart: name the "
            "folders by the numbers of their classes, or give --labels"
        )
    return int(scores.size)


def _among_first(first: int, outputs: Outputs, feed: Feed, label: int, classes: int) -> float:
    if label >= classes:
        raise DataError(f"--labels: the first output has {classes} classes, so there is no class {label}")
    return arrays.among_first(next(iter(outputs.values())), label, first)


@dataclass(frozen=True)
class _Boxes:
    layout: DetectionLayout
    given: LabelSource


def _layout(outputs: Outputs, given: LabelSource) -> _Boxes:
    layout = layout_of(outputs)
    if layout is None:
        raise DataError(
            "--metric map50: no output holds boxes with scores; where a program decodes them afterwards, "
            "do it in a function of yours: --metric FILE.py:FUNCTION"
        )
    return _Boxes(layout, given)


def _found(outputs: Outputs, feed: Feed, label: Any, known: _Boxes) -> Any:
    found, count = read(outputs, known.layout), scored(outputs, known.layout)[1].shape[1]
    if (kind := max((int(row[4]) for row in label.rows), default=0)) >= count:
        raise DataError(f"{known.given.said}: a box is of class {kind} (from 0 on), and the model knows {count}")
    shape = next(array.shape for array in feed.values() if array.ndim == 4)
    sides = (shape[2], shape[3]) if shape[1] in (1, 3) else (shape[1], shape[2])
    return found, known.given.seen(label, sides, known.layout.relative)


def _precision(said: Sequence[Any]) -> Total:
    try:
        return average_precision([one for one, _ in said], [truth for _, truth in said])
    except ImportError as error:
        raise ConfigError("--metric map50 needs pycocotools: pip install pycocotools (the extra vision)") from error


def _overlaps(outputs: Outputs, feed: Feed, label: Any, known: LabelSource) -> np.ndarray:
    scores = next(iter(outputs.values()))
    labels = scores.dtype.kind in "iu"
    if scores.ndim != (3 if labels else 4) and not (labels and scores.ndim == 4 and scores.shape[1] == 1):
        raise DataError(
            f"--metric miou: the first output has the shape {list(scores.shape)}; it must be scores "
            "[1, classes, height, width] or classes [1, height, width]"
        )
    if not labels and scores.shape[1] == 1:
        raise DataError(
            "--metric miou: the first output has one channel, and from which value on it means class 1 is not known: "
            "say it in a function of yours, --metric FILE.py:FUNCTION"
        )
    predicted = scores.reshape(scores.shape[-2:]) if labels else scores[0].argmax(0)
    truth = mask_of(label, predicted.shape, known.settings)
    highest = int(truth[truth != arrays.IGNORED].max(initial=0))
    if not labels and highest >= scores.shape[1]:
        raise DataError(f"{known.said}: a mask has the class {highest}, and the model tells {scores.shape[1]} apart, "
                        f"from 0 on; {arrays.IGNORED} is what counts for nothing")  # fmt: skip
    classes = max(int(predicted.max()), highest) + 1
    found = arrays.overlaps(predicted, truth, 256)
    return found if classes <= 256 else arrays.overlaps(predicted, truth, classes)


def _sound(outputs: Outputs, feed: Feed, label: np.ndarray, known: Any) -> tuple[float, float]:
    made = next((one for one in outputs.values() if one.size == label.size), None)
    if made is None:
        shapes = {name: list(one.shape) for name, one in outputs.items()}
        raise DataError(f"--metric si-sdr: a clean sound has {label.size} frames, and no output has as many: {shapes}")
    return arrays.si_sdr(label, made)


def _sounds(given: LabelSource) -> list[np.ndarray]:
    inputs = [one for one in inputs_of(load(given.model)) if one.dtype is not None and one.dtype.kind == "f"]
    readers = find_samples(Path(str(given.labels)), inputs[:1], given.settings)
    names = {None if file is None else file.stem for file in map(file_of, readers)}
    known = [None if file is None else file.stem for file in given.files]
    lost = [name for name in dict.fromkeys(known) if name not in names]
    if lost and len(lost) < len(set(known)):  # all other names: in their order
        raise DataError(f"{given.said} has no clean sound for the sample {lost[0]!r}, and has those of other samples")
    return [next(iter(reader().values())) for reader in readers]


def _tokens(outputs: Outputs, feed: Feed, label: Any, known: str) -> tuple[float, int]:
    ids = feed[known]
    logits = next((x for x in outputs.values() if x.ndim == 3 and x.shape[:2] == ids.shape), None)
    if logits is None or ids.shape[1] < 2:
        raise DataError("--metric perplexity: no output holds logits [batch, tokens, vocabulary], two tokens or more")
    return arrays.log_loss(logits, ids)


def _ids(outputs: Outputs, given: LabelSource) -> str:
    whole = [one.name for one in inputs_of(load(given.model)) if one.dtype is not None and one.dtype.kind == "i"]
    named = [name for name in whole if "ids" in name and "position" not in name and "type" not in name]
    if len(named or whole) != 1:
        raise DataError(f"--metric perplexity needs one input of token ids; the model has {named or whole or 'none'}")
    return (named or whole)[0]


METRICS: Mapping[str, Metric] = {
    "map50": Metric(boxes_of, _found, _precision, "{:.4f}", _layout),
    "miou": Metric(masks_of, _overlaps, _of_sums(arrays.mean_overlap), "{:.4f}", lambda outputs, given: given),
    "si-sdr": Metric(_sounds, _sound, _of_sums(arrays.decibels), "{:.2f} dB"),
    "perplexity": Metric(
        lambda given: [None] * given.count,
        _tokens,
        _of_sums(lambda sums: -arrays.perplexity(sums)),
        "{:.4g}",
        _ids,
        labels=False,
    ),
}
NAMES = ("top1", "top5", *METRICS)
_WANTED = {
    "map50": "a COCO-style JSON file with the boxes",
    "miou": "a folder of .png masks named like the samples, or an .npy file [samples, height, width]",
    "si-sdr": "the clean sounds, a folder or a file as --data names one",
}


def said(name: str, value: float) -> str:
    """A value of a metric in words, without the minus that makes the better one larger."""
    words = metric_of(name).words if is_name(name) else "{:.4g}"
    return words.format(-value if name == "perplexity" else value).replace("%", " %")
