"""Read, write and hand out ONNX models: the only place where raw protobuf is parsed or written.

Reading copies every weight once, out of the file or the protobuf, so that a pass that replaces a weight frees the old
one (a protobuf frees nothing before all of it goes), or leaves it in the file. External data stays memory-mapped.
Writing goes to a temporary folder beside the destination, is checked with ``onnx.checker`` there, and is moved into
place last.

Not handled: sparse initializers (an error says so).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError

from quark.errors import ModelError, ModelNotFoundError, OutputError
from quark.files.ours import MARK, NAME
from quark.files.outputs import Input, Output, draft_of
from quark.ir.surgery import in_memory, name_nodes, opset, shape_of, tensor_alias, tensor_bytes, tensor_of
from quark.ir.walk import all_nodes, graphs_of
from quark.onnx.graph import wire
from quark.onnx.graph.admission import REPAIRS, check_proto, refusal
from quark.onnx.graph.other_formats import other_format
from quark.onnx.graph.weightless import initializers_of, large_initializers, read_in, swapped
from quark.reading import reason_of, regular_file

ModelInput: TypeAlias = "str | os.PathLike[str] | onnx.ModelProto | ir.Model"
Copy: TypeAlias = Callable[[ir.TensorProtocol, str], ir.TensorProtocol]

INLINE_LIMIT = 2**31 - 2**26
"""Bytes of weights that fit into one protobuf (its limit is 2 GiB) beside 64 MiB of nodes."""
EXTERNAL_THRESHOLD = 1024
"""Initializers of at most so many bytes stay in the model file when the others go to external data."""
_CONSTANTS_FROM = 4
"""The IR version from which an initializer may be no input of the graph."""
COMMON_IR = 10
"""Newest IR version that every supported ONNX Runtime loads; a newer one is written only where the model needs it."""
_AHEAD: dict[tuple[str, int, int, int], ir.Model] = {}
#: What the last model files that were asked for name as external data: a command asks several times.
_LOCATIONS: dict[tuple[int, int, int, int], tuple[str, ...]] = {}
REMEMBERED = 64
_NEEDED_IR = {
    ir.DataType.FLOAT8E4M3FN: 9,
    ir.DataType.FLOAT8E4M3FNUZ: 9,
    ir.DataType.FLOAT8E5M2: 9,
    ir.DataType.FLOAT8E5M2FNUZ: 9,
    ir.DataType.INT4: 10,
    ir.DataType.UINT4: 10,
    ir.DataType.FLOAT4E2M1: 11,
    ir.DataType.FLOAT8E8M0: 12,
    ir.DataType.INT2: 13,
    ir.DataType.UINT2: 13,
}
"""IR version in which a tensor type appeared (onnx.proto, history of ``IRVersion``)."""


# ---- reading ---------------------------------------------------------------------------------------------------------


def load(model: ModelInput, in_place: bool = False) -> ir.Model:
    """A model of our own to edit: whatever is done to it, the caller's model and file stay as they are.

    Its nodes are in topological order, and each has a name of its own (:func:`~quark.ir.surgery.name_nodes`).

    Args:
        model: Path of an ``.onnx`` file (weights inside it or in external data beside it), a protobuf, or a model that
            is already in this form.
        in_place: leave large weights where they are in the file; each is read when it is asked for, and never kept.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelError: The file is empty, corrupt or not ONNX, its external data is missing or too short, or a node reads
            a tensor that nothing makes. The message names the file and the reason.
    """
    if isinstance(model, ir.Model):
        ours = model.clone()
        _replace_tensors(ours, tensor_alias)
        return _tidied(ours, "the given model")
    if isinstance(model, onnx.ModelProto):
        return _from_proto(model, "the given ModelProto", Path("model.onnx"), tensor_alias)
    if not isinstance(model, (str, os.PathLike)):
        raise ModelError(f"a model is a path, an onnx.ModelProto or an onnx_ir.Model, not {type(model).__name__}")
    path = Path(model)
    ahead = _taken(path)
    if ahead is not None:
        return ahead
    proto, weights = _read(path)
    return _from_proto(proto, f"{str(path)!r}", path, in_memory, weights, in_place)


def load_ahead(path: Path) -> ir.Model:
    """A model that is looked at now and loaded next: the next ``load`` of the file takes it over, if the file stays.

    Nobody may keep it: what takes it over edits it, and frees weights that it replaces. One model waits at a time.
    """
    _AHEAD.clear()
    before, model = _state(path), load(path, in_place=True)
    if before is not None and before == _state(path):
        _AHEAD[before] = model
    return model


def _taken(path: Path) -> ir.Model | None:
    """The model that waits, if it is that of this file."""
    return _AHEAD.pop(state, None) if _AHEAD and (state := _state(path)) is not None else None


def _state(path: Path) -> tuple[str, int, int, int] | None:
    """What tells a file from any other, and from itself with another content; None where there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # ``load`` says why
        return None
    return str(path.resolve()), found.st_mtime_ns, found.st_size, found.st_ino


