"""What models answer on single samples, before and after, where the outputs are classes, boxes or pictures.

    classes   the likeliest of the first row; logits become probabilities
    boxes     detections above the threshold of ``quark.measure.answers``, on the input where that is a picture
    picture   outputs ``[1, 1 or 3, height, width]``, both models' from darkest to brightest of the float model's

Which of them an output is, its values in the float model decide. Not handled: outputs that a program decodes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np

from quark.measure.answers import kind_of, probabilities
from quark.measure.boxes import CONFIDENT
from quark.measure.detections import Detections, layout_of, read
from quark.onnx.compare import Model, outputs_of, relaid
from quark.onnx.data import checked, inputs_of
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.model import load
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.graph.session import Runtime
from quark.report.values import Box, Example, SampleAnswer

SAMPLES = 3
OUTPUTS = 4
LIKELIEST, BOXES = 5, 30
SMALLEST = 12  # height and width of what is a picture


def examples(
    float_model: Model, quantized: Sequence[Model], samples: Iterable[Feed], libraries: Libraries = None
) -> tuple[Example, ...]:
    """Outputs of the float model and of each quantized one on the first samples; models as in ``compare``."""
    first = load(float_model)
    others = [load(one) for one in quantized]
    if any(relaid(first, other) for other in others):
        return ()
    names = outputs_of(first, others[0])
    runners = [Runner(model, names, runtime=Runtime(libraries=libraries)) for model in (first, *others)]
    found: list[Example] = []
    for index, feed in enumerate(islice(checked(samples, inputs_of(first)), SAMPLES)):
        said = [runner.run(feed).values for runner in runners]
        boxes = _detections(index, feed, said)
        found += [boxes] if boxes else [one for name in names if (one := _single(name, index, feed, said))][:OUTPUTS]
    return tuple(found)


def _detections(index: int, feed: Feed, said: Sequence[Mapping[str, np.ndarray]]) -> Example | None:
    """The detections of all models, which are read as the float model's are."""
    layout = layout_of(said[0])
    if layout is None or any(one[layout.boxes].shape != said[0][layout.boxes].shape for one in said):
        return None
    size = np.array((1, 1) if layout.relative else _size(feed))
    answers = tuple(SampleAnswer(boxes=_boxes(read(one, layout), size)) for one in said)
    return Example(layout.boxes, "boxes", index, answers, _input(feed))


def _single(name: str, index: int, feed: Feed, said: Sequence[Mapping[str, np.ndarray]]) -> Example | None:
    """Classes or a picture."""
    shown, values = _input(feed), [one[name] for one in said]
    before = values[0]
    if before.dtype.kind != "f" or any(value.shape != before.shape for value in values):
        return None
    if is_picture(before):
        span = float(np.nanmin(before)), float(np.nanmax(before))
        return Example(
            name, "picture", index, tuple(SampleAnswer(picture=_grey(value, span)) for value in values), shown
        )
    if kind_of(before) == "classes":
        return Example(
            name, "classes", index, tuple(SampleAnswer(classes=_likeliest(value)) for value in values), shown
        )
    return None


def is_picture(x: np.ndarray) -> bool:
    """Whether an array looks like one picture, channels first or last."""
    if x.ndim != 4 or x.dtype.kind not in "fu":
        return False
    first = x.shape[1] in (1, 3) and min(x.shape[2:]) >= SMALLEST
    return first or (x.shape[3] in (1, 3) and min(x.shape[1:3]) >= SMALLEST)


def _input(feed: Feed) -> np.ndarray | None:
    """The only input that is a picture, from its darkest value to its brightest."""
    found = [array for array in feed.values() if is_picture(array)]
    return _grey(found[0], (float(found[0].min()), float(found[0].max()))) if len(found) == 1 else None


def _grey(x: np.ndarray, span: tuple[float, float]) -> np.ndarray:
    """The first picture, in 0..255."""
    picture = np.moveaxis(x[0], 0, -1) if x.shape[1] in (1, 3) else x[0]
    scaled = (picture.astype(np.float64) - span[0]) / ((span[1] - span[0]) or 1)
    bytes_ = np.clip(np.nan_to_num(scaled) * 255, 0, 255).astype(np.uint8)
    return bytes_[..., 0] if bytes_.shape[-1] == 1 else bytes_


def _size(feed: Feed) -> tuple[int, int]:
    """Width and height of the input picture; of a unit square where there is none."""
    array = next((array for array in feed.values() if is_picture(array)), None)
    if array is None:
        return 1, 1
    height, width = array.shape[2:] if array.shape[1] in (1, 3) else array.shape[1:3]
    return width, height


def _likeliest(x: np.ndarray) -> tuple[tuple[int, float], ...]:
    row = probabilities(x)
    chosen = np.argsort(-row, kind="stable")[:LIKELIEST]
    return tuple((int(kind), float(row[kind])) for kind in chosen)


def _boxes(found: Detections, size: np.ndarray) -> tuple[Box, ...]:
    """The confident ones, as shares of a picture of this width and height."""
    shares = np.clip(found.boxes / np.tile(size, 2), -1, 2).tolist()
    told = zip(shares, found.scores, found.classes, strict=True)
    confident = (Box(tuple(box), float(score), int(kind)) for box, score, kind in told if score >= CONFIDENT)
    return tuple(islice(confident, BOXES))
