"""Quantize the bodies of If and Loop: those that hold layers, or all of them (EnableSubgraph).

Each body becomes a model of its own: what it reads of the graph around it becomes inputs (constants become weights),
and the whole flow runs on it: passes, placement, calibration, emission. Its calibration data is what the float model
hands it: for an If, the values around it in every sample that takes that branch; for a Loop, the state of every
iteration, which is run here one by one. The quantized body then takes the place of the float one. Bodies inside bodies
likewise.

A body that no calibration sample enters stays float, and the report says so: a range that nothing was seen of would be
a guess. Weights of a body are serialized once. Not handled: Scan, and algorithms that tune weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.plan import Plan
from quark.config.rules import NodeInfo
from quark.onnx.calibration import calibrate
from quark.onnx.data import checked, inputs_of, samples_of
from quark.onnx.graph import model as files
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.graph.surgery import bodies, is_constant, label, read_nothing
from quark.onnx.passes import constants
from quark.onnx.pipeline import BODY, run_steps
from quark.onnx.qdq.modes import MODES
from quark.onnx.qdq.parameters import observed
from quark.onnx.qdq.selection import known_nodes
from quark.onnx.qdq.settings import request_of

CONTROL = ("If", "Loop")
#: What makes a body worth quantizing.
LAYERS = frozenset(["Conv", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul", "RNN"])


@dataclass(frozen=True)
class QuantizedBody:
    """A quantized body: where it belongs, and which of its inputs are values of the graph around it."""

    node: str
    attribute: str
    model: ir.Model
    captured: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True)
class Made:
    """What became of the bodies of a graph."""

    bodies: tuple[QuantizedBody, ...] = ()
    reports: tuple[PassReport, ...] = ()


def all_known(model: ir.Model) -> list[NodeInfo]:
    """The nodes of the graph and of every body: names that rules may use."""
    found = known_nodes(model)
    for _, _, graph in _graphs(model):
        found += all_known(_alone(graph, model)[0])
    return found


def wants_bodies(model: ir.Model, options: Options) -> bool:
    """Whether any body of the model is to be quantized."""
    return any(_is_wanted(graph, options) for _, _, graph in _graphs(model))


def _is_wanted(graph: ir.Graph, options: Options) -> bool:
    if options.EnableSubgraph is not None:
        return options.EnableSubgraph
    return any(node.op_type in LAYERS and not node.domain for node in ir.traversal.RecursiveGraphIterator(graph))


def quantize_bodies(model: ir.Model, job: Job, reader: Any, known: Sequence[NodeInfo]) -> Made:
    """Quantize the bodies of the main graph. ``model`` stays as it is; :func:`install` puts the bodies in place.

    Args:
        model: the prepared float model.
        reader: samples for ``model``, read once for each body; ``None`` where no ranges are needed.
        known: nodes of the whole model, whose names the user may have written.
    """
    bodies, fired, refused = [], 0, []
    for node, attribute, graph in _graphs(model):
        if not _is_wanted(graph, job.options):
            continue
        body, captured = _alone(graph, model)
        feeds = None if reader is None else _Fed(partial(_feeds, model, (node, attribute), body, captured, reader))
        made = _quantized(body, job, feeds, known)
        if isinstance(made, str):
            refused.append(f"{attribute} of {label(node)} stays float: {made}")
            continue
        quantized, plan = made
        bodies.append(QuantizedBody(str(node.name), attribute, quantized, captured, plan))
        fired += 1
    return Made(tuple(bodies), (PassReport("subgraphs", fired, tuple(refused)),) if fired or refused else ())


def install(model: ir.Model, made: Made) -> None:
    """Put the quantized bodies into the float model, in place."""
    nodes = {node.name: node for node in model.graph}
    values = {str(value.name): value for value in _outer_values(model)}
    for body in made.bodies:
        graph = body.model.graph
        for value in [one for one in graph.inputs if one.name in body.captured]:
            value.replace_all_uses_with(values[str(value.name)], replace_graph_outputs=True)
            graph.inputs.remove(value)
        _keep_apart(graph, values)
        read_nothing(nodes[body.node].attributes[body.attribute].as_graph())
        nodes[body.node].attributes[body.attribute] = ir.AttrGraph(body.attribute, graph)
        model.functions.update(body.model.functions)
        for domain, version in graph.opset_imports.items():
            model.graph.opset_imports.setdefault(domain, version)


def record(plan: Plan, made: Made) -> None:
    """Add what was decided about the bodies to the plan of the model, under ``node/body/name``."""
    for body in made.bodies:
        prefix = f"{body.node}/{body.attribute}/"
        for tensor in body.plan:
            plan.tensors[prefix + tensor.name] = replace(tensor, name=prefix + tensor.name, group=prefix + tensor.group)
        for node in body.plan.nodes.values():
            plan.nodes[prefix + node.name] = replace(node, name=prefix + node.name)
        plan.floats.update({prefix + name: reason for name, reason in body.plan.floats.items()})


def _keep_apart(graph: ir.Graph, outer: Mapping[str, ir.Value]) -> None:
    """No value of a body has the name of one around it; constants that both have are those around it."""
    for name, value in list(graph.initializers.items()):
        if name in outer and is_constant(outer[name]) and not value.is_graph_output():
            value.replace_all_uses_with(outer[name])
            del graph.initializers[name]
    taken = set(outer)
    for value in (*graph.initializers.values(), *(one for node in graph for one in node.outputs)):
        base, number = str(value.name), 0
        while value.name in taken:
            number += 1
            value.name = f"{base}_body_{number}"


def _graphs(model: ir.Model) -> Iterator[tuple[ir.Node, str, ir.Graph]]:
    for node in model.graph:
        if node.op_type in CONTROL and node.domain == "":
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    yield node, attribute.name, attribute.as_graph()


def _outer_values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    for node in model.graph:
        yield from node.outputs


# ---- a body as a model -----------------------------------------------------------------------------------------------


def _alone(graph: ir.Graph, model: ir.Model) -> tuple[ir.Model, tuple[str, ...]]:
    """The body as a model of its own, and the names of its inputs that stand for values around it."""
    proto = ir.to_proto(graph)
    captured = []
    for value in _captures(graph):
        if is_constant(value) and value.const_value is not None:
            tensor = ir.to_proto(value.const_value)
            tensor.name = str(value.name)
            proto.initializer.append(tensor)
        else:
            proto.input.append(ir.to_proto(value))
            captured.append(str(value.name))
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    whole = onnx.helper.make_model(proto, opset_imports=imports, ir_version=model.ir_version)
    return files.load(whole), tuple(captured)


def _captures(graph: ir.Graph) -> list[ir.Value]:
    """Values that the body, or a body inside it, reads or hands out, and that it does not make."""
    own, read = set(graph.inputs) | set(graph.initializers.values()), list[ir.Value | None](graph.outputs)
    for node in ir.traversal.RecursiveGraphIterator(graph):
        own.update(node.outputs)
        read.extend(node.inputs)
        for inner in bodies(node):
            own.update((*inner.inputs, *inner.initializers.values()))
            read.extend(inner.outputs)
    return list(dict.fromkeys(value for value in read if value is not None and value not in own))


def _quantized(body: ir.Model, job: Job, reader: Any, known: Sequence[NodeInfo]) -> tuple[ir.Model, Plan] | str:
    """The quantized body and its plan, or the reason why it stays float."""
    constants.lift_constant_nodes(body.graph)
    run_steps(body, BODY, job)
    infer_shapes(body)
    inner = quantize_bodies(body, job, reader, known)
    mode = MODES[job.mode]
    plan = mode.place(body, job, known)
    if not plan.tensors and not inner.bodies:
        return "nothing in it can be quantized"
    wanted = observed(plan, job.options) if job.mode == "static" else ()
    requests = {tensor.name: request_of(tensor.spec, job.options) for tensor in wanted}
    if requests and next(iter(reader), None) is None:
        return "no calibration sample enters it"
    ranges = calibrate(body, requests, reader, libraries=job.options.UserCustomOpLibPath) if requests else {}
    mode.set_parameters(body, plan, ranges, job.options)
    install(body, inner)
    quantized = mode.emit(body, plan, job.options)
    record(plan, inner)
    return quantized, plan


# ---- its calibration data --------------------------------------------------------------------------------------------


class _Fed:
    """Samples that are made anew by every iteration."""

    def __init__(self, make: Callable[[], Iterator[Feed]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Feed]:
        return self._make()


def _feeds(
    model: ir.Model, place: tuple[ir.Node, str], body: ir.Model, captured: tuple[str, ...], reader: Any
) -> Iterator[dict[str, np.ndarray]]:
    """What the float model hands to a body, sample by sample and iteration by iteration."""
    node, attribute = place
    sources = [str(value.name) for value in node.inputs if value is not None and not is_constant(value)]
    runner = Runner(model, list(dict.fromkeys([*captured, *sources])))
    # a body that no sample enters hands none to those inside it
    for sample in reader if isinstance(reader, _Fed) else checked(samples_of(reader), inputs_of(model)):
        seen = runner.run(sample).values
        around = {name: seen[name] for name in captured}
        given = [_value(value, seen) for value in node.inputs]
        if node.op_type == "If":
            wanted = "then_branch" if bool(np.asarray(given[0]).reshape(())) else "else_branch"
            if wanted == attribute:
                yield around
        else:
            yield from _iterations(body, given, around)


def _value(value: ir.Value | None, seen: Mapping[str, np.ndarray]) -> np.ndarray | None:
    if value is None:
        return None
    return value.const_value.numpy() if is_constant(value) and value.const_value is not None else seen[str(value.name)]


def _iterations(
    body: ir.Model, given: list[np.ndarray | None], around: Mapping[str, np.ndarray]
) -> Iterator[dict[str, np.ndarray]]:
    """The feeds of every iteration of a Loop: its number, its condition, its state."""
    names = [str(value.name) for value in body.graph.inputs if value.name not in around]
    outputs = [str(value.name) for value in body.graph.outputs]
    runner = Runner(body, outputs)
    limit = None if given[0] is None else int(np.asarray(given[0]).reshape(()))
    condition = True if len(given) < 2 or given[1] is None else bool(np.asarray(given[1]).reshape(()))
    state, number = [np.asarray(value) for value in given[2:]], 0
    while condition and (limit is None or number < limit):
        formal = [np.asarray(number, np.int64), np.asarray(condition), *state]
        feed = {**dict(zip(names, formal, strict=True)), **around}
        yield feed
        found = runner.run(feed).values
        condition = bool(np.asarray(found[outputs[0]]).reshape(()))
        state, number = [found[name] for name in outputs[1 : 1 + len(state)]], number + 1
