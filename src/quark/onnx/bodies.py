"""Bodies of If, Loop and Scan as models of their own: which are quantized, how they are called, what they read.

A node or tensor of a body is called ``node/body/name`` in plans and configurations: its place, then its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

import onnx
import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.config.plan import Plan
from quark.config.rules import NodeInfo
from quark.ir.surgery import is_constant
from quark.ir.walk import bodies, nodes_within
from quark.onnx.graph import model as files
from quark.onnx.graph.weightless import initializers_of, read_in, swapped
from quark.onnx.qdq.selection import known_nodes
from quark.onnx.qdq.slower import RUNS, runs_of

CONTROL = ("If", "Loop", "Scan")
#: What makes a body worth quantizing.
LAYERS = frozenset(["Conv", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul", "RNN"])


def graphs(model: ir.Model) -> Iterator[tuple[ir.Node, str, ir.Graph]]:
    """The bodies of the main graph: (node, attribute, body)."""
    for node in model.graph:
        if node.op_type in CONTROL and node.domain == "":
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    yield node, attribute.name, attribute.as_graph()


def place_of(node: ir.Node, attribute: str) -> str:
    """What stands in front of the names of a body's nodes and tensors."""
    return f"{node.name}/{attribute}/"


def all_known(model: ir.Model) -> list[NodeInfo]:
    """The nodes of the graph and of every body: names for rules, those in bodies with their place or without."""
    found = known_nodes(model)
    for node, attribute, graph in graphs(model):
        inside = all_known(alone(graph, model)[0])
        found += [*inside, *(replace(one, name=place_of(node, attribute) + one.name) for one in inside)]
    return found


def wants_bodies(model: ir.Model, options: Options) -> bool:
    """Whether any body of the model is to be quantized."""
    return any(is_wanted(graph, options) for _, _, graph in graphs(model))


def is_wanted(graph: ir.Graph, options: Options) -> bool:
    """Whether this body is."""
    if options.EnableSubgraph is not None:
        return options.EnableSubgraph
    return any(node.op_type in LAYERS and not node.domain for node in nodes_within(graph))


def sequence_of(graph: ir.Graph) -> str | None:
    """The name of what a body reads that is no tensor: no sample holds one."""
    read = (*graph.inputs, *_captures(graph))
    return next((str(one.name) for one in read if isinstance(one.type, (ir.SequenceType, ir.OptionalType))), None)


# ---- names -----------------------------------------------------------------------------------------------------------


def in_place(job: Job, place: str) -> Job:
    """The job as a body sees it: by the names that its nodes have in it, and with its own lines of a plan."""
    options = job.options
    if options.TunedFloat is not None:
        left = [name.removeprefix(place) for name in options.TunedFloat if name.startswith(place)]
        options = options.changed({"TunedFloat": left})
    rules = [
        replace(one, selectors=tuple(s.removeprefix(place) if isinstance(s, str) else s for s in one.selectors))
        for one in job.rules.rules
    ]
    plan = None if job.plan is None else part(job.plan, place)
    return replace(job, options=options, rules=replace(job.rules, rules=tuple(rules)), plan=plan)


def part(plan: Plan, place: str) -> Plan:
    """The lines of a plan about one body, by the names that its nodes and tensors have in it."""
    found = Plan()
    for row in (one for one in plan if one.name.startswith(place)):
        found.put(replace(row, name=row.name.removeprefix(place), group=row.group.removeprefix(place)))
    for line in (one for one in plan.nodes.values() if one.name.startswith(place)):
        name = line.name.removeprefix(place)
        found.nodes[name] = replace(line, name=name)
    return found


def outside(model: ir.Model, names: Iterable[str]) -> list[str]:
    """The names that are not in a body of the model."""
    places = tuple(place_of(node, attribute) for node, attribute, _ in graphs(model))
    return [name for name in names if not name.startswith(places)]


def around(model: ir.Model, plan: Plan, options: Options) -> Plan:
    """The lines of a plan that are not about a body that is quantized."""
    places = tuple(place_of(node, name) for node, name, graph in graphs(model) if is_wanted(graph, options))
    tensors = {name: row for name, row in plan.tensors.items() if not name.startswith(places)}
    nodes = {name: line for name, line in plan.nodes.items() if not name.startswith(places)}
    return replace(plan, tensors=tensors, nodes=nodes)


# ---- a body as a model -----------------------------------------------------------------------------------------------


def alone(graph: ir.Graph, model: ir.Model) -> tuple[ir.Model, tuple[str, ...]]:
    """The body as a model of its own, and the names of its inputs that stand for values around it."""
    around = _captures(graph)
    constants = dict.fromkeys(value for value in around if is_constant(value) and value.const_value is not None)
    captured = [value for value in around if value not in constants]
    with swapped(read_in([*initializers_of(graph), *constants])):
        proto = ir.to_proto(graph)
        for value in constants:
            tensor = ir.to_proto(cast(ir.TensorProtocol, value.const_value))
            tensor.name = str(value.name)
            proto.initializer.append(tensor)
    proto.input.extend(map(ir.to_proto, captured))
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    whole = files.load(onnx.helper.make_model(proto, opset_imports=imports, ir_version=model.ir_version))
    runs = next((runs_of(node) for node, _, body in graphs(model) if body is graph), 1)
    whole.meta[RUNS] = runs * int(model.meta.get(RUNS, 1))
    return whole, tuple(str(value.name) for value in captured)


def _captures(graph: ir.Graph) -> list[ir.Value]:
    """Values that the body, or a body inside it, reads or hands out, and that it does not make."""
    own, read = set(graph.inputs) | set(graph.initializers.values()), list[ir.Value | None](graph.outputs)
    for node in nodes_within(graph):
        own.update(node.outputs)
        read.extend(node.inputs)
        for inner in bodies(node):
            own.update((*inner.inputs, *inner.initializers.values()))
            read.extend(inner.outputs)
    return list(dict.fromkeys(value for value in read if value is not None and value not in own))
