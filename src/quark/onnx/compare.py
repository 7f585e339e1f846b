"""How far a quantized model is from its float model: end to end, and layer by layer.

Over all samples, with float values ``x`` and quantized values ``y`` of one tensor:

    SQNR   10 log10(Σ x² / Σ (x − y)²), dB        cosine   Σ xy / √(Σ x² Σ y²)
    L2     √Σ (x − y)²                            PSNR     10 log10(max|x|² / mean (x − y)²), dB

End to end, both models run as they ship. Layer by layer, both run with their intermediate tensors as outputs; tensors
are matched by name, and where the quantized model has a Q/DQ pair on a tensor, the value behind the pair is compared.
One sample is in memory at a time. A tensor that the quantized model holds times a scale per channel (equalization) is
compared once the scale is undone. Not handled: tensors inside subgraphs, those that a pass renamed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.config.plan import TensorPlan
from quark.dataclass import dataclass
from quark.errors import DataError
from quark.files.plain import TEXT
from quark.ir.surgery import tensors_by_name
from quark.measure.answers import Answers
from quark.measure.answers import update as update_answers
from quark.measure.distance import Distance
from quark.measure.scaling import Scaling
from quark.numerics.blocks import Block
from quark.numerics.elements import Int
from quark.observers.histogram import Histogram
from quark.onnx.data import checked, inputs_of, samples_of
from quark.onnx.data_layout import as_reader, widened
from quark.onnx.diagnosis import of_model
from quark.onnx.graph.halves import refuse_bfloat16
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.model import load
from quark.onnx.graph.quantized import DEQUANTIZE, FUSED, QUANTIZERS
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.graph.session import CPU, Runtime
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes.nchw_to_nhwc import images, moved
from quark.onnx.quantized_plan import rows_of
from quark.report.values import LayerView, TensorView, Weakness

Model = str | Path | onnx.ModelProto
BINS = 128
TIMED = 2.0
"""Seconds for timing where the figure was asked for."""
FLOAT, QUANTIZED = "float", "quantized"
"""The names of both models where they are timed."""
ODD = 25.0  # dB, below which a layer may have been rescaled


@dataclass(frozen=True)
class ComparedTensors:
    """A tensor of the float model and where its quantized form is.

    Attributes:
        name: tensor of the float model.
        quantized: tensor of the quantized model that holds the same quantity.
        node, op_type: what computes it in the quantized model ("" and "input" for graph inputs): the names by which a
            configuration excludes it.
        quantizer: the node that quantizes it, or None.
    """

    name: str
    quantized: str
    node: str
    op_type: str
    quantizer: ir.Node | None = None


@dataclass
class CodeRange:
    """What the codes of a tensor can express, and the values that came."""

    format: str
    low: float
    high: float
    step: float
    histogram: Histogram = field(default_factory=Histogram)
    outside: int = 0
    count: int = 0

    def update(self, values: np.ndarray) -> None:
        """Add one sample. A value within half a step of the range rounds to its end: that is not clipping."""
        values = values[np.isfinite(values)]
        self.histogram.update(values)
        half = self.step / 2
        self.outside += int(np.count_nonzero((values < self.low - half) | (values > self.high + half)))
        self.count += values.size

    def view(self, name: str) -> TensorView:
        """The histogram with its clipping range."""
        counts, edges = self.histogram.linear(BINS)
        share = self.outside / max(self.count, 1)
        return TensorView(name, self.format, self.low, self.high, counts, edges, share)


@dataclass(frozen=True)
class Comparison:
    """The distances of all outputs, of all layers and tensors that could be matched, and the layers of weak weights.

    ``answers``: what a user reads off each output, and how much of it is kept. An output of another shape than the
    float model's in some sample (another number of detections) has no distance there. ``moved``: the output that ONNX
    Runtime's optimizations move most, where that was asked for and is more than ``MOVED``. ``seconds``: per inference
    of one of the first samples, of "float" and "quantized", where that was asked for.
    """

    outputs: dict[str, Distance]
    layers: tuple[LayerView, ...]
    tensors: tuple[TensorView, ...]
    samples: int
    weak: tuple[Weakness, ...] = ()
    answers: Mapping[str, Answers] = field(default_factory=dict)
    moved: MovedOutput | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checks:
    """What a comparison measures beside the distances of outputs, and how long.

    Attributes:
        layers: whether intermediate tensors are compared (both models then run twice per sample).
        moved: whether the quantized graph is also run as it is written, on the first sample.
        timed: seconds in which both models are timed on it, side by side, about; None: they are not. Where the first
            ``FEWEST`` samples take as long, their own times serve.
        enough: seconds of the processor; where ``FEWEST`` samples took longer, no other one is compared. None: all are.
    """

    layers: bool = True
    moved: bool = False
    timed: float | None = None
    enough: float | None = None


ALL, ENDS = Checks(), Checks(layers=False)


def compare(
    float_model: Model,
    quantized_model: Model,
    samples: Iterable[Feed],
    checks: Checks = ALL,
    progress: Callable[[int], None] | None = None,
    libraries: Libraries = None,
) -> Comparison:
    """Run both models on the same samples and measure how far apart they are.

    Args:
        float_model: path or model.
        quantized_model: path or model with the same inputs and outputs.
        samples: feeds ``{input name: array}``.
        checks: what is measured beside the outputs, and how long.
        progress: called with the number of samples done.
        libraries: files with the models' custom operators.

    Raises:
        ModelError: a model cannot be read or run.
        DataError: no samples, samples that do not fit, or models whose inputs or outputs differ.
    """
    from quark.onnx.latency import FEWEST, Stopwatch, in_turns

    first, second = load(float_model, in_place=True), load(quantized_model)
    refuse_bfloat16(first, float_model, CPU)
    names = outputs_of(first, second)
    pairs = tuple(pairs_of(first, second)) if checks.layers else ()
    layout = relaid(first, second)
    runtime = Runtime(libraries=libraries, usual=checks.timed is not None)
    ours, theirs = Runner(first, names, runtime=runtime), Runner(second, names, runtime=runtime)
    inner = _both(first, second, [p.name for p in pairs], [p.quantized for p in pairs], libraries, layout)
    outputs, answers = {name: Distance() for name in names}, {name: Answers() for name in names}
    distances, scalings = [Distance() for _ in pairs], [Scaling() for _ in pairs]
    ranges = _code_ranges(second, pairs)
    done, start, seconds = 0, 0.0, dict[str, float]()
    beside: dict[str, Any] = {"seconds": seconds}
    feeds = checked(samples_of(as_reader(first, samples)), inputs_of(first))
    watch = Stopwatch({FLOAT: partial(_said, ours, names), QUANTIZED: partial(_answers, theirs, names, layout)})
    for done, (feed, *said) in enumerate(in_turns(feeds, watch.runs, (ours, theirs), checks.timed, seconds), start=1):
        found = dict(zip(names, zip(*said, strict=True), strict=True))
        if done == 1 and checks.moved:
            written = theirs.under(Runtime(libraries=libraries, optimize=False))
            beside["moved"] = _moved_most(found, dict(zip(names, _answers(written, names, layout, feed), strict=True)))
        start = time.process_time() if done == 1 else start
        watch.keep(feed)
        _count(found, outputs, answers)
        for distance, scaling, codes, (x, y) in zip(distances, scalings, ranges, inner(feed), strict=True):
            _observe(distance, scaling, codes, x, y)
        if progress:
            progress(done)
        if checks.enough is not None and done >= FEWEST and time.process_time() - start > checks.enough:
            break
    if done and checks.timed is not None and not seconds:
        one = watch.typical()
        both = {FLOAT: (float_model, ours, one), QUANTIZED: (quantized_model, theirs, layout.taken(one))}
        seconds.update(pace_of(both, checks.timed, libraries))
    views = _layers(pairs, distances, scalings), _views(pairs, ranges)
    return Comparison(outputs, *views, done, of_model(second) if checks.layers else (), answers, **beside)


def _count(
    found: Mapping[str, tuple[np.ndarray, np.ndarray]], outputs: Mapping[str, Distance], answers: dict[str, Answers]
) -> None:
    """Add what both models say on a sample."""
    first, second = ({name: pair[of] for name, pair in found.items()} for of in (0, 1))
    update_answers(answers, first, second)
    for name, (x, y) in found.items():
        if x.shape == y.shape and x.dtype.kind not in TEXT:
            outputs[name].update(x, y)


def pace_of(
    models: Mapping[str, tuple[Model, Runner, Feed]], seconds: float, libraries: Libraries
) -> Mapping[str, float]:
    """Seconds of an inference of each model, by name; one that is run in pieces is opened as a user opens it."""
    from quark.onnx import latency

    sessions = {
        name: (runner.session or latency.usual_session(model, libraries), feed)
        for name, (model, runner, feed) in models.items()
    }
    return latency.session_seconds(sessions, seconds)


MOVED = 0.5
"""dB from which it is told that ONNX Runtime's optimizations change how far a model is from the float one."""
EXACT = 100.0
"""dB above which both are that model but for what float32 rounds: nobody has to be told."""


