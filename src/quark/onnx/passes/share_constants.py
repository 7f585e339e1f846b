"""Constants of equal contents are stored once, in the finished graph.

The zero points of symmetric weights are arrays of zeros, which most layers have alike; converters write shapes, axes
and tables once for each node; branches of an If often read one weight, which each of them has quantized for itself. The
first of equal ones stays. What a body of If, Loop or Scan has like the main graph it reads there; what is ``LARGE`` and
several bodies have alike goes to the main graph.

Inputs and outputs stay. Large codes of the main graph are made when the file is written, and are not looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import onnx_ir as ir

from quark.ir.surgery import is_constant
from quark.ir.walk import graphs_of
from quark.onnx.graph.report import PassReport

#: Bytes from which what bodies have alike leaves them: runtimes read smaller ones faster where they are.
LARGE = 1 << 10
#: Numbers by which contents are told apart before all are compared.
_HEAD = 1 << 10
#: Bytes of codes that are made for their comparison.
_SMALL = 1 << 12


def run(model: ir.Model) -> PassReport:
    """Store equal constants once, in place."""
    graphs, fired = list(graphs_of(model)), 0
    named = _named(model) if len(graphs) > 1 else {}
    kept: defaultdict[object, list[ir.Value]] = defaultdict(list)
    for graph in graphs:
        for value in list(graph.initializers.values()):
            if not _is_plain(value) or (graph is model.graph and _is_to_be_made(value)):
                continue
            near = kept[_kind(value)]
            first = next((one for one in near if _is_equal(one, value) and _reaches(one, graph, model, named)), None)
            if first is None:
                near.append(value)
                continue
            _move_out(first, graph, model)
            value.replace_all_uses_with(first)
            del graph.initializers[str(value.name)]
            fired += 1
    return PassReport("share_constants", fired)


def _named(model: ir.Model) -> dict[str, list[ir.Value]]:
    """All values by their names: bodies beside each other may use one for different values."""
    named = defaultdict[str, list[ir.Value]](list)
    for graph in graphs_of(model):
        for value in (*graph.inputs, *graph.initializers.values(), *(one for node in graph for one in node.outputs)):
            named[str(value.name)].append(value)
    return named


def _is_plain(value: ir.Value) -> bool:
    """Whether a value is a constant that another of the same contents can stand for."""
    return is_constant(value) and value.dtype not in (None, ir.DataType.STRING) and not value.is_graph_output()


def _is_to_be_made(value: ir.Value) -> bool:
    """Whether a value is the codes of a weight, which cost time to make."""
    tensor = value.const_value
    return isinstance(tensor, ir.LazyTensor) and tensor.dtype.is_integer() and tensor.nbytes > _SMALL


def _kind(value: ir.Value) -> object:
    """What constants of equal contents have alike, cheap to know: type, shape, the first numbers."""
    tensor = value.const_value
    if tensor is None:
        return None
    return tensor.dtype, tuple(tensor.shape.numpy()), tensor.numpy().reshape(-1)[:_HEAD].tobytes()


def _reaches(one: ir.Value, graph: ir.Graph, model: ir.Model, named: Mapping[str, list[ir.Value]]) -> bool:
    """Whether a graph sees a constant by its name, or would if it were one of the main graph, where it can go.

    A body may use the name of a value around it for another one, which is what its nodes read then.
    """
    if any(other is not one and not _is_equal(one, other) for other in named.get(str(one.name), ())):
        return False
    size = 0 if one.const_value is None else one.const_value.nbytes
    return one.graph in (graph, model.graph) or size >= LARGE


def _move_out(one: ir.Value, graph: ir.Graph, model: ir.Model) -> None:
    """Make a constant of one body one of the main graph where another graph has it alike."""
    if isinstance(one.graph, ir.Graph) and one.graph not in (graph, model.graph):
        del one.graph.initializers[str(one.name)]
        model.graph.register_initializer(one)


def _is_equal(one: ir.Value, other: ir.Value) -> bool:
    first, second = one.const_value, other.const_value
    return first is not None and second is not None and first.tobytes() == second.tobytes()
