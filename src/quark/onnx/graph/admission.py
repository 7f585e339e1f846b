"""Which models are let in: what the protobuf parser passes and no later stage would report in words.

    check_proto      every model that is read: names, tensors, attributes, wiring, budgets
    admit            a float model before it is quantized: the full checker of ONNX, operators that ONNX Runtime knows

What only annotates (shapes of inner tensors, and of outputs) and contradicts the nodes is not believed: it is inferred
again, and the summary says so. Not handled: faults that show on samples only; calibration meets those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError

from quark.errors import ModelError
from quark.ir.walk import nodes_within
from quark.onnx.graph.budget import check_nodes
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.graph.weightless import light_proto
from quark.reading import reason_of

MAY_BE_INFINITE = frozenset({"Clip", "Constant", "Pad", "Resize"})
"""Operators with an attribute for which infinity is a sensible number (masks, no bound, padding of a MaxPool)."""
DEPRECATED_AT_ONCE = frozenset({"GroupNormalization"})
"""Operators that an opset brought in a form that it called deprecated: the checker refuses it, runtimes run it."""
FAULTY_DEFAULTS = frozenset({"MeanVarianceNormalization"})
"""Operators whose body, without attributes, the checker writes wrongly and then refuses: it loses a default."""
REPAIRS = "quark.repairs"
"""Key of a model's ``meta``: what was put right while it was read, as sentences."""
_STORED: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float_data",
    onnx.TensorProto.COMPLEX64: "float_data",
    onnx.TensorProto.DOUBLE: "double_data",
    onnx.TensorProto.COMPLEX128: "double_data",
    onnx.TensorProto.INT64: "int64_data",
    onnx.TensorProto.UINT32: "uint64_data",
    onnx.TensorProto.UINT64: "uint64_data",
    onnx.TensorProto.STRING: "string_data",
}
"""Element type -> the field of TensorProto that holds values outside of raw_data; all others: int32_data."""
_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
ELEMENTS = frozenset(dtype.value for dtype in ir.DataType if dtype != ir.DataType.UNDEFINED)
_NO_BITS = (ir.DataType.UNDEFINED, ir.DataType.STRING)
_BITS = {dtype.value: dtype.bitwidth for dtype in ir.DataType if dtype not in _NO_BITS}
_UNCHECKED = "org.openquark.unchecked"
"""A domain that nodes are in while the checker looks: it passes by what is of another domain than ONNX's."""
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
_TENSORS = (onnx.AttributeProto.TENSOR, onnx.AttributeProto.TENSORS)


# ---- every model -----------------------------------------------------------------------------------------------------


def check_proto(proto: onnx.ModelProto, source: str) -> None:
    """Refuse a protobuf that is not a model, or that a later stage would misread.

    Raises:
        ModelError: no graph, an unknown version, a budget exceeded, a name that is not text, a tensor whose data do not
            fit, an attribute given twice or not finite, a tensor that nothing makes. The message names it.
    """
    if not proto.HasField("graph") or proto.ir_version < 1:
        raise ModelError(f"{source} is not an ONNX model: it holds no graph")
    if proto.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"{source} has IR version {proto.ir_version}; the installed onnx {onnx.__version__} reads up to "
            f"{onnx.IR_VERSION}. Upgrade onnx, or export the model with an older version"
        )
    check_nodes(proto, source)
    _check_opsets(proto, source)
    for entry in proto.metadata_props:
        _check_names((entry.key, entry.value[:1]), "an entry of metadata_props", source)
    _check_graph(proto.graph, set(), source)
    keys = [(one.domain, one.name, getattr(one, "overload", "")) for one in proto.functions]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ModelError(f"{source} defines the function {twice[1]!r} of the domain {twice[0]!r} twice")
    for function in proto.functions:
        where = f"the function {function.name!r:.80} of {source}"
        _check_names((function.domain, function.name, *function.input, *function.output), where, source)
        for node in function.node:
            _check_node(node, where)


