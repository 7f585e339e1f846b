"""``ExtendedQuantizeLinear`` and ``ExtendedDequantizeLinear`` (com.amd.quark, version 1): affine, for the wide types.

    q = T(clip(round_half_even(x / scale) + zero_point));   y = (q - zero_point) * scale

The type T of the zero point decides what is stored: every integer type from INT2 to UINT32, FLOAT16 (clipped to
+-65504), BFLOAT16 (not clipped: what rounds beyond its largest value becomes infinite, hence ``BF16WithClip``), FP8
(saturating). The division is float32, as in the standard operators; codes beyond 23 bits are computed in float64, so
that they are right up to the limits of their type.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quark.errors import ModelError, check_name
from quark.numerics.elements import ELEMENTS, Element, Float, Int
from quark.operators.body import LOWEST_OPSET, Body
from quark.operators.views import NodeFacts, from_float, to_float

ATTRIBUTES: dict[str, int | str] = {"axis": 0}
#: ``TensorProto`` type of the zero point -> the format stored in it.
STORED: dict[str, Element] = {
    row.onnx_type: row
    for row in ELEMENTS.values()
    if row.onnx_type and (isinstance(row, Int) or (isinstance(row, Float) and row.bits >= 8))
}
_CLIPPED_FLOATS = ("FLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2")
_CAST_FROM = {"FLOAT8E4M3FN": 19, "FLOAT8E5M2": 19, "INT4": 21, "UINT4": 21, "INT2": 25, "UINT2": 25}  # opset


def variant(attributes: Mapping, facts: NodeFacts) -> str:
    """The overload of a node at ``facts``: stored type, granularity, type of x.

    Raises:
        ConfigError: the operators have no such type.
    """
    check_name("zero point type", facts.code_type, STORED)
    return f"{facts.code_type}.{'axis' if facts.per_axis else 'tensor'}.{facts.elem_type}"


def write_quantize(body: Body, attributes: Mapping, label: str) -> str:
    """The body of ``ExtendedQuantizeLinear`` on ``x``, ``scale``, ``zero_point``."""
    code_type, granularity, elem_type = label.split(".")
    stored = _stored(body, code_type)
    x = to_float(body, "x", elem_type)
    scale = beside(body, "scale", x, granularity, attributes["axis"])
    zero_point = beside(body, body.cast("zero_point", _work(stored)), x, granularity, attributes["axis"])
    quotient = body.op("Div", x, body.cast(scale, "FLOAT"))
    if isinstance(stored, Int):
        return body.cast(_integer_codes(body, quotient, zero_point, stored), code_type)
    values = body.op("Add", quotient, zero_point)
    if code_type in _CLIPPED_FLOATS:
        values = body.op("Clip", values, float(stored.min), float(stored.max))
    return body.cast(values, code_type)


def _stored(body: Body, code_type: str) -> Element:
    lowest = _CAST_FROM.get(code_type, LOWEST_OPSET)
    if body.opset < lowest:
        raise ModelError(f"{code_type} needs opset {lowest}, and the model has opset {body.opset}")
    return STORED[code_type]


def _work(stored: Element) -> str:
    """The type that holds every code and every difference of codes exactly."""
    return "DOUBLE" if stored.work_dtype == "float64" else "FLOAT"


def _integer_codes(body: Body, quotient: str, zero_point: str, stored: Int) -> str:
    wide = _work(stored) == "DOUBLE"
    dtype = np.float64 if wide else np.float32
    placed = body.op("Add", body.op("Round", body.cast(quotient, "DOUBLE") if wide else quotient), zero_point)
    return body.op("Clip", placed, np.array(stored.min, dtype), np.array(stored.max, dtype))


def write_dequantize(body: Body, attributes: Mapping, label: str) -> str:
    """The body of ``ExtendedDequantizeLinear`` on ``x``, ``scale``, ``zero_point``."""
    code_type, granularity, elem_type = label.split(".")
    work = _work(_stored(body, code_type))
    scale = beside(body, "scale", "x", granularity, attributes["axis"])
    zero_point = beside(body, body.cast("zero_point", work), "x", granularity, attributes["axis"])
    shifted = body.op("Sub", body.cast("x", work), zero_point)
    values = body.op("Mul", body.cast(shifted, "FLOAT"), body.cast(scale, "FLOAT"))
    return from_float(body, values, elem_type)


def beside(body: Body, parameter: str, x: str, granularity: str, axis: int) -> str:
    """``parameter`` (one value, or one per index of ``axis``) in a shape that broadcasts over ``x``."""
    if granularity == "tensor":
        return body.op("Reshape", parameter, np.zeros(0, np.int64))
    if axis < 0:
        return body.op("Reshape", parameter, body.ints(-1, *[1] * (-axis - 1)))
    after = body.op("Shape", body.dimensions(x, axis + 1))
    ones = body.op("Expand", np.array([1], np.int64), after)
    return body.op("Reshape", parameter, body.concat(body.ints(-1), ones))
