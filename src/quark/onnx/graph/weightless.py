"""Let tools that want a protobuf see a model without its weights, and put the weights back afterwards.

Two forms, because tools differ in what they stand:

* :func:`through_proto`: large initializers become typed graph inputs. Shape inference, opset conversion and
  simplifiers then work on kilobytes. What comes back is a new model that shares the tensor objects of the old one.
* :func:`external_proto`: large initializers stay initializers but point to external data that does not exist. ONNX
  Runtime takes their contents from the caller's arrays (:mod:`quark.onnx.graph.session`), without a copy.

Not handled: large constants inside subgraphs and in attributes of nodes; they travel with the protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

import onnx
import onnx_ir as ir

from quark.ir.surgery import in_memory, shape_of
from quark.ir.walk import graphs_of

LARGE = 1024
"""Bytes above which an initializer is left out. Shapes, axes and scalars stay visible: inference needs them."""


@contextmanager
def swapped(tensors: Mapping[ir.Value, ir.TensorProtocol]) -> Iterator[None]:
    """Give initializers other contents for a while."""
    kept = {value: value.const_value for value in tensors}
    try:
        for value, tensor in tensors.items():
            value.const_value = tensor
        yield
    finally:
        for value, original in kept.items():
            value.const_value = original


def large_initializers(model: ir.Model, limit: int = LARGE) -> dict[str, ir.Value]:
    """Initializers of the main graph that hold more than ``limit`` bytes, by name. Strings are never among them."""
    return {
        name: value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
        and value.const_value.nbytes > limit
        and value.const_value.dtype != ir.DataType.STRING
    }


def initializers_of(whole: ir.Model | ir.Graph) -> Iterator[ir.Value]:
    """All initializers, those of bodies too."""
    for graph in graphs_of(whole):
        yield from graph.initializers.values()


def read_in(values: Iterable[ir.Value]) -> dict[ir.Value, ir.TensorProtocol]:
    """Those of them that are external data, as tensors in memory: a protobuf has no folder to find files in."""
    return {
        value: in_memory(tensor, str(value.name))
        for value in values
        if isinstance(tensor := value.const_value, ir.ExternalTensor)
    }


@contextmanager
def _as_inputs(model: ir.Model, large: Mapping[str, ir.Value]) -> Iterator[None]:
    """Turn initializers into graph inputs for a while; their order comes back as it was."""
    graph = model.graph
    inputs, initializers = list(graph.inputs), dict(graph.initializers)
    try:
        for name, value in large.items():
            _describe(value)
            del graph.initializers[name]
            if not value.is_graph_input():
                graph.inputs.append(value)
        yield
    finally:
        graph.inputs[:] = inputs
        graph.initializers.clear()
        graph.initializers.update(initializers)


def _describe(value: ir.Value) -> None:
    """An input needs a type and a shape of its own; an initializer may have left them to its tensor."""
    tensor = value.const_value
    if tensor is not None:
        value.type = value.type or ir.TensorType(tensor.dtype)
        value.shape = value.shape or shape_of(tensor)


def through_proto(model: ir.Model, edit: Callable[[onnx.ModelProto], onnx.ModelProto], limit: int = LARGE) -> ir.Model:
    """``edit`` applied to the protobuf form of ``model`` with the large weights left out, as a new model.

    Args:
        model: Comes back unchanged, also when ``edit`` raises.
        edit: Gets a protobuf of its own; may return it or another one. It must not rename graph inputs.
        limit: Bytes above which an initializer is left out.
    """
    large = large_initializers(model, limit)
    edited = ir.from_proto(edit(light_proto(model, limit)))
    return _with_weights(edited, large, {value.name for value in model.graph.inputs})


def light_proto(model: ir.Model, limit: int = LARGE) -> onnx.ModelProto:
    """The protobuf form of ``model``; initializers of more than ``limit`` bytes are typed graph inputs in it."""
    with _as_inputs(model, large_initializers(model, limit)), swapped(_read(model)):
        return ir.to_proto(model)


def _with_weights(model: ir.Model, large: Mapping[str, ir.Value], inputs: set[str | None]) -> ir.Model:
    """Turn the inputs that stand for weights back into initializers; those that nothing reads any more are dropped."""
    graph = model.graph
    for value in [value for value in graph.inputs if value.name in large]:
        if value.name not in inputs:
            graph.inputs.remove(value)
        if value.uses() or value.is_graph_output() or value.is_graph_input():
            value.const_value = large[str(value.name)].const_value
            graph.register_initializer(value)
    return model


def external_proto(
    model: ir.Model, limit: int = LARGE, stay: frozenset[ir.Value] = frozenset()
) -> tuple[onnx.ModelProto, dict[str, ir.TensorProtocol]]:
    """The protobuf with large initializers as external data that is not there, and their tensors by name.

    Types below a byte stay in the protobuf; so does what no node reads, because ONNX Runtime would not find it. The
    initializers in ``stay`` are written as they are.
    """
    large = large_initializers(model, limit)
    read = {name: value for name, value in large.items() if value.uses() or value.is_graph_output()}
    kept = {
        name: value.const_value for name, value in read.items() if value not in stay and _whole_bytes(value.const_value)
    }
    absent = {large[name]: _absent(name, tensor) for name, tensor in kept.items()}
    with swapped({**_read(model, stay | set(absent)), **absent}):
        return ir.to_proto(model), kept


def file_proto(
    model: ir.Model, folder: Path, limit: int = LARGE
) -> tuple[onnx.ModelProto, dict[str, ir.TensorProtocol]]:
    """As ``external_proto``, but large initializers that are external data in ``folder`` stay where they are."""
    there = {
        value: ir.ExternalTensor(
            Path(tensor.path).name, tensor.offset, tensor.length, tensor.dtype, shape=shape_of(tensor), name=name
        )
        for name, value in large_initializers(model, limit).items()
        if isinstance(tensor := value.const_value, ir.ExternalTensor) and Path(tensor.path).parent == folder
    }
    with swapped(there):
        return external_proto(model, limit, frozenset(there))


def data_folder(model: ir.Model, limit: int = LARGE) -> Path | None:
    """The folder that holds most of the external data of the large initializers; ``None`` where there is none."""
    sizes: dict[Path, int] = {}
    for value in large_initializers(model, limit).values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.dtype.bitwidth >= 8:
            folder = Path(tensor.path).parent
            sizes[folder] = sizes.get(folder, 0) + tensor.nbytes
    return max(sizes, key=sizes.__getitem__) if sizes else None


def _read(model: ir.Model, but: Set[ir.Value] = frozenset()) -> dict[ir.Value, ir.TensorProtocol]:
    """External data, of bodies too, as tensors in memory."""
    return read_in(value for value in initializers_of(model) if value not in but)


def _whole_bytes(tensor: ir.TensorProtocol | None) -> TypeGuard[ir.TensorProtocol]:
    """False for int4 and the like: arrays hold one element a byte, files two, so memory cannot be shared."""
    return tensor is not None and tensor.dtype.bitwidth >= 8


def _absent(name: str, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    return ir.ExternalTensor("held-in-memory", 0, tensor.nbytes, tensor.dtype, shape=shape_of(tensor), name=name)
