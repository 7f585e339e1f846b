"""The error of one layer, added to what the float model has there, and what arrives of it at the outputs.

Only what lies behind the layer computes again: the graph is cut in a few places, and what crosses a cut is fed as the
float model makes it. So the error of a layer in the middle costs half a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.files.arrays import read_arrays, write_arrays
from quark.ir.surgery import apart
from quark.measure.outputs import Outputs
from quark.onnx.energy import macs_of
from quark.onnx.graph.run import FLOATS, Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.layer_runs import FloatModelFiles, OnnxLayerRuns, opened

CUTS = 8
"""Places, at most, from which the graph computes."""
_NOISE = "{}__noise"
Pair = tuple[str, str]


@dataclass(frozen=True)
class Stretch:
    """The layers of a stretch of the graph, from whose first node on it computes again.

    Attributes:
        start: the place of that node.
        layers: outputs of each, by name.
        crossing: tensors that the graph before it makes, and that it reads.
        share: of the model's multiplications.
    """

    start: int
    layers: Mapping[str, tuple[str, ...]]
    crossing: tuple[str, ...]
    share: float


def stretches(made: OnnxLayerRuns) -> tuple[Stretch, ...]:
    """The layers of the main graph in stretches of as many, in order."""
    nodes = list(opened(str(made.common.model)).graph)
    macs, names = macs_of(made.common), {unit.name for unit in made.layers}
    places = [place for place, node in enumerate(nodes) if node.name in names]
    size, found = max(1, -(-len(places) // CUTS)), list[Stretch]()
    start, crossing = 0, tuple[str, ...]()
    for group in (places[first : first + size] for first in range(0, len(places), size)):
        if (read := crossing_of(nodes[: group[0]])) is not None:  # else from where the stretch before it begins
            start, crossing = group[0], read
        behind = sum(macs.get(str(node.name), 0.0) for node in nodes[start:])
        outputs = {str(nodes[k].name): tuple(str(one.name) for one in nodes[k].outputs if one.name) for k in group}
        found.append(Stretch(start, outputs, crossing, behind / max(sum(macs.values()), 1.0)))
    return tuple(found)


def crossing_of(before: Sequence[ir.Node]) -> tuple[str, ...] | None:
    """What some nodes make and others read; None where a file cannot hold that."""
    found = [value for value, _, _ in _read_behind(before)]
    return tuple(dict.fromkeys(str(value.name) for value in found)) if all(map(_is_kept, found)) else None


def _is_kept(value: ir.Value) -> bool:
    """Whether a file can hold a value, so that it can be fed: a tensor of numbers that NumPy has."""
    if not isinstance(value.type, ir.TensorType) or value.dtype in (None, ir.DataType.UNDEFINED) or not value.name:
        return False
    kind = value.dtype.numpy()
    return kind.kind in "fiub" and kind.isbuiltin == 1


def _read_behind(before: Sequence[ir.Node]) -> Iterator[tuple[ir.Value, ir.Node, int]]:
    """Values that some nodes make, constants aside, with the other nodes and their slots that read them."""
    made = dict.fromkeys(node for node in before if node.op_type != "Constant")
    for value in (value for node in made for value in node.outputs):
        yield from ((value, use.node, use.idx) for use in value.uses() if use.node not in made)


def floats_of(made: OnnxLayerRuns, found: Sequence[Stretch]) -> tuple[str, ...]:
    """What is fed as the float model makes it: what layers read and make, and what crosses the cuts."""
    layers = {unit.name for unit in made.layers}
    nodes = (node for node in opened(str(made.common.model)).graph if node.name in layers)
    values = [value for node in nodes for value in (*node.inputs, *node.outputs) if value and value.producer()]
    plain = (str(value.name) for value in values if _is_kept(value))
    return tuple(dict.fromkeys((*plain, *(name for stretch in found for name in stretch.crossing))))


def write_floats(common: FloatModelFiles, names: Sequence[str], number: int) -> None:
    """Keep these tensors of the float model for one sample."""
    values = Runner(opened(str(common.model)), names, (), runtime_of(common)).run(common.feed(number)).values
    write_arrays(_floats(common, number), values)


def fed(common: FloatModelFiles, names: Sequence[str], number: int) -> dict[str, np.ndarray]:
    """One sample, with these tensors of the float model."""
    return {**common.feed(number), **read_arrays(_floats(common, number), names)}


def _floats(common: FloatModelFiles, number: int) -> Path:
    return common.folder / f"floats.{number}.safetensors"


def write_errors(common: FloatModelFiles, candidate: int, number: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Keep the errors of all layers under one candidate (its place among them) for one sample, by output."""
    write_arrays(_errors(common, candidate, number), arrays)


