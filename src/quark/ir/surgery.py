"""Small verbs on an ``onnx_ir`` graph: read constants, add and replace initializers, take nodes out.

Every verb costs time proportional to what it touches, never to the graph, so that passes stay linear. A *constant* is
an initializer that the caller of the model cannot override (one that is also a graph input can be overridden).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from quark.errors import ModelError
from quark.ir.in_file import InFile
from quark.ir.walk import all_nodes, bodies, graphs_of, nodes_within

#: Key of ``ir.Node.meta`` for the layers in whose place a pass has put the node: what rules say of their names holds.
STANDS_FOR = "stands_for"


def opset(model: ir.Model) -> int:
    """Version of the default operator set; 1 where the model names none (files of IR version 1 and 2)."""
    return model.graph.opset_imports.get("", 1)


def is_constant(value: ir.Value | None) -> bool:
    """True for an initializer with data that is not a graph input."""
    return value is not None and value.is_initializer() and value.const_value is not None and not value.is_graph_input()


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant or of a Constant node's tensor, None for anything else.

    Read only: it may be memory-mapped, or shared with the model of the caller. It may be read from a file each time.
    """
    tensor = _constant_tensor(value)
    return None if tensor is None else tensor.numpy()


def constant_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape of that array; nothing is read for it."""
    tensor = _constant_tensor(value)
    return None if tensor is None else tuple(int(size) for size in tensor.shape.numpy())


def has_array(value: ir.Value | None) -> bool:
    """Whether there is such an array; nothing is read for it."""
    return _constant_tensor(value) is not None


def _constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    if value is None:
        return None
    if is_constant(value):
        return value.const_value
    maker = value.producer()
    return tensor_attribute(maker, "value") if maker is not None and maker.op_type == "Constant" else None


def input_at(node: ir.Node, position: int) -> ir.Value | None:
    """Input number ``position``, None where it is left out."""
    return node.inputs[position] if position < len(node.inputs) else None


def name_of(one: ir.Node | ir.Value | None) -> str:
    """The name of a node or a value, empty where there is none."""
    return "" if one is None else one.name or ""


def input_name(node: ir.Node, position: int) -> str:
    """The name of input number ``position``, empty where it is left out."""
    return name_of(input_at(node, position))


def set_input(node: ir.Node, position: int, value: ir.Value | None) -> None:
    """Make ``value`` input number ``position``; inputs between the last one and it are left out."""
    if position >= len(node.inputs):
        node.resize_inputs(position + 1)
    node.replace_input_with(position, value)


def attribute(node: ir.Node, name: str, default: object = None) -> object:
    """Value of an attribute, ``default`` where it is absent or refers to a parameter of a function."""
    found = node.attributes.get(name)
    return default if found is None or found.is_ref() else found.value


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute."""
    value = attribute(node, name, default)
    return value if isinstance(value, int) else default


def float_attribute(node: ir.Node, name: str, default: float) -> float:
    """A float attribute."""
    value = attribute(node, name, default)
    return float(value) if isinstance(value, (int, float)) else default


