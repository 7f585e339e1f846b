"""The nodes that quantize and dequantize one activation, per kind of node.

Every builder takes a ``QuantizedTensor`` and returns nodes in order; the first output of the last one is the quantized
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.config.plan import TensorPlan
from quark.dataclass import dataclass
from quark.numerics.elements import ELEMENTS
from quark.numerics.granularity import Channel, Group
from quark.onnx.qdq.initializers import ParameterInitializers, stem
from quark.onnx.qdq.node_kinds import Kind, block_operator, onnx_type
from quark.operators.block_operators import ROUNDING_MODES

AMD, OWN = "com.amd.quark", "org.openquark"


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor on its way into the graph: its decision, its value, where its parameters come from."""

    tensor: TensorPlan
    value: ir.Value
    parameters: ParameterInitializers
    options: Options
    suffix: str = ""

    @property
    def name(self) -> str:
        """What its nodes are named after."""
        return f"{stem(self.tensor)}{self.suffix}"

    def node(
        self,
        op_type: str,
        inputs: list[ir.Value],
        attributes: Mapping[str, int | str | Sequence[int]],
        domain: str = "",
        kind: str = "DequantizeLinear",
        dtype: ir.DataType | None = None,
    ) -> ir.Node:
        """A node ``<name>_<kind>`` that writes ``<name>_<kind>_Output``."""
        name = f"{self.name}_{kind}"
        output = value_like(self.value, self.parameters.names.fresh(f"{name}_Output"), dtype or self.value.dtype)
        return ir.node(op_type, inputs, attributes=dict(attributes), domain=domain, outputs=[output], name=name)


def value_like(value: ir.Value, name: str, dtype: ir.DataType | None) -> ir.Value:
    """A new value with the shape of ``value``."""
    return ir.Value(name=name, shape=value.shape, type=None if dtype is None else ir.TensorType(dtype))


def axis_of(tensor: TensorPlan) -> dict[str, int]:
    """The attributes of the granularity; none for one scale per tensor."""
    granularity = tensor.spec.granularity
    if np.ndim(np.asarray(tensor.scale)) == 0:
        return {}
    if isinstance(granularity, Group):
        return {"axis": granularity.axis, "block_size": granularity.size}
    return {"axis": granularity.axis if isinstance(granularity, Channel) and tensor.role != "bias" else 0}


def block_axis(item: QuantizedTensor) -> int:
    """The axis that blocks run along."""
    granularity = item.tensor.spec.granularity
    return granularity.axis if isinstance(granularity, Group) else 0


def _standard(item: QuantizedTensor) -> list[ir.Node]:
    return _pair(item, item.value, "", "")


def _pair(item: QuantizedTensor, source: ir.Value, domain: str, prefix: str) -> list[ir.Node]:
    scale, zero_point = item.parameters.of(item.tensor)
    attributes = axis_of(item.tensor)
    dtype = onnx_type(item.tensor.spec)
    inputs = [source, scale, zero_point]
    q = item.node(f"{prefix}QuantizeLinear", inputs, attributes, domain, "QuantizeLinear", dtype)
    dq = item.node(f"{prefix}DequantizeLinear", [q.outputs[0], scale, zero_point], attributes, domain)
    return [q, dq]


def _extended(item: QuantizedTensor) -> list[ir.Node]:
    nodes, source = _clipped(item)
    return [*nodes, *_pair(item, source, AMD, "Extended")]


def _clipped(item: QuantizedTensor) -> tuple[list[ir.Node], ir.Value]:
    """``BF16WithClip``: what rounds beyond the largest bfloat16 would become infinite."""
    if not item.options.BF16WithClip or item.tensor.spec.row.onnx_type != "BFLOAT16":
        return [], item.value
    bounds = item.parameters.bounds("bfloat16", ELEMENTS["bfloat16"].max)
    clip = item.node("Clip", [item.value, *bounds], {}, kind="Clip")
    return [clip], clip.outputs[0]


def _cast(item: QuantizedTensor) -> list[ir.Node]:
    nodes, source = _clipped(item)
    dtype = onnx_type(item.tensor.spec)
    scaled = item.tensor.scale is not None and float(item.tensor.scale) != 1.0
    scale = item.parameters.of(item.tensor)[0] if scaled else None
    if scale is not None:
        nodes.append(item.node("Div", [source, scale], {}, kind="Div"))
        source = nodes[-1].outputs[0]
    nodes.append(item.node("Cast", [source], {"to": int(dtype)}, kind="QuantizeLinear", dtype=dtype))
    nodes.append(item.node("Cast", [nodes[-1].outputs[0]], {"to": int(ir.DataType.FLOAT)}))
    if scale is not None:
        nodes.append(item.node("Mul", [nodes[-1].outputs[0], scale], {}, kind="Mul"))
    return nodes


def _element(item: QuantizedTensor) -> list[ir.Node]:
    inputs = [item.value, *item.parameters.of(item.tensor, ir.DataType.INT32)]
    axis = axis_of(item.tensor).get("axis", 0)
    attributes: dict[str, int | str] = {"format": item.tensor.spec.format, "axis": axis}
    return [item.node("QuantizeDequantize", inputs, attributes, OWN, "QuantizeDequantize")]


def _block(item: QuantizedTensor) -> list[ir.Node]:
    spec = item.tensor.spec
    operator = block_operator(spec)
    attributes = {**operator.attributes, "axis": block_axis(item)}
    if operator.rounds:
        attributes["rounding_mode"] = ROUNDING_MODES[spec.rounding]
    inputs = [item.value]
    if not spec.row.unit_scale:
        inputs.append(item.parameters.of(item.tensor)[0])
    return [item.node(operator.name, inputs, attributes, operator.domain, operator.name)]


ACTIVATION_NODES: dict[Kind, Callable[[QuantizedTensor], list[ir.Node]]] = {
    "standard": _standard,
    "extended": _extended,
    "cast": _cast,
    "element": _element,
    "block": _block,
}
