"""The same model in another dress: what exporters and people may do to a graph, and what it computes stays the same.

Each row takes a model and its sample to a model and the sample that it wants. The quantizer should do as well with it
as with the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tests.onnx_flow import models

Feed = Mapping[str, np.ndarray]
Dress = Callable[[onnx.ModelProto, Feed], tuple[onnx.ModelProto, Feed]]


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    made.ir_version = max(made.ir_version, 8)  # before 4, an initializer is an input too, and 8 has functions
    given = {value.name for value in models.real_inputs(made)}
    kept = [value for value in made.graph.input if value.name in given]
    del made.graph.input[:]
    made.graph.input.extend(kept)
    return made


def _model(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto], **parts: Any) -> onnx.ModelProto:
    """Other nodes between the inputs and outputs of a model; ``parts``: other inputs, outputs or initializers."""
    made = _copy(model)
    for name, values in {"node": nodes, **parts}.items():
        field = getattr(made.graph, name)
        values = list(values)
        del field[:]
        field.extend(values)
    del made.graph.value_info[:]
    return made


def _names(values: Iterable[Any]) -> list[str]:
    return [value.name for value in values]


def _renamed(graph: onnx.GraphProto, new: Callable[[str], str]) -> onnx.GraphProto:
    """The graph with other names for its tensors, in bodies too."""
    made = onnx.GraphProto()
    made.CopyFrom(graph)

    def rename(one: onnx.GraphProto) -> None:
        for value in (*one.input, *one.output, *one.initializer, *one.value_info):
            value.name = new(value.name)
        for node in one.node:
            node.input[:] = [name and new(name) for name in node.input]
            node.output[:] = [name and new(name) for name in node.output]
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    rename(attribute.g)

    rename(made)
    return made


def _inside(model: onnx.ModelProto, name: str, own: bool, constant_nodes: bool = False) -> onnx.GraphProto:
    """The graph as a body with names of its own; ``own``: with its inputs and constants, read from outside else."""
    outside = {value.name for value in model.graph.input} | {one.name for one in model.graph.initializer}
    kept = set() if own else outside
    body = _renamed(model.graph, lambda old: old if old in kept else f"in_{old}")
    body.name = name
    del body.value_info[:]
    if not own:
        del body.input[:]
    if not own or constant_nodes:
        constants = [] if not own else [_constant(one) for one in body.initializer]
        nodes = [*constants, *body.node]
        del body.initializer[:], body.node[:]
        body.node.extend(nodes)
    return body


def _constant(tensor: onnx.TensorProto) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [tensor.name], value=tensor)


def _zeros(values: Iterable[onnx.ValueInfoProto]) -> Iterator[onnx.TensorProto]:
    for value in values:
        size = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        yield numpy_helper.from_array(np.zeros(size, dtype), value.name)


# ---- in bodies -------------------------------------------------------------------------------------------------------


def in_a_branch(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """All of it in the branch of an If that is taken, what it reads is outside."""
    model = _copy(model)
    then = _inside(model, "then", own=False)
    zeros = [_constant(one) for one in _zeros(then.output)]
    for node in zeros:
        node.output[0] = f"else_{node.output[0]}"
    ends = [helper.make_tensor_value_info(node.output[0], 1, None) for node in zeros]
    for end, value in zip(ends, then.output, strict=True):
        end.type.CopyFrom(value.type)
    other = helper.make_graph(zeros, "else", [], ends)
    names = _names(model.graph.output)
    node = helper.make_node("If", ["a_choice"], names, "choice", then_branch=then, else_branch=other)
    choice = helper.make_tensor_value_info("a_choice", TensorProto.BOOL, [])
    made = _model(model, [node], input=[*model.graph.input, choice])
    return made, {**feed, "a_choice": np.array(True)}


def in_a_loop(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """All of it, with its constants, in the body of a Loop of two turns, of which the last counts."""
    model = _copy(model)
    body = _inside(model, "turn", own=True)
    inputs = [*body.input]
    del body.input[:]
    for value in inputs:  # what does not change from turn to turn is read from outside
        body.node.insert(0, helper.make_node("Identity", [value.name.removeprefix("in_")], [value.name]))
    body.input.extend(
        [
            helper.make_tensor_value_info("turn_number", TensorProto.INT64, []),
            helper.make_tensor_value_info("turn_before", TensorProto.BOOL, []),
        ]
    )
    body.node.append(helper.make_node("Identity", ["turn_before"], ["turn_again"]))
    body.output.insert(0, helper.make_tensor_value_info("turn_again", TensorProto.BOOL, []))
    names = _names(model.graph.output)
    loop = helper.make_node("Loop", ["two", "yes"], [f"all_{name}" for name in names], "turns", body=body)
    last = [helper.make_node("Gather", [f"all_{name}", "one"], [name], axis=0) for name in names]
    numbers = {"two": np.array(2), "one": np.array(1), "yes": np.array(True)}
    return _model(model, [loop, *last], initializer=_arrays(numbers)), feed


def in_a_scan(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """All of it, its constants in nodes, in the body of a Scan of one step."""
    model = _copy(model)
    body = _inside(model, "step", own=True, constant_nodes=True)
    names, ends = _names(model.graph.input), _names(model.graph.output)
    before = [helper.make_node("Unsqueeze", [name, "zero"], [f"stack_{name}"]) for name in names]
    outputs = [f"all_{name}" for name in ends]
    scan = helper.make_node(
        "Scan", [f"stack_{name}" for name in names], outputs, "scan", body=body, num_scan_inputs=len(names)
    )
    after = [helper.make_node("Squeeze", [f"all_{name}", "zero"], [name]) for name in ends]
    return _model(model, [*before, scan, *after], initializer=_arrays({"zero": np.array([0])})), feed


def _arrays(arrays: Mapping[str, np.ndarray]) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(array, name) for name, array in arrays.items()]


# ---- in functions ----------------------------------------------------------------------------------------------------


def _function(model: onnx.ModelProto, constants: bool) -> onnx.FunctionProto:
    """The graph as a function; ``constants``: with its own, which are inputs of it otherwise."""
    body = _renamed(model.graph, lambda name: f"in_{name}")
    nodes = [*([_constant(one) for one in body.initializer] if constants else []), *body.node]
    inputs = [*_names(body.input), *([] if constants else _names(body.initializer))]
    return helper.make_function("own", "block", inputs, _names(body.output), nodes, [*model.opset_import])


def in_a_function(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """All of it in a function with its constants in nodes, called once."""
    model = _copy(model)
    call = helper.make_node("block", _names(model.graph.input), _names(model.graph.output), "call", domain="own")
    made = _model(model, [call], initializer=[])
    made.functions.append(_function(model, constants=True))
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made, feed


def in_two_calls(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """A function with its constants as inputs, called twice with the same ones."""
    model = _copy(model)
    inputs = [*_names(model.graph.input), *_names(model.graph.initializer)]
    ends = [_names(model.graph.output), [f"again_{name}" for name in _names(model.graph.output)]]
    calls = [helper.make_node("block", inputs, names, f"call_{k}", domain="own") for k, names in enumerate(ends)]
    made = _model(model, calls, output=_again(model))
    made.functions.append(_function(model, constants=False))
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made, feed


def _again(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The outputs, and as many more."""
    more = [onnx.ValueInfoProto() for _ in model.graph.output]
    for value, one in zip(more, model.graph.output, strict=True):
        value.CopyFrom(one)
        value.name = f"again_{one.name}"
    return [*model.graph.output, *more]