def _tidied(model: ir.Model, source: str) -> ir.Model:
    """What passes rely on: nodes in topological order, each with its own name, and one name for ONNX's own domain."""
    before = list(model.graph)
    try:
        model.graph.sort()
        for function in model.functions.values():
            function.sort()
    except ValueError as error:
        raise ModelError(f"{source}: the graph runs in a circle: {_innermost(error)}") from error
    for imports in (model.graph.opset_imports, *(function.opset_imports for function in model.functions.values())):
        if "ai.onnx" in imports:
            imports[""] = imports.pop("ai.onnx")
    repairs = (
        ["nodes stood before those that make what they read: they are sorted"] if before != list(model.graph) else []
    )
    freed = _free_axes(model)
    if freed:
        repairs.append(f"{freed[0]!r} has an axis of -1 elements: a free one, as ONNX Runtime reads it")
    constant = next((one for one in model.graph.initializers.values() if not one.is_graph_input()), None)
    if constant is not None and model.ir_version < _CONSTANTS_FROM:  # ONNX Runtime's optimizer writes such files
        repairs.append(f"{constant.name!r} is no input: IR version {_CONSTANTS_FROM} for {model.ir_version}")
        model.ir_version = _CONSTANTS_FROM
    if repairs:
        model.meta[REPAIRS] = tuple(repairs)
    name_nodes(model)
    return model


def _free_axes(model: ir.Model) -> list[str]:
    """Make axes of -1 elements free; the names of the tensors that had some."""
    ends = [value for graph in graphs_of(model) for value in (*graph.inputs, *graph.outputs)]
    found = []
    for value in (*ends, *(value for node in all_nodes(model) for value in node.outputs)):
        if value.shape is not None and -1 in value.shape:
            value.shape = ir.Shape(None if size == -1 else size for size in value.shape)
            found.append(str(value.name))
    return found


def _read(path: Path) -> tuple[onnx.ModelProto, wire.Weights | None]:
    """The protobuf of a file without its external data, and the weights that it was read without."""
    if not os.path.exists(path):
        raise ModelNotFoundError(f"the model file {str(path)!r} does not exist (current folder: {str(Path.cwd())!r})")
    if path.is_dir():
        raise ModelError(f"{str(path)!r} is a folder: give the path of an .onnx file")
    if regular_file(path, ModelError, "the model file") == 0:
        raise ModelError(f"the model file {str(path)!r} is empty")
    try:
        return wire.read(path)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(f"the model file {str(path)!r} cannot be read: {error.strerror}") from error
    except (DecodeError, ValueError, MemoryError) as error:
        known = other_format(path)
        raise ModelError(
            f"{str(path)!r} is not an ONNX model or is damaged: {reason_of(error)}"
            if known is None
            else f"{str(path)!r} {known}"
        ) from error