def _check_opsets(proto: onnx.ModelProto, source: str) -> None:
    """Every domain once, with a version that exists; the standard one is never guessed."""
    seen: dict[str, int] = {}
    newest = onnx.defs.onnx_opset_version()
    for entry in proto.opset_import:
        _check_names((entry.domain,), "an opset_import", source)
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        if seen.setdefault(domain, entry.version) != entry.version:
            raise ModelError(f"{source} imports opsets {seen[domain]} and {entry.version} of the domain {domain!r}")
        if not 1 <= entry.version < 2**31 or (not domain and entry.version > newest):
            known = f"1 to {newest}" if not domain else "1 and up"
            raise ModelError(f"{source} imports opset {entry.version} of the domain {domain!r}; known are {known}")
    standard = next((node for node in proto.graph.node if node.domain in ("", "ai.onnx")), None)
    if "" not in seen and standard is not None and proto.ir_version >= 3:
        raise ModelError(
            f"{source} does not say which opset its operators are of, such as {standard.op_type!r}: opset_import lacks "
            "the standard domain. Export it again; the version is not guessed"
        )


def _check_names(names: Iterable[object], where: str, source: str) -> None:
    """Names are text without NUL, at which runtimes would cut them off."""
    for name in names:
        if not isinstance(name, str):  # the parser hands out the bytes
            raise ModelError(f"{source}: {where} has the name {name!r:.80}, which is not UTF-8 text")
        if "\0" in name:
            raise ModelError(f"{source}: {where} has the name {name!r:.80}, which holds a NUL")


def _check_graph(graph: onnx.GraphProto, outer: set[str], source: str) -> None:
    """Every tensor that is read must be a graph input, an initializer or the output of a node (in any order)."""
    if graph.sparse_initializer:
        name = graph.sparse_initializer[0].values.name
        raise ModelError(f"{source} holds the sparse initializer {name!r}: store it as a dense tensor")
    _check_values(graph, source)
    known = outer | {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer} | {""}
    for node in graph.node:
        _check_node(node, source)
        known.update(node.output)
    for node in graph.node:
        missing = next((name for name in node.input if name not in known), None)
        if missing is not None:
            raise ModelError(f"{source}: node {node.name!r} ({node.op_type}) reads {missing!r}, which nothing makes")
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                _check_graph(body, known, source)
    missing = next((value.name for value in graph.output if value.name not in known), None)
    if missing is not None:
        raise ModelError(f"{source}: the graph output {missing!r} is made by no node")


def _check_values(graph: onnx.GraphProto, source: str) -> None:
    names: set[str] = set()
    for tensor in graph.initializer:
        _check_names((tensor.name,), "an initializer", source)
        if tensor.name in names or not tensor.name:
            raise ModelError(f"{source}: two initializers, or one without a name, are called {tensor.name!r}")
        names.add(tensor.name)
        check_tensor(tensor, f"the initializer {tensor.name!r}", source)
    for kind, values in (("input", graph.input), ("output", graph.output), ("value_info", graph.value_info)):
        for value in values:
            _check_names((value.name,), f"a graph {kind}", source)
            _check_type(value, kind, source)
            kind_of = value.type.tensor_type
            if value.type.HasField("tensor_type") and kind_of.elem_type not in ELEMENTS:
                what = f"the element type {kind_of.elem_type}, which ONNX does not define"
                raise ModelError(f"{source}: the {kind} {value.name!r} has {what}")
            for dim in value.type.tensor_type.shape.dim:
                _check_names((dim.dim_param,), f"an axis of {value.name!r:.80}", source)
                if dim.HasField("dim_value") and dim.dim_value < -1:  # exporters write -1 for a free one
                    raise ModelError(f"{source}: the {kind} {value.name!r} has an axis of {dim.dim_value} elements")


def _check_type(value: onnx.ValueInfoProto, kind: str, source: str) -> None:
    """Maps (what ZipMap makes) and opaque values are no tensors, and the graph that passes work on cannot hold them."""
    inner, wrapper = value.type, value.type.WhichOneof("value")
    while wrapper in ("sequence_type", "optional_type"):
        inner = getattr(inner, wrapper).elem_type
        wrapper = inner.WhichOneof("value")
    if wrapper in ("map_type", "opaque_type"):
        what = f"is of the ONNX type {wrapper.removesuffix('_type')}, which cannot be quantized or passed on"
        way = "export without it (skl2onnx: options={'zipmap': False}), or cut it off with onnx.utils.extract_model"
        raise ModelError(f"{source}: the {kind} {value.name!r} {what}: {way}")


