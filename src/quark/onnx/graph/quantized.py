"""What a quantized graph is made of: stages (a Q with its DQs, or one node that does both) and stored constants."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.ir.surgery import (
    Names,
    add_initializer,
    bypass,
    constant_array,
    drop_if_unused,
    has_array,
    input_at,
    prune,
    set_input,
)
from quark.ir.walk import all_nodes, graphs_of, nodes_within

QUANTIZE = frozenset(["QuantizeLinear", "ExtendedQuantizeLinear", "VitisQuantizeLinear"])
DEQUANTIZE = frozenset(["DequantizeLinear", "ExtendedDequantizeLinear", "VitisDequantizeLinear"])
FUSED = frozenset(
    [
        "BFPQuantizeDequantize",
        "MXQuantizeDequantize",
        "QuantizeDequantize",
        "BlockQuantizeDequantize",
        "BFPFixNeuron",
        "MXFixNeuron",
    ]
)
STORED = frozenset(["PackedDequantize", "BlockDequantize"])
#: What turns float values into codes, or into the values that codes stand for.
QUANTIZERS = QUANTIZE | FUSED | {"DynamicQuantizeLinear"}
LIMITS = {
    "INT4": (-8, 7),
    "UINT4": (0, 15),
    "INT8": (-128, 127),
    "UINT8": (0, 255),
    "INT16": (-32768, 32767),
    "UINT16": (0, 65535),
    "INT32": (-(2**31), 2**31 - 1),
}


@dataclass(frozen=True)
class QuantizedActivation:
    """A quantized activation: ``first`` quantizes, ``last`` dequantize; one node that does both is its own last."""

    first: ir.Node
    last: tuple[ir.Node, ...]

    @property
    def source(self) -> ir.Value:
        """The float tensor that is quantized."""
        value = self.first.inputs[0]
        if value is None:
            raise ValueError(f"{self.first.name!r} quantizes nothing")
        return value


def all_nodes_in_graphs(model: ir.Model) -> list[ir.Node]:
    """The nodes of the graph and its subgraphs, not of functions."""
    return list(nodes_within(model.graph))


def constants_of(model: ir.Model) -> list[ir.TensorProtocol]:
    """Every constant tensor: initializers, and the Constant nodes by which bodies hold theirs."""
    tensors = [value.const_value for graph in graphs_of(model) for value in graph.initializers.values()]
    held = [node.attributes.get("value") for node in all_nodes(model) if node.op_type == "Constant"]
    tensors += [one.as_tensor() for one in held if one is not None and not one.is_ref()]
    return [one for one in tensors if one is not None]


def stages(model: ir.Model, constant: bool = False) -> list[QuantizedActivation]:
    """The quantized activations, or float constants, whose codes only DequantizeLinear nodes read."""
    return [stage for node in all_nodes_in_graphs(model) if (stage := stage_of(node, constant)) is not None]


def stage_of(node: ir.Node, constant: bool = False) -> QuantizedActivation | None:
    """The stage that begins with a node, None where there is none."""
    if not node.inputs or node.inputs[0] is None or has_array(node.inputs[0]) != constant:
        return None
    if node.op_type in FUSED:
        return QuantizedActivation(node, (node,))
    if node.op_type not in QUANTIZE or node.outputs[0].is_graph_output():
        return None
    readers = tuple(dict.fromkeys(use.node for use in node.outputs[0].uses()))
    return QuantizedActivation(node, readers) if readers and all(one.op_type in DEQUANTIZE for one in readers) else None


def remove(stage: QuantizedActivation) -> str | None:
    """Let the readers of a stage read the float tensor; the reason why one cannot, or None."""
    reasons = [bypass(node, stage.source) for node in stage.last]
    parameters = [value for node in (stage.first, *stage.last) for value in node.inputs[1:]]
    if stage.first.graph is not None:
        prune(stage.first)
    for value in parameters:
        drop_if_unused(value)
    return next((reason for reason in reasons if reason is not None), None)


def stored(model: ir.Model) -> list[ir.Node]:
    """The nodes that dequantize a constant."""
    kinds = DEQUANTIZE | STORED
    return [
        node
        for node in all_nodes_in_graphs(model)
        if node.op_type in kinds and all(value is None or has_array(value) for value in node.inputs)
    ]


def code_type(node: ir.Node) -> str:
    """Name of the ONNX type of the codes that a Q writes or a DQ reads: that of its zero point, or of the codes."""
    zero_point = input_at(node, 2)
    value = zero_point if zero_point is not None else node.inputs[0] if node.op_type in DEQUANTIZE else None
    return "UINT8" if value is None or value.dtype is None else value.dtype.name


def parameters(node: ir.Node) -> tuple[np.ndarray, np.ndarray] | None:
    """(scale, zero point) of a Q or DQ as float64 and int64, None where they are computed."""
    scale = constant_array(input_at(node, 1))
    zero_point = input_at(node, 2)
    offset = constant_array(zero_point) if zero_point is not None else np.zeros((), np.int64)
    if scale is None or offset is None:
        return None
    return scale.astype(np.float64), offset.astype(np.float64).astype(np.int64)


class Rewriter:
    """New parameters for Q and DQ nodes; nodes that shared theirs share the new ones."""

    def __init__(self, model: ir.Model) -> None:
        self.model, self.names = model, Names(model)
        self._made: dict[tuple[str, bytes], ir.Value] = {}

    def constant(self, array: np.ndarray, dtype: ir.DataType, base: str) -> ir.Value:
        """An initializer, made once per name and contents."""
        key = (base, array.tobytes() + dtype.name.encode())
        if key not in self._made:
            name = self.names.fresh(base)
            tensor = ir.tensor(array.astype(dtype.numpy()), dtype=dtype, name=name)
            self._made[key] = add_initializer(self.model.graph, tensor, name)
        return self._made[key]

    def set_parameters(
        self, stage: QuantizedActivation, scale: np.ndarray, zero_point: np.ndarray, dtype: ir.DataType
    ) -> None:
        """Give every node of a stage another scale, zero point and type of codes."""
        old = [value for node in (stage.first, *stage.last) for value in node.inputs[1:3]]
        base = str(stage.source.name)
        kind = stage.first.inputs[1].dtype if stage.first.inputs[1] is not None else None
        new = (
            self.constant(scale, kind or ir.DataType.FLOAT, f"{base}_scale"),
            self.constant(zero_point, dtype, f"{base}_zero_point"),
        )
        for node in dict.fromkeys((stage.first, *stage.last)):
            for position, made in enumerate(new, 1):
                set_input(node, position, made)
        stage.first.outputs[0].type = ir.TensorType(dtype)
        for value in old:
            drop_if_unused(value)

    def set_constant(
        self,
        node: ir.Node,
        codes: np.ndarray,
        scale: np.ndarray,
        dtype: ir.DataType,
        zero_point: np.ndarray | None = None,
    ) -> None:
        """Give a DQ of a constant other codes, another scale and a zero point, 0 by default."""
        old = list(node.inputs)
        base = str(old[0].name if old[0] is not None else node.name)
        zero = np.zeros(scale.shape, np.int64) if zero_point is None else zero_point
        kind = (old[1].dtype if old[1] is not None else None) or ir.DataType.FLOAT
        node.replace_input_with(0, self.constant(codes, dtype, base))
        node.replace_input_with(1, self.constant(scale, kind, f"{base}_scale"))
        set_input(node, 2, self.constant(zero, dtype, f"{base}_zero_point"))
        for value in old:
            drop_if_unused(value)


def dequantizer(value: ir.Value | None) -> ir.Node | None:
    """The DQ that makes a tensor, None where something else does."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type in DEQUANTIZE else None
