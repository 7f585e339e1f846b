"""The standard nodes that stand for a quantized activation where a Cast is enough: bfloat16, float16, FP8.

``x -> Cast(to) -> Cast(FLOAT) -> y`` is what ``BF16QDQToCast`` makes of a Q and DQ pair; a scale other than 1 becomes a
division before and a product after it. Casts to FP8 saturate. ``clip_bfloat16`` is the Clip of ``BF16WithClip``.
"""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from quark.errors import ConfigError, unknown

LARGEST_BFLOAT16 = 255 * 2.0**120  # 3.38953139e38
CAST_TYPES = ("BFLOAT16", "FLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2")


def cast_pair(x: str, y: str, elem_type: str, scale: str = "", float_type: str = "FLOAT") -> list[NodeProto]:
    """Nodes that round ``x`` to ``elem_type`` and write it, as ``float_type`` again, to ``y``.

    Args:
        x, y: names of the values; nodes and values in between are named after ``x``.
        elem_type: one of ``CAST_TYPES``.
        scale: name of a scalar of ``float_type`` that the type is scaled by; empty for 1.
        float_type: type of ``x`` and ``y``.

    Raises:
        ConfigError: no such cast.
    """
    if elem_type not in CAST_TYPES:
        raise ConfigError(unknown("type to cast to", elem_type, CAST_TYPES))
    narrow, wide = f"{x}_QuantizeLinear_Output", f"{x}_Cast_Output" if scale else y
    scaled = f"{x}_Scaled" if scale else x
    nodes = [
        helper.make_node("Cast", [scaled], [narrow], f"{x}_QuantizeLinear", to=TensorProto.DataType.Value(elem_type)),
        helper.make_node("Cast", [narrow], [wide], f"{x}_DequantizeLinear", to=TensorProto.DataType.Value(float_type)),
    ]
    if not scale:
        return nodes
    before = helper.make_node("Div", [x, scale], [scaled], f"{x}_Div")
    return [before, *nodes, helper.make_node("Mul", [wide, scale], [y], f"{x}_Mul")]


def clip_bfloat16(x: str, y: str, bounds: tuple[str, str] = ("bfloat16_min", "bfloat16_max")) -> NodeProto:
    """A Clip of ``x`` to the finite bfloat16 values; ``bounds`` name the two constants of ``bfloat16_bounds``."""
    return helper.make_node("Clip", [x, *bounds], [y], f"{x}_Clip")


def bfloat16_bounds(names: tuple[str, str] = ("bfloat16_min", "bfloat16_max")) -> list[TensorProto]:
    """The lowest and the largest finite bfloat16 value as float32 initializers."""
    values = np.array([-LARGEST_BFLOAT16, LARGEST_BFLOAT16], np.float32)
    return [numpy_helper.from_array(value, name) for value, name in zip(values, names, strict=True)]