def _check_node(node: onnx.NodeProto, source: str) -> None:
    names = (node.name, node.op_type, node.domain, *node.input, *node.output)
    _check_names((*names, *(one.name for one in node.attribute)), f"a node ({node.op_type!r:.80})", source)
    if not node.op_type:
        raise ModelError(f"{source}: the node {node.name!r} names no operator")
    if not node.output:
        raise ModelError(f"{source}: the node {node.name!r} ({node.op_type}) makes nothing: it has no output")
    seen: set[str] = set()
    for attribute in node.attribute:
        where = f"the attribute {attribute.name!r} of the node {node.name!r} ({node.op_type})"
        if attribute.name in seen or not attribute.name:
            raise ModelError(f"{source}: {where} is given twice, or has no name")
        seen.add(attribute.name)
        _check_attribute(attribute, node, where, source)


def _check_attribute(attribute: onnx.AttributeProto, node: onnx.NodeProto, where: str, source: str) -> None:
    if attribute.type == onnx.AttributeProto.UNDEFINED and not attribute.ref_attr_name:
        raise ModelError(f"{source}: {where} has no type")
    for tensor in (attribute.t, *attribute.tensors) if attribute.type in _TENSORS else ():
        if tensor is not attribute.t or attribute.HasField("t"):
            check_tensor(tensor, where, source)
    numbers = (attribute.f, *attribute.floats)
    if node.domain or node.op_type == "Constant" or all(map(math.isfinite, numbers)):
        return
    if node.op_type not in MAY_BE_INFINITE or any(map(math.isnan, numbers)):
        bad = next(number for number in numbers if not math.isfinite(number))
        raise ModelError(f"{source}: {where} is {bad}: it must be a finite number")


