"""Which LSTMs keep their integer arithmetic: those that compute nearly what they compute in float.

    quality = 10 log10( sum of y squared / sum of (y - z) squared ),    y: the LSTM in float, z: DynamicQuantizeLSTM

on what the calibration samples put into each, over all of its outputs. Its one scale for all entries of a step holds
what is alike in size; where entries differ by thousands the small ones are rounded to nothing, and the LSTM computes in
float from the same stored codes instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.config.plan import Plan
from quark.ir.surgery import is_constant
from quark.onnx.algorithms.samples import spread
from quark.onnx.data import Feed
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import Runner, unfit
from quark.onnx.graph.session import RUNTIME_ERRORS, Runtime, open_session
from quark.onnx.qdq.activation_nodes import QuantizedTensor
from quark.onnx.qdq.initializers import ParameterInitializers
from quark.onnx.qdq.recurrent import DYNAMIC, REASON, TURNED, dynamic_nodes, write_dynamic

#: dB that the integer form has to reach, and samples that are looked at. Codes of weights alone reach about 40.
LEAST, SAMPLES = 25.0, 16


def keep_exact(model: ir.Model, plan: Plan, samples: Iterable[Feed] | None, options: Options) -> list[PassReport]:
    """Let the LSTMs of a complete plan compute in float that lose too much in integers, in the plan.

    Args:
        model: the float model.
        samples: None: nothing proves the integer form, and all compute in float.
    """
    nodes = dynamic_nodes(model, plan)
    feeds = spread(samples, SAMPLES) if nodes and samples is not None else []
    told = []
    for node, found in zip(nodes, _qualities(model, nodes, feeds, plan, options), strict=True):
        if found is None or found < LEAST:
            shown = "no sample reaches it" if found is None else f"{found:.1f} dB in integers, less than {LEAST:.0f}"
            _in_float(node, plan, shown)
            told.append(f"{node.op_type} {node.name!r} computes in float: {shown}")
    return [PassReport("integer_lstms", len(nodes) - len(told), tuple(told))] if nodes else []


def _in_float(node: ir.Node, plan: Plan, why: str) -> None:
    name = str(node.name)
    plan.nodes[name] = replace(plan.nodes[name], reason=f"{REASON} ({why})")
    for value in node.inputs[1:3]:
        tensor = plan.tensors[str(value.name)] if value is not None else None
        if tensor is not None:
            plan.tensors[tensor.name] = replace(tensor, reason=tensor.reason.replace(DYNAMIC, TURNED))


def _qualities(
    model: ir.Model, nodes: list[ir.Node], feeds: list[Feed], plan: Plan, options: Options
) -> list[float | None]:
    """dB of each node, None where nothing reaches it."""
    if not nodes or not feeds:
        return [None] * len(nodes)
    read = [[str(value.name) for value in _computed(node)] for node in nodes]
    runner = Runner(model, dict.fromkeys(chain(*read)), runtime=Runtime.of(options))
    seen = [runner.run(feed).values for feed in feeds]
    return [
        _quality(node, [{name: one[name] for name in names} for one in seen], plan, options)
        for node, names in zip(nodes, read, strict=True)
    ]


def _computed(node: ir.Node) -> list[ir.Value]:
    return [value for value in dict.fromkeys(node.inputs) if value is not None and not is_constant(value)]


def _quality(node: ir.Node, feeds: list[Feed], plan: Plan, options: Options) -> float | None:
    alone = _alone(node)
    signal = noise = 0.0
    sessions = [open_session(alone), open_session(_in_integers(alone, plan, options))]
    for feed in feeds:
        try:
            first, second = (session.run(None, dict(feed)) for session in sessions)
        except RUNTIME_ERRORS as error:
            raise unfit(feed, error) from error
        for wanted, found in zip(first, second, strict=True):
            signal += float(np.sum(np.square(wanted, dtype=np.float64)))
            noise += float(np.sum(np.square(wanted.astype(np.float64) - found)))
    return float(10 * np.log10(signal / max(noise, 1e-300))) if signal > 0 else None


def _alone(node: ir.Node) -> ir.Model:
    """A model of this node."""
    values = {value: value for value in _computed(node)}
    ends = {value: ir.Value(name=value.name, type=value.type, shape=value.shape) for value in values}
    stored = {
        value: ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
        for value in node.inputs
        if value is not None and is_constant(value)
    }
    inputs = [None if value is None else ends.get(value) or stored[value] for value in node.inputs]
    outputs = [ir.Value(name=value.name or f"unread_{k}", type=value.type) for k, value in enumerate(node.outputs)]
    made = ir.Node("", node.op_type, inputs, node.attributes.values(), outputs=outputs, name=node.name)
    imports = dict(node.graph.opset_imports) if isinstance(node.graph, ir.Graph) else {}
    graph = ir.Graph(
        list(ends.values()),
        outputs,
        nodes=[made],
        initializers=list(stored.values()),
        opset_imports=imports,
        name="one",
    )
    return ir.Model(graph, ir_version=10)


def _in_integers(alone: ir.Model, plan: Plan, options: Options) -> ir.Model:
    model = alone.clone()
    node, parameters = model.graph[0], ParameterInitializers(model)
    weights = [
        QuantizedTensor(plan.tensors[str(value.name)], value, parameters, options)
        for value in node.inputs[1:3]
        if value
    ]
    write_dynamic(node, weights)
    return model