@dataclass(frozen=True)
class MovedOutput:
    """An output that ONNX Runtime's optimizations move: dB of a default session, and of the graph as it is written.

    A default session puts integer kernels in the place of Q, DQ and what lies between them, which round once where the
    graph rounds at each node: a code may come out one higher or lower, and some models amplify that.
    """

    name: str
    optimized: float
    written: float


def _moved_most(
    optimized: Mapping[str, tuple[np.ndarray, np.ndarray]], written: Mapping[str, np.ndarray]
) -> MovedOutput | None:
    """The output that the optimizations move most, if by more than ``MOVED``.

    Args:
        optimized: pairs of float and quantized outputs of a default session, by name.
        written: quantized ones of the graph as it is written.
    """
    found = {name: (_decibels(x, y), _decibels(x, written[name])) for name, (x, y) in optimized.items()}
    told = {name: pair for name, pair in found.items() if all(map(math.isfinite, pair)) and min(pair) < EXACT}
    moved = [MovedOutput(name, *pair) for name, pair in told.items()]
    most = max(moved, key=lambda one: abs(one.optimized - one.written), default=None)
    return most if most is not None and abs(most.optimized - most.written) > MOVED else None


def _decibels(x: np.ndarray, y: np.ndarray) -> float:
    """The distance of one output on one sample; NaN where it has none."""
    distance = Distance()
    if x.dtype.kind == "f" and x.shape == y.shape:
        distance.update(x, y)
    return distance.sqnr