def check_tensor(tensor: onnx.TensorProto, where: str, source: str) -> None:
    """Refuse a tensor whose data are not those of its shape and type: missing ones would be read as zeros.

    Raises:
        ModelError: the message has both sizes.
    """
    if tensor.data_type not in _BITS and tensor.data_type != onnx.TensorProto.STRING:
        raise ModelError(f"{source}: {where} has the element type {tensor.data_type}, which ONNX does not define")
    if tensor.HasField("segment"):
        raise ModelError(f"{source}: {where} is a segment of a tensor, which is not supported")
    if any(size < 0 for size in tensor.dims) or len(tensor.dims) > 64:
        raise ModelError(f"{source}: {where} has the shape {list(tensor.dims)[:8]}, which is not valid")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return  # whoever locates the file looks at its size
    needed = math.prod(tensor.dims)
    field = _STORED.get(tensor.data_type, "int32_data")
    held = [name for name in _FIELDS if getattr(tensor, name)]
    if tensor.HasField("raw_data") and tensor.data_type != onnx.TensorProto.STRING:
        needed, found = -(-needed * _BITS[tensor.data_type] // 8), len(tensor.raw_data)
        stray = held
    else:
        each = 2 if tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128) else 1
        bits = _BITS.get(tensor.data_type, 8)
        needed = -(-needed * bits // 8) if bits < 8 else needed * each
        found, stray = len(getattr(tensor, field)), [name for name in held if name != field]
    if found != needed or stray:
        raise ModelError(
            f"{source}: the data of {where} do not fit its shape {list(tensor.dims)[:8]} and type: {found} values or "
            f"bytes are there, {needed} are needed" + (f"; it holds {stray[0]} too" if stray else "")
        )


# ---- float models ----------------------------------------------------------------------------------------------------


def admit(model: ir.Model, custom: bool) -> list[PassReport]:
    """Refuse a model that the full checker of ONNX refuses, or with an operator that nobody defines.

    Shapes that contradict the nodes are forgotten first. Operators that ONNX Runtime registers beyond ONNX are checked
    by it when calibration opens its session.

    Args:
        model: a float model as it was read; only stated shapes that are wrong change.
        custom: whether libraries bring more operators (``UserCustomOpLibPath``).

    Returns:
        What was put right, for the summary.

    Raises:
        ModelError: with the checker's reason.
    """
    repairs = [str(one) for one in model.meta.get(REPAIRS, ())]
    try:
        reason = refusal(model, custom)
        if reason is not None:
            repairs += _forget_shapes(model)
            reason = refusal(model, custom)
    except (DecodeError, EncodeError, ValueError) as error:
        raise ModelError(f"the model cannot be checked: {reason_of(error)}") from error
    if reason is not None:
        raise ModelError(f"the model is not valid: {_shapeless(model) or reason}")
    return [PassReport("repaired while reading", len(repairs), tuple(repairs))] if repairs else []


@cache
def registered() -> Mapping[tuple[str, str], int]:
    """(domain, operator) of everything that ONNX Runtime knows, with the first opset in which it does."""
    from onnxruntime.capi import onnxruntime_pybind11_state as _runtime  # reading a model needs no runtime

    found: dict[tuple[str, str], int] = {}
    for one in _runtime.get_all_operator_schema():
        key = one.domain, one.name
        found[key] = min(found.get(key, one.since_version), one.since_version)
    return found


def refusal(model: ir.Model, custom: bool) -> str | None:
    """Why the checker refuses the model; ``None`` where it does not."""
    return refusal_of_proto(light_proto(model), custom)


def refusal_of_proto(proto: onnx.ModelProto, custom: bool) -> str | None:
    """``refusal`` of a protobuf without external data, which is changed."""
    defined = {(one.domain, one.name) for one in proto.functions}
    version = max((one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")), default=1)
    for node in _nodes(proto.graph):
        domain = "" if node.domain == "ai.onnx" else node.domain
        key = domain, node.op_type
        ours = bool(domain) or onnx.defs.has(node.op_type, version, domain)  # most: ONNX Runtime need not be asked
        nowhere = not ours and not onnx.defs.has(node.op_type, domain)
        known = not ours and (key in defined or (key in registered() and registered()[key] <= version))
        # ONNX Runtime has LayerNormalization in ONNX's domain from opset 1 on, and its optimizer writes it there
        foreign = nowhere or known
        if nowhere and not known and not custom:
            return f"the operator {node.op_type!r} of the node {node.name!r} is known to neither ONNX nor ONNX Runtime"
        refused = node.op_type in DEPRECATED_AT_ONCE or (node.op_type in FAULTY_DEFAULTS and not node.attribute)
        if not domain and (foreign or refused):
            node.domain = _UNCHECKED
    proto.opset_import.append(onnx.helper.make_opsetid(_UNCHECKED, 1))
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError) as error:
        return reason_of(error)
    return None


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
                yield from _nodes(body)


def _forget_shapes(model: ir.Model) -> list[str]:
    """Forget the shapes of the tensors that nodes make, where inference says otherwise; a sentence for each."""
    stated = {value: value.shape for node in nodes_within(model.graph) for value in node.outputs}
    for value in stated:
        value.shape = None
    infer_shapes(model)
    found = []
    for value, shape in stated.items():
        if shape is not None and value.shape is not None and not _agree(shape, value.shape):
            found.append(f"the model gives {str(value.name)!r} the shape {shape}, and its node makes {value.shape}")
        elif shape is None and value.shape is not None and value.is_graph_output():
            found.append(f"the model gives {str(value.name)!r} no shape, and its node makes {value.shape}")
        else:
            value.shape = shape
    return found


def _shapeless(model: ir.Model) -> str:
    """The sentence about an input or output without a shape, which the checker calls by the name of its field."""
    for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            if value.shape is None and isinstance(value.type, ir.TensorType | None):
                return (
                    f"the {kind} {str(value.name)!r} has no shape, and none can be inferred: ONNX asks for one, with a "
                    "name for every size that is free"
                )
    return ""


def _agree(one: ir.Shape, other: ir.Shape) -> bool:
    """Whether two shapes can be those of one tensor."""
    return len(one) == len(other) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(one, other, strict=True)
    )
