"""``QuantizeDequantize`` (org.openquark, version 1): any element format in one node, with float32 in and out.

    y = (clip(round_half_even(x / scale) + zero_point, min, max) - zero_point) * scale      integers
    y = element(x / scale) * scale                                                          floats

The same numbers as a Q and DQ pair, for formats that have no ONNX type (int3, FP6, FP4 ..) and for FP8 activations,
where a pair of Casts is slow (ONNX Runtime 1.31 converts one value at a time) and a pair of ``QuantizeLinear`` and
``DequantizeLinear`` around a Conv does not load. The zero point is int32 and counts for integers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from quark.numerics.elements import ELEMENTS, Float, Int
from quark.operators.affine import beside
from quark.operators.arithmetic import round_float
from quark.operators.body import Body
from quark.operators.views import NodeFacts, from_float, to_float

ATTRIBUTES: dict[str, int | str] = {"format": "fp8_e4m3", "axis": 0}


def formats() -> tuple[str, ...]:
    """Names of the formats it has: all elements that have a grid around zero."""
    return tuple(name for name, row in ELEMENTS.items() if isinstance(row, Int | Float))


def variant(attributes: Mapping, facts: NodeFacts) -> str:
    """The overload of a node at ``facts``: granularity and type of x."""
    return f"{'axis' if facts.per_axis else 'tensor'}.{facts.elem_type}"


def write(body: Body, attributes: Mapping, label: str) -> str:
    """The body of ``QuantizeDequantize`` on ``x``, ``scale``, ``zero_point``."""
    granularity, elem_type = label.split(".")
    element = ELEMENTS[attributes["format"]]
    x = to_float(body, "x", elem_type)
    scale = beside(body, "scale", x, granularity, attributes["axis"])
    scale = body.cast(scale, "FLOAT")
    quotient = body.op("Div", x, scale)
    if isinstance(element, Int):
        zero_point = beside(body, "zero_point", x, granularity, attributes["axis"])
        rounded = _integer(body, quotient, zero_point, element)
    else:
        rounded = _small_float(body, quotient, cast(Float, element))
    return from_float(body, body.op("Mul", rounded, scale), elem_type)


def _integer(body: Body, quotient: str, zero_point: str, element: Int) -> str:
    wide = element.work_dtype == "float64"
    dtype, work = (np.float64, "DOUBLE") if wide else (np.float32, "FLOAT")
    zero_point = body.cast(zero_point, work)
    placed = body.op("Add", body.op("Round", body.cast(quotient, work) if wide else quotient), zero_point)
    codes = body.op("Clip", placed, np.array(element.min, dtype), np.array(element.max, dtype))
    values = body.op("Sub", codes, zero_point)
    return body.cast(values, "FLOAT") if wide else values


def _small_float(body: Body, quotient: str, element: Float) -> str:
    if element.saturates:
        return round_float(body, quotient, element)
    return body.cast(body.cast(quotient, element.onnx_type or ""), "FLOAT")