def _from_proto(
    proto: onnx.ModelProto,
    source: str,
    path: Path,
    copy: Copy,
    weights: wire.Weights | None = None,
    in_place: bool = False,
) -> ir.Model:
    """``copy`` gives each tensor an object of ours; ``weights`` are read; external data beside ``path`` is located and
    checked."""
    check_proto(proto, source)
    try:
        model = ir.from_proto(proto)
    except (ir.serde.SerdeError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{source} is not a valid ONNX model: {_innermost(error)}") from error

    def own(tensor: ir.TensorProtocol, name: str, in_place: bool = False) -> ir.TensorProtocol:
        if isinstance(tensor, ir.ExternalTensor):
            if weights is not None and tensor.location == weights.token:
                return weights.place(tensor, name) if in_place else weights.read(tensor, name)
            return _located(tensor, name, source, path)
        try:
            return copy(tensor, name)
        except ValueError as error:
            raise ModelError(f"{source}: the data of {name!r} do not fit its shape or type: {error}") from error

    _replace_tensors(model, own, partial(own, in_place=in_place))
    return _tidied(model, source)


def _replace_tensors(model: ir.Model, copy: Copy, held: Copy | None = None) -> None:
    """Give each tensor an object of ours; ``held``: each initializer, where that may be in a file."""
    for value in initializers_of(model):
        if value.const_value is not None:
            value.const_value = (held or copy)(value.const_value, str(value.name))
    for node, attr in _tensor_attributes(model):
        node.attributes[attr.name] = ir.AttrTensor(attr.name, copy(attr.value, attr.value.name or ""))


def _innermost(error: BaseException) -> str:
    """The reason at the bottom of a chain of errors, on one line."""
    while (inner := error.__cause__ or error.__context__) is not None:  # onnx_ir fails while it tells of some errors
        error = inner
    return " ".join(str(error).split())


def _tensor_attributes(model: ir.Model) -> list[tuple[ir.Node, ir.Attr]]:
    """Attributes that hold one tensor, with the nodes they sit on."""
    return [
        (node, attr)
        for node in all_nodes(model)
        for attr in node.attributes.values()
        if attr.type == ir.AttributeType.TENSOR and not attr.is_ref()
    ]


def _located(tensor: ir.ExternalTensor, name: str, source: str, path: Path) -> ir.ExternalTensor:
    """External data with its full path.

    Links are followed as far as the folder that the model's own link leads to: model hubs keep all files there. Any
    other may be of a stranger who wants a file of this machine in what is published.
    """
    location, folder = Path(tensor.location), path.parent
    outside = f"{source}: external data of {name!r} lies outside the model's folder"
    if location.is_absolute() or ".." in location.parts:
        raise ModelError(f"{outside} ({str(location)!r})")
    try:
        file = (folder / location).resolve()
        there = file.is_file()
        homes = folder.resolve(), path.resolve().parent
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, too many letters, links in a circle
        raise ModelError(f"{source}: the file name {str(location)!r:.80} of {name!r}: {reason_of(error)}") from error
    if not there:
        raise ModelError(
            f"{source}: the external data file {str(folder / location)!r} (weights of {name!r}) is missing"
        )
    if not any(map(file.is_relative_to, homes)):
        raise ModelError(f"{outside}: {str(location)!r} is a link to {str(file)!r}")
    start, length = tensor.offset or 0, tensor.nbytes if tensor.length is None else tensor.length
    if start < 0 or length != tensor.nbytes:
        raise ModelError(
            f"{source}: external data of {name!r}: offset {start} and length {length} do not fit its shape and type, "
            f"which take {tensor.nbytes} bytes"
        )
    end = start + length
    if end > file.stat().st_size:
        raise ModelError(
            f"{source}: the external data file {str(file)!r} is too short: {file.stat().st_size} bytes, "
            f"but the weights of {name!r} end at {end}"
        )
    shape = shape_of(tensor)
    return ir.ExternalTensor(file, tensor.offset, tensor.length, tensor.dtype, shape=shape, name=name)


# ---- writing ---------------------------------------------------------------------------------------------------------


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The protobuf of ``model`` with all weights inside, nodes in topological order.

    Raises:
        ModelError: The weights exceed the 2 GiB that a protobuf holds.
    """
    size = tensor_bytes(model)
    if size > INLINE_LIMIT:
        raise ModelError(
            f"the model holds {size / 2**30:.1f} GiB of weights and a ModelProto at most 2: give an output path, "
            "so that the weights are written to external data"
        )
    _settle(model)
    with swapped(read_in(initializers_of(model))):
        return ir.to_proto(model)


def _placed(tensor: ir.TensorProtocol, token: str, place: int) -> ir.ExternalTensor:
    """What stands for a weight in the protobuf that ``wire.write`` gets."""
    return ir.ExternalTensor(
        token,
        place,
        tensor.nbytes,
        tensor.dtype,
        shape=shape_of(tensor),
        name=str(tensor.name),
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def _settle(model: ir.Model) -> None:
    """What every form we hand out has: nodes in topological order and an IR version that runtimes load."""
    model.graph.sort()
    for function in model.functions.values():
        function.sort()
    model.ir_version = suitable_ir_version(model)


def suitable_ir_version(model: ir.Model) -> int:
    """The IR version to write: the model's own, within what its contents need and what runtimes load."""
    needed = max(_CONSTANTS_FROM, _opset_ir_version(opset(model)), 8 if model.functions else 0)
    for value in initializers_of(model):
        if value.const_value is not None:
            needed = max(needed, _NEEDED_IR.get(value.const_value.dtype, 0))
    return max(needed, min(model.ir_version, COMMON_IR))


def readable_ir_version(proto: onnx.ModelProto) -> int:
    """The IR version to hand to a runtime: the model's own, within what its opset needs and what runtimes load."""
    standard = next((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), 1)
    return min(proto.ir_version, max(COMMON_IR, _opset_ir_version(standard)))


def _opset_ir_version(version: int) -> int:
    """The IR version that the onnx release with this opset had."""
    try:
        return int(onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", version)]))
    except ValueError:
        return int(onnx.IR_VERSION)


def output_of(path: str | os.PathLike[str], name: str = "the output path") -> Output:
    """A model as an output of the gate: its file, and the external data that may come with it."""
    return Output(Path(path), name, "model")


def inputs_of_model(model: ModelInput, name: str = "the float model") -> Iterator[Input]:
    """The files that a model is read from, its external data among them; none where it is in memory."""
    if not isinstance(model, (str, os.PathLike)):
        return
    path = Path(model)
    yield name, path
    for file in data_files(path):
        yield f"external data of {name}", file


def data_files(path: Path) -> list[Path]:
    """The files of external data that a model names; none where it cannot be read, which whoever loads it says.

    A file is read for this once, while it stays as it is, whatever it is called meanwhile.
    """
    if not path.is_file():
        return []
    state = path.stat()
    key = (state.st_dev, state.st_ino, state.st_mtime_ns, state.st_size)
    if key not in _LOCATIONS:
        while len(_LOCATIONS) >= REMEMBERED:
            _LOCATIONS.pop(next(iter(_LOCATIONS)), None)
        _LOCATIONS[key] = _locations(path)
    return [path.parent / location for location in _LOCATIONS[key]]


def _locations(path: Path) -> tuple[str, ...]:
    """Where a model says that its external data are, each place once."""
    try:
        proto, weights = wire.read(path)
    except (OSError, DecodeError, ValueError):
        return ()
    entries = ({entry.key: entry.value for entry in tensor.external_data} for tensor in _external(proto.graph))
    own = {weights.token} if weights is not None else set()
    return tuple(place for place in dict.fromkeys(found.get("location", "") for found in entries) if place not in own)


def _external(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The tensors of a graph, and of the graphs in it, that are kept in files of their own."""
    tensors = [*graph.initializer, *(attr.t for node in graph.node for attr in node.attribute if attr.HasField("t"))]
    yield from (tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL)
    for attr in (attr for node in graph.node for attr in node.attribute if attr.HasField("g")):
        yield from _external(attr.g)


def save(
    model: ir.Model,
    path: str | os.PathLike[str],
    external_data: bool = False,
    tried: Callable[[Path], None] | None = None,
) -> None:
    """Write ``model`` to ``path``. Whatever goes wrong, nothing half-written stays and an older file keeps its content.

    Args:
        model: Its nodes are sorted, its IR version is set to what is written, and its metadata say that we wrote it.
        path: The file. Its folder must exist; a link is followed.
        external_data: Put the weights into ``<path>.data``. Above 2 GiB of weights that happens by itself.
        tried: Gets the finished file under a name of its own; what it raises keeps the file from being published.

    Raises:
        OutputError: The path cannot be written, or the disk is full.
        ModelError: The model does not pass ``onnx.checker``.
    """
    path = Path(path)
    _settle(model)
    external = external_data or tensor_bytes(model) > INLINE_LIMIT
    if not model.producer_name or not model.producer_name.startswith(NAME):
        model.metadata_props[f"{NAME}.made"] = MARK
    with draft_of(output_of(path)) as draft:
        try:
            _write(model, draft, external)
            _check(model, draft, path)
            if tried is not None:
                tried(draft)
            _map_weights(model, _data_file(Path(os.path.realpath(path))))
        except OSError as error:
            raise OutputError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def _data_file(path: Path) -> Path:
    return path.with_name(path.name + ".data")


def _write(model: ir.Model, draft: Path, external: bool) -> None:
    if external:
        ir.save(model, draft, external_data=_data_file(draft).name, size_threshold_bytes=EXTERNAL_THRESHOLD)
        return
    whole, token = read_in(initializers_of(model)), uuid.uuid4().hex
    large = [
        (value, tensor)
        for value in large_initializers(model).values()
        if not isinstance(tensor := whole.get(value, tensor_of(value)), ir.TensorProtoTensor)  # may be no raw data
    ]
    with swapped({**whole, **{value: _placed(tensor, token, place) for place, (value, tensor) in enumerate(large)}}):
        proto = ir.to_proto(model)
    try:
        wire.write(draft, proto, token, [tensor for _, tensor in large])
    except EncodeError as error:
        raise ModelError(f"the model does not fit into one file ({error}): save it with external data") from error


def _check(model: ir.Model, draft: Path, path: Path) -> None:
    """``onnx.checker`` on the file; on the graph where it holds operators that ONNX Runtime has in ONNX's own domain,
    which the checker does not know."""
    try:
        onnx.checker.check_model(os.fspath(draft))
    except onnx.checker.ValidationError as error:
        foreign = any(not node.domain and not onnx.defs.has(node.op_type) for node in all_nodes(model))
        reason = refusal(model, custom=False) if foreign else _innermost(error)
        if reason is not None:
            raise ModelError(f"{str(path)!r} is not written: the model fails onnx.checker: {reason}") from error


def _map_weights(model: ir.Model, file: Path) -> None:
    """Hold on to weights that ``model`` reads from a file that is about to be replaced."""
    for value in initializers_of(model):
        if isinstance(value.const_value, ir.ExternalTensor) and Path(value.const_value.path) == file.resolve():
            value.const_value.numpy()