def _errors(common: FloatModelFiles, candidate: int, number: int) -> Path:
    return common.folder / f"errors{candidate}.{number}.safetensors"


def arriving(
    common: FloatModelFiles,
    stretch: Stretch,
    wanted: Mapping[Pair, int],
    numbers: Sequence[int],
    kl: bool,
    into: Mapping[Pair, Outputs],
) -> None:
    """Add what arrives at the outputs of the errors of single layers.

    Args:
        common: the float model, with the errors and floats of these samples written.
        stretch: the stretch that has the layers.
        wanted: (layer, candidate) with the place of the candidate.
        numbers: samples.
        kl: whether the divergence is wanted.
        into: what arrived on other samples, by (layer, candidate).
    """
    model = apart(opened(str(common.model)))
    nodes = list(model.graph)
    behind = {value.name: value.dtype for node in nodes[stretch.start :] for value in node.outputs}
    names = [name for layer in dict.fromkeys(layer for layer, _ in wanted) for name in stretch.layers[layer]]
    noisy = open_to_noise(cut(model, nodes[: stretch.start]), [name for name in names if behind[name] in FLOATS])
    runner = Runner(noisy, [name for name in common.outputs if name in behind], (), runtime_of(common))
    nothing = {_NOISE.format(name): np.zeros((), kind.numpy()) for name in names if (kind := behind[name]) in FLOATS}
    for number in numbers:
        reference, feed = common.reference(number), {**fed(common, stretch.crossing, number), **nothing}
        for pair, candidate in wanted.items():
            errors = read_arrays(_errors(common, candidate, number), stretch.layers[pair[0]])
            noise = {_NOISE.format(name): array for name, array in errors.items()}
            into[pair].update(reference, {**reference, **runner.run({**feed, **noise}).values}, kl)


def runtime_of(common: FloatModelFiles) -> Runtime:
    """How models run here."""
    return replace(Runtime.of(common.job.options), threads=common.threads)


def cut(model: ir.Model, before: Sequence[ir.Node]) -> ir.Model:
    """The model, in place, with what some of its nodes make for the others as inputs of the names that it has."""
    inputs: dict[ir.Value, ir.Value] = {}
    for value, node, slot in list(_read_behind(before)):
        if value not in inputs:
            inputs[value] = ir.Value(name=value.name, type=value.type, shape=_length(value))
            value.name = f"{value.name}__before"
            model.graph.inputs.append(inputs[value])
        node.replace_input_with(slot, inputs[value])
    return model


def _length(value: ir.Value) -> ir.Shape | None:
    """The shape of sizes and indices, whose number is the same for all samples: ONNX Runtime takes sizes of unknown
    number, which a Resize reads, for none. Other shapes are not proved."""
    known = value.dtype not in FLOATS and value.shape is not None and len(value.shape) == 1 and value.shape.is_static()
    return value.shape if known else None


def open_to_noise(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """The model, in place, with an input for each of these tensors that is added to it for all who read it."""
    made = {value.name: (node, value) for node in model.graph for value in node.outputs}
    for name in names:
        node, value = made[name]
        noise = ir.Value(name=_NOISE.format(name), type=ir.TensorType(value.dtype or ir.DataType.FLOAT))
        model.graph.inputs.append(noise)
        added = ir.Node("", "Add", [value, noise], name=f"{noise.name}_added")
        own = added.outputs[0]
        own.type, own.shape = value.type, value.shape
        uses = list(value.uses())
        model.graph.insert_after(node, added)
        for use in uses:
            if use.node is not added:
                use.node.replace_input_with(use.idx, own)
        if value.is_graph_output():
            places = [k for k, one in enumerate(model.graph.outputs) if one is value]
            value.name, own.name = f"{name}__before", name
            for place in places:
                model.graph.outputs[place] = own
    return model
