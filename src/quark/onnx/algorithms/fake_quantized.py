"""The quantized model as it will answer, with weights that can still be changed: activations pass through Q and DQ,
constants are float initializers that hold the values their codes stand for.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.config.plan import Plan, TensorPlan
from quark.ir.surgery import set_constant
from quark.numerics.array import Array, Same
from quark.onnx.qdq.emit import emit
from quark.onnx.qdq.parameters import constant
from quark.onnx.qdq.store import codes_of


def fake_quantized(model: ir.Model, plan: Plan, options: Options) -> ir.Model:
    """A copy of ``model`` that answers as the quantized model will; nodes keep their names.

    Args:
        model: prepared float model; comes back unchanged.
        plan: complete, with scales.
    """
    fake_model = model.clone()
    for tensor in plan.of_role("weight", "bias"):
        value = fake_model.graph.initializers[tensor.name]
        array = constant(value)
        values = rounded(array, tensor).astype(array.dtype)
        if not np.array_equal(values, array):  # weights that lie on their grid are shared, not held twice
            set_constant(value, values)
    return emit(fake_model, Plan({tensor.name: tensor for tensor in plan.of_role("activation")}, plan.nodes), options)


def rounded(values: Array, tensor: TensorPlan) -> Same:
    """What a constant becomes: the values of its codes under its plan. Takes arrays and torch tensors."""
    if tensor.role == "bias":
        scale = np.asarray(tensor.scale, np.float32)
        return (codes_of(np.asarray(values), tensor) * scale).astype(np.float32)
    return tensor.spec.coding.fake_quantize(values, tensor.scale, tensor.zero_point)
