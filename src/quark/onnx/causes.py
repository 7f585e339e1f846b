"""Which layers cause the loss: the error that each makes alone, at its own output and at the model's outputs.

A layer late in a graph is far from the float model because of every layer before it (the *accumulated* error). What a
layer adds to that is told by two experiments:

    own    the quantized model is cut at every tensor that both models have: each piece reads the float model's values,
           and what it gives is compared with the float model's. All pieces are one run. A pair of Q and DQ belongs to
           the node in front of it, so that every rounding counts once.
    alone  the float model with one of these errors added to its tensor, and no other: what is compared is its outputs,
           of which the worst counts. One run of the float model a layer and sample, the largest own errors first, for
           as long as ``seconds`` allow, but ``LEAST`` layers in any case.

No cut is made at tensors that the quantized model holds rescaled per channel (equalization, smoothing): the piece then
reaches from the tensor before to the one behind, and its error counts there. Not handled: inner tensors of subgraphs;
models whose layout was changed (ConvertNCHWToNHWC) and float models below opset 7 have no figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from itertools import islice

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import Names, opset, tensors_by_name
from quark.measure.distance import Distance
from quark.measure.scaling import Scaling
from quark.onnx.compare import ComparedTensors, Comparison, Model, outputs_of, pairs_of, relaid
from quark.onnx.data import checked, inputs_of
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.model import load
from quark.onnx.graph.quantized import DEQUANTIZE, QUANTIZERS
from quark.onnx.graph.rewriting import insert_behind
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.graph.session import Runtime

SAMPLES = 4
"""Samples that the experiments run on, at most."""
SECONDS = 15.0
"""Time for runs of the float model with one error each."""
LEAST = 20
"""Layers that are measured at the outputs whatever the time."""
BROADCASTS = 7  # the opset from which Add takes a scalar


@dataclass
class Causes:
    """What was measured, by tensor of the float model: dB.

    Attributes:
        own: of each layer's error at its own output.
        alone: of the same error at the output that it harms most.
        samples: how many samples the figures of ``own`` rest on.
        rescaled: tensors that no cut was made at.
    """

    own: dict[str, float] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    rescaled: frozenset[str] = frozenset()

    def told(self) -> str:
        """How the figures came about, for a reader."""
        if not self.own:
            return "The errors of single layers were not measured: the layouts of the two models differ."
        left = len(self.own) - len(self.alone)
        few = f", for all but the {left} layers with the smallest own errors" if left else ""
        return (
            f"On {self.samples} {'sample' if self.samples == 1 else 'samples'}. Own: each piece of the quantized model "
            "runs on the float model's values. Alone: the float model runs with the own error of one layer added; the "
            f"output that this harms most counts{few}."
        )

    def held(self) -> str:
        """What has no figures, for a reader; empty where everything has."""
        if not self.rescaled:
            return ""
        count = len(self.rescaled)
        kept = f"{count} tensors are" if count > 1 else "1 tensor is"
        return f"{kept} rescaled per channel: their errors count in the layers behind them."


def causes(
    float_model: Model,
    quantized_model: Model,
    samples: Iterable[Feed],
    seconds: float = SECONDS,
    progress: Callable[[int], None] | None = None,
    libraries: Libraries = None,
) -> Causes:
    """Measure what each layer of a quantized model loses by itself.

    Args:
        float_model, quantized_model: paths or models with the same inputs and outputs.
        samples: feeds; the first ``SAMPLES`` are used.
        seconds: for runs of the float model with single errors.
        progress: called with the number of samples done.
        libraries: files with the models' custom operators.

    Raises:
        ModelError: a model cannot be read or run.
        DataError: samples that do not fit, or models whose inputs or outputs differ.
    """
    first, second = load(float_model), load(quantized_model)
    names = outputs_of(first, second)
    if relaid(first, second):
        return Causes()
    feeds = list(islice(checked(samples, inputs_of(first)), SAMPLES))
    runs = _PairRuns(first, second, feeds, libraries)
    found = Causes(samples=len(feeds), rescaled=frozenset(runs.rescaled))
    own: dict[str, Distance] = {}
    ends: dict[str, dict[str, Distance]] = {}
    stop = time.perf_counter() + seconds
    for index, feed in enumerate(feeds):
        errors = runs.errors(feed, own)
        if opset(first) >= BROADCASTS and (not index or (ends and time.perf_counter() + runs.spent < stop)):
            ranked = sorted(errors, key=lambda name: own[name].sqnr)
            chosen = {name: errors[name] for name in ranked if not ends or name in ends}
            runs.inject(feed, names, chosen, ends, stop if not index else np.inf)
        if progress:
            progress(index + 1)
    found.own = {name: one.sqnr for name, one in own.items()}
    exact = {name: np.inf for name, sqnr in found.own.items() if sqnr == np.inf}
    found.alone = exact | {
        name: float(np.min([one.sqnr for one in each.values()])) for name, each in ends.items() if each
    }
    return found


def with_causes(found: Comparison, measured: Causes) -> Comparison:
    """The comparison, its layers with what each causes."""
    layers = (
        replace(one, own=measured.own.get(one.tensor), alone=measured.alone.get(one.tensor)) for one in found.layers
    )
    return replace(found, layers=tuple(layers))


class _PairRuns:
    """The runners of the experiments, made for the sizes and types of the first sample."""

    def __init__(self, first: ir.Model, second: ir.Model, feeds: Sequence[Feed], libraries: Libraries) -> None:
        self.first, self.libraries = first, libraries
        pairs = list(pairs_of(first, second))
        self._floats = Runner(first, [pair.name for pair in pairs], runtime=Runtime(libraries=libraries))
        theirs = Runner(second, [pair.quantized for pair in pairs], runtime=Runtime(libraries=libraries))
        kept, scalings = pairs, {pair.name: Scaling() for pair in pairs}
        for feed in feeds:
            x, y = self._floats.run(feed).values, theirs.run(feed).values
            kept = [pair for pair in kept if _alike(x[pair.name], y[pair.quantized])]
            for pair in kept:
                scalings[pair.name].update(x[pair.name], y[pair.quantized])
        self.rescaled = [pair.name for pair in kept if scalings[pair.name].found]
        self.pairs = [pair for pair in kept if pair.name not in set(self.rescaled)]
        self._types = {pair.name: ir.DataType.from_numpy(x[pair.name].dtype) for pair in self.pairs} if feeds else {}
        cut, self._fed = cut_at(second, self.pairs, self._types)
        self._pieces = Runner(cut, [pair.quantized for pair in self.pairs], runtime=Runtime(libraries=libraries))
        self._injected: Runner | None = None
        self.spent = 0.0

    def errors(self, feed: Feed, own: dict[str, Distance]) -> dict[str, np.ndarray]:
        """The own error of every layer on one sample, those that make one; ``own`` grows."""
        x = self._floats.run(feed).values
        given = {fed: x[name] for name, fed in self._fed.items()}
        y = self._pieces.run({**feed, **given}).values
        found = {}
        for pair in self.pairs:
            value, other = x[pair.name], y[pair.quantized]
            own.setdefault(pair.name, Distance()).update(value, other)
            error = other - value
            if np.isfinite(error).all() and error.any():
                found[pair.name] = error
        return found

    def inject(
        self,
        feed: Feed,
        names: Sequence[str],
        errors: Mapping[str, np.ndarray],
        ends: dict[str, dict[str, Distance]],
        stop: float,
    ) -> None:
        """The distance of the outputs under each error alone; ``ends`` grows."""
        begun = time.perf_counter()
        if self._injected is None:
            self._open(names, list(errors))
        if self._injected is None:
            return
        still = {fed: np.zeros((), self._types[name].numpy()) for name, fed in self._ports.items()}
        reference = self._injected.run({**feed, **still}).values
        for name in (name for name in errors if name in self._ports):
            if time.perf_counter() > stop and len(ends) >= LEAST:
                break
            found = self._injected.run({**feed, **still, self._ports[name]: errors[name]}).values
            each = ends.setdefault(name, {})
            for output, ending in zip(names, self._endings, strict=True):
                x, y = reference[ending], found[ending]
                if x.dtype.kind == "f" and x.shape == y.shape:
                    each.setdefault(output, Distance()).update(x, y)
        self.spent = time.perf_counter() - begun

    def _open(self, names: Sequence[str], tensors: Sequence[str]) -> None:
        model, self._ports, self._endings = with_ports(self.first, names, tensors, self._types)
        if self._ports:
            self._injected = Runner(model, self._endings, runtime=Runtime(libraries=self.libraries))


def cut_at(
    model: ir.Model, pairs: Iterable[ComparedTensors], types: Mapping[str, ir.DataType]
) -> tuple[ir.Model, dict[str, str]]:
    """A copy in which every reader of a tensor reads a new input instead; the inputs, by tensor of the float model."""
    cut = model.clone()
    values, names, fed = tensors_by_name(cut), Names(cut), {}
    for pair in pairs:
        source = ir.Value(name=names.fresh(f"{pair.name}_float"), type=ir.TensorType(types[pair.name]))
        behind = values[pair.quantized]
        before = _in_front_of(behind)
        for value in {id(one): one for one in (behind, before)}.values():
            for use in list(value.uses()):
                if value is behind or use.node.op_type not in QUANTIZERS or use.idx:
                    use.node.replace_input_with(use.idx, source)
        cut.graph.inputs.append(source)
        fed[pair.name] = str(source.name)
    return cut, fed


def _in_front_of(behind: ir.Value) -> ir.Value:
    """The tensor that a pair of Q and DQ reads; the tensor itself where there is no pair."""
    node = behind.producer()
    if node is not None and node.op_type in DEQUANTIZE and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    quantizer = node is not None and node.op_type in QUANTIZERS
    return node.inputs[0] or behind if node is not None and quantizer else behind


def with_ports(
    model: ir.Model, outputs: Sequence[str], tensors: Iterable[str], types: Mapping[str, ir.DataType]
) -> tuple[ir.Model, dict[str, str], list[str]]:
    """A copy with an addition behind each of ``tensors``; its new inputs by tensor; the names of its outputs."""
    opened = model.clone()
    values = tensors_by_name(opened)
    names, ports, renamed = Names(opened), {}, {name: name for name in outputs}
    for name in tensors:
        value = values[name]
        added = ir.Value(name=names.fresh(f"{name}_error"), type=ir.TensorType(types[name]))
        total = ir.Value(name=names.fresh(f"{name}_with_error"), type=value.type, shape=value.shape)
        node = ir.Node("", "Add", [value, added], outputs=[total])
        for use in [use for use in value.uses() if use.node is not node]:
            use.node.replace_input_with(use.idx, total)
        insert_behind(opened.graph, value, node)
        opened.graph.inputs.append(added)
        ports[name] = str(added.name)
        if name in renamed:
            renamed[name] = str(total.name)
    return opened, ports, list(renamed.values())


def _alike(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two tensors can be compared at all."""
    return x.dtype.kind == "f" and x.dtype == y.dtype and x.shape == y.shape and x.size > 0
