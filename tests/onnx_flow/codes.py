"""Whether the stored codes of a quantized model are those that its scales give for the float model's constants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Initializers by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def judged(quantized: onnx.ModelProto, source: Path) -> dict[str, bool]:
    """Constant behind a DequantizeLinear -> whether its codes are clip(round(w / scale) + zero point).

    Constants whose name or shape the float model does not have (folded, made by a pass) are left out.
    """
    stored, found = arrays(quantized), {}
    exact = arrays(onnx.load(source))
    for node in quantized.graph.node:
        name = node.input[0].removesuffix("_quantized") if node.op_type == "DequantizeLinear" else ""
        if name not in exact or node.input[0] not in stored or exact[name].shape != stored[node.input[0]].shape:
            continue
        codes, scale, zero_point = (stored[each] for each in node.input[:3])
        limits = np.iinfo(codes.dtype)
        lowest = -limits.max if limits.min < 0 else 0  # symmetric constants leave the lowest code unused
        shape = [-1 if axis == 0 and scale.size > 1 else 1 for axis in range(codes.ndim)]
        wanted = np.rint(exact[name] / scale.reshape(shape)) + zero_point.reshape(shape)
        found[name] = bool(np.array_equal(codes, np.clip(wanted, lowest, limits.max)))
    return found