# ---- who reads what --------------------------------------------------------------------------------------------------


def twice(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """Two copies beside each other that share inputs and constants."""
    model = _copy(model)
    shared = {*_names(model.graph.input), *_names(model.graph.initializer)}
    second = _renamed(model.graph, lambda name: name if name in shared else f"again_{name}")
    for node in second.node:
        node.name = node.name and f"again_{node.name}"
    return _model(model, [*model.graph.node, *second.node], output=_again(model)), feed


def all_returned(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """Every third tensor that a node makes is an output too, and every input is returned."""
    model = _copy(model)
    kinds = {value.name: value for value in onnx.shape_inference.infer_shapes(model).graph.value_info}
    inner = [kinds[name] for node in model.graph.node for name in node.output if name in kinds][::3]
    back = [onnx.ValueInfoProto() for _ in model.graph.input]
    for value, one in zip(back, model.graph.input, strict=True):
        value.CopyFrom(one)
        value.name = f"back_{one.name}"
    nodes = [helper.make_node("Identity", [one.name], [f"back_{one.name}"]) for one in model.graph.input]
    return _model(model, [*model.graph.node, *nodes], output=[*model.graph.output, *inner, *back]), feed


# ---- how things are written ------------------------------------------------------------------------------------------


def constants_are_inputs(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """Every initializer is an input of the graph too, as before IR version 4."""
    return models.initializers_as_inputs(_copy(model)), feed


def constants_are_nodes(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """Every initializer in a Constant node."""
    return models.constant_weights(_copy(model)), feed


def _called(model: onnx.ModelProto, feed: Feed, new: Callable[[str], str]) -> tuple[onnx.ModelProto, Feed]:
    model = _copy(model)
    made = _copy(model)
    made.graph.CopyFrom(_renamed(model.graph, new))
    return made, {new(name): array for name, array in feed.items()}


def nodes_without_names(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """No node has a name."""
    made = _copy(model)
    for node in made.graph.node:
        node.name = ""
    return made, feed


def nodes_called_as_tensors(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """Every node has the name of what the next makes, the last that of an input."""
    made = _copy(model)
    names = [node.output[0] for node in made.graph.node]
    for node, name in zip(made.graph.node, [*names[1:], made.graph.input[0].name], strict=True):
        node.name = name
    return made, feed


def odd_names(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """Tensors and nodes called with signs, spaces, brackets and letters of other alphabets."""
    made, feed = _called(model, feed, lambda name: f"∂/{name} [é]*?\\'\"%{{0}}::漢\n🙂")
    for k, node in enumerate(made.graph.node):
        node.name = f"^({k}) .*\t🙂$"
    return made, feed


def names_of_ours(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """Tensors called as a quantizer would call what it makes of others."""
    tails = ("", "_QuantizeLinear_Output", "_DequantizeLinear_Output", "_scale", "_zero_point", "_quantized")
    order: dict[str, str] = {}

    def new(name: str) -> str:
        return order.setdefault(name, f"t{len(order) // len(tails)}{tails[len(order) % len(tails)]}")

    return _called(model, feed, new)


def numbers_for_names(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
    """Tensors are called 0, 1, 2, nodes too."""
    order: dict[str, str] = {}
    made, feed = _called(model, feed, lambda name: order.setdefault(name, str(len(order))))
    for k, node in enumerate(made.graph.node):
        node.name = str(k)
    return made, feed


def in_opset(version: int) -> Dress:
    """Written in another version of the operators, by onnx's own converter."""

    def dressed(model: onnx.ModelProto, feed: Feed) -> tuple[onnx.ModelProto, Feed]:
        return onnx.version_converter.convert_version(_copy(model), version), feed

    return dressed


DRESSES: dict[str, Dress] = {
    **{
        one.__name__: one
        for one in (
            in_a_branch,
            in_a_loop,
            in_a_scan,
            in_a_function,
            in_two_calls,
            twice,
            all_returned,
            constants_are_inputs,
            constants_are_nodes,
            nodes_without_names,
            nodes_called_as_tensors,
            odd_names,
            names_of_ours,
            numbers_for_names,
        )
    },
    **{f"opset {version}": in_opset(version) for version in (13, 15, 18, 20, 21)},
}
