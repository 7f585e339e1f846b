"""The nodes that quantize and dequantize one activation, per kind of carrier.

Every builder takes a ``Carried`` and returns nodes in order; the first output of the last one is the quantized tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.config.plan import TensorPlan
from quark.numerics.granularity import Channel, Group
from quark.onnx.qdq.carriers import ROUNDING_MODES, Kind, block_operator, onnx_type
from quark.onnx.qdq.initializers import ParameterInitializers, stem

AMD, OWN = "com.amd.quark", "org.openquark"
LARGEST_BFLOAT16 = 255 * 2.0**120


@dataclass(frozen=True)
class Carried:
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


def value_like(value: ir.Value, name: str, dtype: ir.DataType | None) -> ir.Value:
    """A new value with the shape of ``value``."""
    return ir.Value(name=name, shape=value.shape, type=None if dtype is None else ir.TensorType(dtype))


def single(
    carried: Carried,
    op_type: str,
    inputs: list[ir.Value],
    attributes: Mapping[str, int | str],
    domain: str = "",
    kind: str = "DequantizeLinear",
    dtype: ir.DataType | None = None,
) -> ir.Node:
    """A node ``<name>_<kind>`` that writes ``<name>_<kind>_Output``."""
    name = f"{carried.name}_{kind}"
    output = value_like(carried.value, carried.parameters.names.fresh(f"{name}_Output"), dtype or carried.value.dtype)
    return ir.node(op_type, inputs, attributes=dict(attributes), domain=domain, outputs=[output], name=name)


def axis_of(tensor: TensorPlan) -> dict[str, int]:
    """The attributes of the granularity; none for one scale per tensor."""
    granularity = tensor.spec.granularity
    if np.ndim(np.asarray(tensor.scale)) == 0:
        return {}
    if isinstance(granularity, Group):
        return {"axis": granularity.axis, "block_size": granularity.size}
    return {"axis": granularity.axis if isinstance(granularity, Channel) and tensor.role != "bias" else 0}


def block_axis(carried: Carried) -> int:
    """The axis that blocks run along."""
    granularity = carried.tensor.spec.granularity
    return granularity.axis if isinstance(granularity, Group) else 0


def _standard(carried: Carried, domain: str = "", prefix: str = "") -> list[ir.Node]:
    scale, zero_point = carried.parameters.of(carried.tensor)
    attributes = axis_of(carried.tensor)
    dtype = onnx_type(carried.tensor.spec)
    inputs = [carried.value, scale, zero_point]
    q = single(carried, f"{prefix}QuantizeLinear", inputs, attributes, domain, "QuantizeLinear", dtype)
    dq = single(carried, f"{prefix}DequantizeLinear", [q.outputs[0], scale, zero_point], attributes, domain)
    return [q, dq]


def _extended(carried: Carried) -> list[ir.Node]:
    clip = _clip(carried)
    if not clip:
        return _standard(carried, AMD, "Extended")
    pair = _standard(carried, AMD, "Extended")
    pair[0].replace_input_with(0, clip[0].outputs[0])
    return [*clip, *pair]


def _clip(carried: Carried) -> list[ir.Node]:
    """``BF16WithClip``: what rounds beyond the largest bfloat16 would become infinite."""
    if not carried.options.BF16WithClip or carried.tensor.spec.row.onnx_type != "BFLOAT16":
        return []
    bounds = carried.parameters.bounds("bfloat16", LARGEST_BFLOAT16)
    return [single(carried, "Clip", [carried.value, *bounds], {}, kind="Clip")]


def _cast(carried: Carried) -> list[ir.Node]:
    nodes = _clip(carried)
    source = nodes[0].outputs[0] if nodes else carried.value
    dtype = onnx_type(carried.tensor.spec)
    scaled = carried.tensor.scale is not None and float(carried.tensor.scale) != 1.0
    scale = carried.parameters.of(carried.tensor)[0] if scaled else None
    if scale is not None:
        nodes.append(single(carried, "Div", [source, scale], {}, kind="Div"))
        source = nodes[-1].outputs[0]
    nodes.append(single(carried, "Cast", [source], {"to": int(dtype)}, kind="QuantizeLinear", dtype=dtype))
    nodes.append(single(carried, "Cast", [nodes[-1].outputs[0]], {"to": int(ir.DataType.FLOAT)}))
    if scale is not None:
        nodes.append(single(carried, "Mul", [nodes[-1].outputs[0], scale], {}, kind="Mul"))
    return nodes


def _element(carried: Carried) -> list[ir.Node]:
    inputs = [carried.value, *carried.parameters.of(carried.tensor, ir.DataType.INT32)]
    axis = axis_of(carried.tensor).get("axis", 0)
    attributes: dict[str, int | str] = {"format": carried.tensor.spec.format, "axis": axis}
    return [single(carried, "QuantizeDequantize", inputs, attributes, OWN, "QuantizeDequantize")]


def _block(carried: Carried) -> list[ir.Node]:
    spec = carried.tensor.spec
    operator = block_operator(spec)
    attributes = {**operator.attributes, "axis": block_axis(carried)}
    if operator.rounds:
        attributes["rounding_mode"] = ROUNDING_MODES[spec.rounding]
    inputs = [carried.value]
    if not spec.row.unit_scale:
        inputs.append(carried.parameters.of(carried.tensor)[0])
    return [single(carried, operator.name, inputs, attributes, operator.domain, operator.name)]


ACTIVATION_NODES: dict[Kind, Callable[[Carried], list[ir.Node]]] = {
    "standard": _standard,
    "extended": _extended,
    "cast": _cast,
    "element": _element,
    "block": _block,
}