def _observe(distance: Distance, scaling: Scaling, codes: CodeRange | None, x: np.ndarray, y: np.ndarray) -> None:
    if x.dtype.kind != "f" or x.shape != y.shape:
        return
    distance.update(x, y)
    if distance.sqnr < ODD:
        scaling.update(x, y)
    if codes is not None:
        codes.update(x.astype(np.float32))


def _layers(
    pairs: Iterable[ComparedTensors], distances: Iterable[Distance], scalings: Iterable[Scaling]
) -> tuple[LayerView, ...]:
    measured = (
        (p, d, s) for p, d, s in zip(pairs, distances, scalings, strict=True) if d.count and p.op_type != "input"
    )
    return tuple(_layer(pair, distance, scaling.sqnr) for pair, distance, scaling in measured)


def _layer(pair: ComparedTensors, distance: Distance, unscaled: float | None) -> LayerView:
    sqnr = distance.sqnr if unscaled is None else unscaled
    return LayerView(pair.node, pair.op_type, pair.name, sqnr, distance.cosine, rescaled=unscaled is not None)


def _views(pairs: Iterable[ComparedTensors], ranges: Iterable[CodeRange | None]) -> tuple[TensorView, ...]:
    found = zip(pairs, ranges, strict=True)
    return tuple(codes.view(pair.name) for pair, codes in found if codes is not None and codes.count)


@dataclass(frozen=True)
class Relaid:
    """How the second model takes the samples of the first.

    Attributes:
        moved: inputs and outputs that have their channels last in the second model only (ConvertNCHWToNHWC).
        widened: inputs that are float16 in the first and float32 in the second (ConvertFP16ToFP32).
    """

    moved: frozenset[str]
    widened: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.moved or self.widened)

    def taken(self, feed: Feed) -> Feed:
        """The inputs of the first model, as the second takes them."""
        moved = {name: np.moveaxis(array, 1, -1) if name in self.moved else array for name, array in feed.items()}
        return widened(moved, self.widened)


def relaid(first: ir.Model, second: ir.Model) -> Relaid:
    """What a pass changed at the borders of the second model."""
    half = {value.name for value in first.graph.inputs if value.dtype == ir.DataType.FLOAT16}
    whole = {value.name for value in second.graph.inputs if value.dtype == ir.DataType.FLOAT}
    return Relaid(moved(images(first), images(second)), frozenset(str(name) for name in half & whole))


def _both(
    first: ir.Model,
    second: ir.Model,
    names: list[str],
    quantized: list[str],
    libraries: Libraries,
    layout: Relaid,
) -> Callable[[Feed], Iterator[tuple[np.ndarray, np.ndarray]]]:
    """A function that runs both models on a feed and gives the wanted tensors in pairs, in the axes of the first."""
    if not names:
        return lambda feed: iter(())
    runtime = Runtime(libraries=libraries)
    ours, theirs = Runner(first, names, runtime=runtime), Runner(second, quantized, runtime=runtime)
    return lambda feed: zip(_said(ours, names, feed), _answers(theirs, names, layout, feed, quantized), strict=True)


def _said(runner: Runner, names: list[str], feed: Feed) -> list[np.ndarray]:
    """What the first model says on a sample."""
    found = runner.run(feed).values
    return [found[name] for name in names]