def ints_attribute(node: ir.Node, name: str) -> list[int] | None:
    """A list of integers, None where it is absent."""
    value = attribute(node, name)
    return [int(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else None


def floats_attribute(node: ir.Node, name: str) -> list[float]:
    """A list of floats, empty where it is absent."""
    value = attribute(node, name)
    return [float(one) for one in value] if isinstance(value, Sequence) else []


def axes_of(node: ir.Node) -> list[int] | None:
    """The axes of a reduction, an attribute or the second input; None where they are computed or left out."""
    array = constant_array(input_at(node, 1))
    return ints_attribute(node, "axes") if array is None else [int(axis) for axis in array.reshape(-1)]


def tensor_attribute(node: ir.Node, name: str) -> ir.TensorProtocol | None:
    """A tensor, None where it is absent or something else."""
    found = node.attributes.get(name)
    if found is None or found.is_ref() or found.type != ir.AttributeType.TENSOR:
        return None
    return found.as_tensor()


def label(node: ir.Node) -> str:
    """How messages name a node: its name and operator, or its first output where it has no name."""
    name = node.name or next((value.name for value in node.outputs if value.name), "without a name")
    return f"{name!r} ({node.domain + '.' if node.domain else ''}{node.op_type})"


def not_single(value: ir.Value | None) -> str | None:
    """Why an operator that ONNX Runtime has for float32 and float16 alone cannot read ``value``, or None.

    A type that is not known is not a reason.
    """
    dtype = None if value is None else value.dtype
    if dtype is None or dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return None
    return f"its input is {dtype.name.lower()}, for which ONNX Runtime has no kernel of the new operator"


def nodes_of(model: ir.Model, *op_types: str) -> list[ir.Node]:
    """The nodes of these standard operators, in the graph and its subgraphs: a list, so that a pass may change them."""
    nodes = nodes_within(model.graph)
    return [node for node in nodes if node.op_type in op_types and node.domain == ""]


def with_operand(op_type: str, value: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """(result, constant operand) of a Mul or Add that alone reads ``value``; ``value`` itself where there is none."""
    node = sole_consumer(value)
    if node is None or node.op_type != op_type or len(node.inputs) != 2:
        return value, None
    other = node.inputs[1] if node.inputs[0] is value else node.inputs[0]
    return (value, None) if not has_array(other) else (node.outputs[0], other)


def all_values(model: ir.Model) -> Iterator[ir.Value]:
    """Inputs, initializers and what nodes make, of the main graph."""
    yield from model.graph.inputs
    yield from model.graph.initializers.values()
    for node in model.graph:
        yield from node.outputs


def tensors_by_name(model: ir.Model) -> dict[str, ir.Value]:
    """Graph inputs and outputs of nodes of the main graph, by name."""
    values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
    return {value.name: value for value in values if value.name}


def operand(node: ir.Node, slot: int) -> ir.Value:
    """What a node reads in a slot.

    Raises:
        ModelError: nothing.
    """
    value = input_at(node, slot)
    if value is None:
        raise ModelError(f"the node {node.name!r} lacks an input")
    return value


def tensor_of(value: ir.Value) -> ir.TensorProtocol:
    """The data of an initializer.

    Raises:
        ModelError: it has none.
    """
    if value.const_value is None:
        raise ModelError(f"the initializer {value.name!r} has no values")
    return value.const_value


def name_nodes(model: ir.Model) -> None:
    """Give every node a name of its own, because rules, plans and reports go by node names.

    A node without a name gets that of its first output; the second node of one name gets ``name_1``, and so on.
    """
    used: set[str] = set()
    for node in all_nodes(model):
        base = node.name or next((value.name for value in node.outputs if value.name), node.op_type)
        node.name = _free(base, used)
        used.add(node.name)


def name_new(model: ir.Model, old: Collection[ir.Node]) -> None:
    """Give the nodes that are not among the ``old`` ones, which keep theirs, a name of their own."""
    nodes = list(all_nodes(model))
    used = {str(node.name) for node in nodes if node in old}
    for node in nodes:
        if node in old:
            continue
        node.name = _free(node.name or str(node.outputs[0].name if node.outputs else node.op_type), used)
        used.add(node.name)


def name_apart(model: ir.Model, known: Mapping[str, str]) -> None:
    """Give nodes that were added beside others of their name a name of their own.

    Args:
        known: names that stay, with the operator of the node that has each.
    """
    nodes = list(all_nodes(model))
    keepers: dict[str, ir.Node] = {}
    for node in nodes:
        if known.get(str(node.name)) == node.op_type:
            keepers.setdefault(str(node.name), node)
    used = set(keepers)
    for node in nodes:
        if keepers.get(str(node.name)) is not node:
            node.name = _free(str(node.name or node.op_type), used)
            used.add(node.name)


def _free(base: str, used: Collection[str]) -> str:
    """``base``, or ``base_1``, ``base_2``, … where that is taken."""
    name, number = base, 0
    while name in used:
        number += 1
        name = f"{base}_{number}"
    return name


class Names:
    """The value names in use, so that a new one is found in constant time.

    Names of subgraphs count, because a subgraph sees the names of the graphs around it.
    """

    def __init__(self, model: ir.Model) -> None:
        self._used: set[str] = set()
        for graph in graphs_of(model):
            self._used.update(value.name for value in graph.inputs if value.name)
            self._used.update(graph.initializers)
        for node in all_nodes(model):
            self._used.update(value.name for value in node.outputs if value.name)

    def fresh(self, base: str) -> str:
        """``base``, or ``base_1``, ``base_2``, … where that is taken; the name counts as used from now on."""
        name = _free(base, self._used)
        self._used.add(name)
        return name


def shape_of(tensor: ir.TensorProtocol) -> ir.Shape:
    """The shape of a tensor as a value of its own."""
    return ir.Shape(tensor.shape.numpy())


def tensor_alias(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """The same data under its own tensor object and name: nothing is copied here, nothing is read from disk.

    Tensor objects carry the name that serialization writes, so two initializers (or two models) never share one. A
    tensor of a protobuf, which copies its contents for every reader, is copied once, for the first.
    """
    if isinstance(tensor, InFile):
        return tensor.alias(name)
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=shape_of(tensor),
            name=name,
            base_dir=tensor.base_dir,
        )
    if isinstance(tensor, ir.StringTensor):
        return ir.StringTensor(tensor.string_data(), shape=shape_of(tensor), name=name)
    if isinstance(tensor, ir.Tensor):
        return ir.Tensor(tensor.raw, dtype=tensor.dtype, shape=shape_of(tensor), name=name)
    kept = isinstance(tensor, ir.LazyTensor)  # it knows itself whether to keep what it computes
    return ir.LazyTensor(
        lambda: tensor if kept else in_memory(tensor, name),
        dtype=tensor.dtype,
        shape=shape_of(tensor),
        name=name,
        cache=not kept,
    )


def apart(model: ir.Model) -> ir.Model:
    """A clone that maps external data by itself, for work beside other threads.

    A plain clone shares its tensors. One that is being mapped in one thread is half ready in the others, and one thread
    unmaps what another is about to read.
    """
    made = model.clone()
    for graph in graphs_of(made):
        for name, value in graph.initializers.items():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = tensor_alias(value.const_value, name)
    return made


def let_go(tensor: ir.TensorProtocol | None) -> None:
    """Unmap external data that was looked at; it is mapped again when it is needed. Nothing else may hold its array.

    Mapped pages count as memory of the process until then.
    """
    if isinstance(tensor, ir.ExternalTensor):
        with suppress(BufferError):  # an array of it is still in use somewhere: it stays mapped
            tensor.release()


def in_memory(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """The same contents as an array that belongs to no file and no protobuf."""
    if isinstance(tensor, ir.StringTensor):
        return tensor_alias(tensor, name)
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, shape=shape_of(tensor), name=name)


def add_initializer(graph: ir.Graph, tensor: np.ndarray | ir.TensorProtocol, name: str) -> ir.Value:
    """A new initializer; ``name`` must be free (see :class:`Names`). An array is kept, not copied."""
    data = ir.Tensor(tensor, name=name) if isinstance(tensor, np.ndarray) else tensor
    shape = shape_of(data)
    value = ir.Value(name=name, type=ir.TensorType(data.dtype), shape=shape, const_value=data)
    graph.register_initializer(value)
    return value


def set_constant(value: ir.Value, array: np.ndarray) -> None:
    """Give an initializer new contents (and with them shape and type) under its old name. The array is not copied."""
    value.const_value = ir.Tensor(array, name=value.name)
    value.shape = ir.Shape(array.shape)
    value.type = ir.TensorType(value.const_value.dtype)


def own_copy(node: ir.Node, value: ir.Value, model: ir.Model) -> str:
    """Give a node a copy of a constant that another one shares; its name."""
    name = f"{value.name}_{node.name}"
    copy = ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
    model.graph.register_initializer(copy)
    for position, operand in enumerate(node.inputs):
        if operand is value:
            node.replace_input_with(position, copy)
    return name


def sole_consumer(value: ir.Value) -> ir.Node | None:
    """The one node that reads ``value`` (once), None where others read it or it is a graph output."""
    uses = tuple(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def ends_body(node: ir.Node, before: ir.Node) -> bool:
    """Whether ``node`` makes an output of a body that ``before`` stands outside of, which has to make it itself."""
    return node.graph is not before.graph and any(value.is_graph_output() for value in node.outputs)


def take_over(kept: ir.Value, dropped: ir.Value) -> None:
    """``kept`` takes the readers, the place among the graph outputs, the name, type and shape of ``dropped``.

    ``dropped`` is the only output of a node, which is removed from its graph.
    """
    node, name = dropped.producer(), dropped.name
    kept.type, kept.shape = dropped.type or kept.type, dropped.shape or kept.shape
    dropped.replace_all_uses_with(kept, replace_graph_outputs=True)
    if node is not None and node.graph is not None:
        node.graph.remove(node, safe=True)
    kept.name = name


def stand_for(nodes: Iterable[ir.Node], replaced: ir.Node) -> None:
    """Let what rules say of the name of a node hold for those in its place."""
    for node in nodes:
        names = (*node.meta.get(STANDS_FOR, ()), *replaced.meta.get(STANDS_FOR, ()), replaced.name)
        node.meta[STANDS_FOR] = tuple(dict.fromkeys(name for name in names if name != node.name))


def substitute(old: ir.Value, nodes: Sequence[ir.Node], place: int = 0) -> None:
    """Let ``nodes`` stand for the node that makes ``old``; the last one's output at ``place`` is the new tensor.

    The new tensor takes the readers, the place among the graph outputs, the name, type and shape of the old one; what
    nobody reads any more goes, back to where something does. Nodes that are in the graph already stay where they are.
    """
    maker, new, name = old.producer(), nodes[-1].outputs[place], old.name
    if maker is None or maker.graph is None:
        raise ValueError(f"no node makes {name!r}")
    maker.graph.insert_before(maker, [node for node in nodes if node.graph is None])
    stand_for(nodes, maker)
    new.type, new.shape = old.type or new.type, old.shape or new.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name, new.name = f"{name} (before)", name
    prune(maker)


def prune(node: ir.Node | None) -> None:
    """Remove a node whose outputs nobody reads, then what only it has read, initializers too."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node is None or node.graph is None or any(out.uses() or out.is_graph_output() for out in node.outputs):
            continue
        sources = list(dict.fromkeys(value for value in node.inputs if value is not None))
        node.graph.remove(node, safe=True)
        for value in sources:
            if not drop_if_unused(value):
                pending.append(value.producer())


def bypass(node: ir.Node, source: ir.Value) -> str | None:
    """Take out a node whose first output equals ``source``. Names of graph outputs stay.

    Returns:
        None when done, otherwise the reason why the node has to stay.
    """
    output = node.outputs[0]
    if any(extra.uses() or extra.is_graph_output() for extra in node.outputs[1:]):
        return "another of its outputs is used"
    if not output.is_graph_output():
        output.replace_all_uses_with(source)
        if node.graph is not None:
            node.graph.remove(node, safe=True)
        return None
    if source.is_graph_input() or source.is_initializer() or source.is_graph_output():
        return "it joins a graph output to a graph input, an initializer or another output"
    if source.graph is not output.graph:
        return "it hands a value of an outer graph out of a subgraph"
    take_over(source, output)
    return None


def drop_if_unused(value: ir.Value | None) -> bool:
    """Remove an initializer that nothing reads any more (graph inputs and outputs stay)."""
    if value is None or not value.is_initializer() or value.uses() or value.graph is None:
        return False
    if value.is_graph_input() or value.is_graph_output():
        return False
    del value.graph.initializers[str(value.name)]
    return True


def remove_unused(model: ir.Model) -> int:
    """Remove nodes and initializers that no graph output depends on; returns how many of the main graph."""
    before = len(model.graph) + len(model.graph.initializers)
    outputs = frozenset(model.graph.outputs)
    for node in reversed(model.graph):
        if not any(value in outputs or value.uses() for value in node.outputs):
            for body in bodies(node):
                read_nothing(body)
            model.graph.remove(node, safe=True)
    RemoveUnusedNodesPass()(model)
    return before - len(model.graph) - len(model.graph.initializers)


def read_nothing(body: ir.Graph) -> None:
    """Take the inputs from all nodes of a body that goes: what they read counts as used otherwise."""
    for node in nodes_within(body):
        node.resize_inputs(0)


def remove_unused_functions(model: ir.Model) -> None:
    """Drop the model-local functions that no node calls, directly or through another function."""
    RemoveUnusedFunctionsPass()(model)


def tensor_bytes(model: ir.Model) -> int:
    """Bytes of all initializers, those of subgraphs included."""
    return sum(_bytes_of(graph.initializers.values()) for graph in graphs_of(model))


def _bytes_of(values: Iterable[ir.Value]) -> int:
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def clip_bounds(node: ir.Node) -> tuple[float, float] | None:
    """(min, max) of a Clip, infinite where they are left out; ``None`` where they are computed."""
    found = []
    for position, absent in ((1, -np.inf), (2, np.inf)):
        value = input_at(node, position)
        array = constant_array(value)
        if value is not None and array is None:
            return None
        found.append(absent if array is None else float(array.reshape(-1)[0]))
    return found[0], found[1]