def _answers(
    runner: Runner, names: list[str], layout: Relaid, feed: Feed, own: list[str] | None = None
) -> list[np.ndarray]:
    """What the second model says on a sample of the first, in the axes of the first; ``own``: its names for it."""
    found = runner.run(layout.taken(feed)).values
    pairs = zip(names, own or names, strict=True)
    return [np.moveaxis(found[key], -1, 1) if name in layout.moved else found[key] for name, key in pairs]


def outputs_of(first: ir.Model, second: ir.Model) -> list[str]:
    """The outputs of both models, or an error that says how they differ."""
    for what, ours, theirs in (
        ("inputs", first.graph.inputs, second.graph.inputs),
        ("outputs", first.graph.outputs, second.graph.outputs),
    ):
        a = [str(value.name) for value in ours if not value.is_initializer()]
        b = [str(value.name) for value in theirs if not value.is_initializer()]
        if set(a) != set(b):
            raise DataError(f"the models have different {what}: {a} and {b}; compare a model with its quantized form")
    return a


def pairs_of(first: ir.Model, second: ir.Model) -> Iterator[ComparedTensors]:
    """Every tensor that both models have, graph inputs first, then in the order of the float graph; not what no array
    holds: sequences, optionals, bfloat16."""
    ours, theirs = tensors_by_name(first), tensors_by_name(second)
    types = _typed(first) if any(one.type is None for one in ours.values()) else {k: v.type for k, v in ours.items()}
    for name in ours:
        quantized = theirs.get(name)
        if (
            not _is_array(types.get(name))
            or quantized is None
            or ((made := quantized.producer()) is not None and made.op_type == "Constant")
        ):
            continue
        quantizer = _quantizer(quantized)
        behind = _behind(quantizer) if quantizer else quantized
        node, op_type = _maker(quantized, quantizer)
        yield ComparedTensors(name, str(behind.name), node, op_type, quantizer)


def _typed(model: ir.Model) -> dict[str, ir.TypeProtocol | None]:
    """The types of all tensors, as far as inference tells them."""
    inferred = model.clone()
    infer_shapes(inferred)
    return {name: value.type for name, value in tensors_by_name(inferred).items()}


def _is_array(kind: ir.TypeProtocol | None) -> bool:
    return kind is None or (isinstance(kind, ir.TensorType) and kind.dtype != ir.DataType.BFLOAT16)


def _maker(quantized: ir.Value, quantizer: ir.Node | None) -> tuple[str, str]:
    """Name and operator of the node that computes a tensor, before any Q/DQ pair; its output's name if nameless."""
    source = quantizer.inputs[0] if quantizer is not None else quantized
    node = source.producer() if source is not None else None
    return ("", "input") if node is None else (node.name or str(quantized.name), node.op_type)


def _quantizer(value: ir.Value) -> ir.Node | None:
    """The node that turns ``value`` into codes: it reads it, or (at a graph output) its DequantizeLinear made it."""
    maker = value.producer()
    if maker is not None and maker.op_type in DEQUANTIZE:
        value = maker.inputs[0] or value
        return value.producer()
    readers = (use.node for use in value.uses() if use.idx == 0 and use.node.graph is value.graph)  # not in a body
    return next((node for node in readers if node.op_type in QUANTIZERS), None)


def _behind(quantizer: ir.Node) -> ir.Value:
    """The float tensor behind a quantizer and its DequantizeLinear."""
    codes = quantizer.outputs[0]
    if quantizer.op_type in FUSED:
        return codes
    readers = (use.node for use in codes.uses() if use.node.op_type in DEQUANTIZE)
    return next((node.outputs[0] for node in readers), quantizer.inputs[0] or codes)


def _code_ranges(model: ir.Model, pairs: Iterable[ComparedTensors]) -> list[CodeRange | None]:
    """The ranges of the codes of tensors, where their rows of the plan know a scale."""
    rows: dict[ir.Node | None, TensorPlan] = {
        node: row for node, row in rows_of(model, constants=False) if isinstance(row, TensorPlan)
    }
    return [_code_range(rows.get(pair.quantizer)) for pair in pairs]


def _code_range(row: TensorPlan | None) -> CodeRange | None:
    if row is None or row.given is None or isinstance(row.spec.row, Block):
        return None
    kind, (scale, zero) = row.spec.row, (np.asarray(side).astype(np.float64) for side in row.given)
    low, high = ((edge - zero) * scale for edge in (kind.min, kind.max))
    step = float(scale.max()) if isinstance(kind, Int) else 0.0
    return CodeRange(row.spec.format, float(low.min()), float(high.max()), step)
