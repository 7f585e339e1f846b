"""Biases that stay float beside integer operands.

ONNX Runtime 1.31 does not leave such a bias alone: it rounds it to int32 at scale input x weight when it opens the
model (WeightBiasQuantization), and saturates where that does not fit. So the scales must suit it as if quantized.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.errors import ConfigError
from quark.ir.surgery import name_of
from quark.onnx.qdq import slots
from quark.onnx.qdq.biases import why_no_product
from quark.onnx.qdq.op_rules import OP_RULES

#: The smallest normal float16: a product of float16 scales below it is no scale any more.
_SMALLEST_HALF = float(np.finfo(np.float16).tiny)


def float_biases(model: ir.Model, plan: Plan) -> Iterator[TensorPlan]:
    """What the plan would say of every float bias whose node computes on integers, were it quantized."""
    for node in model.graph:
        rule = OP_RULES.get(node.op_type)
        bias = None if rule is None else slots.bias_input(node, rule)
        if bias is None or len(bias.shape or ()) != 1 or not _is_float(plan.tensors.get(name_of(bias))):
            continue
        data, weight = (plan.tensors.get(name_of(value)) for value in node.inputs[:2])
        if data is None or weight is None or data.spec.dynamic or weight.spec.dynamic:
            continue
        if why_no_product(node, bias, data.spec, weight.spec) is None:
            name = name_of(bias)
            yield TensorPlan(name, "bias", weight.spec, "float", name, bias_of=(data.name, weight.name))


def _is_float(bias: TensorPlan | None) -> bool:
    """Whether the runtime sees a float constant: one that is not quantized, or 32-bit codes at a scale of their own."""
    return bias is None or (bias.role == "weight" and bias.spec.row.onnx_type == "INT32")


def check_half(plan: Plan, bias: TensorPlan) -> None:
    """Raise for float16 scales whose product, the scale that the runtime gives the bias, float16 cannot hold."""
    data, weight = (plan.tensors[name] for name in bias.bias_of or ("", ""))
    if data.scale is None or weight.scale is None or data.spec.scale_rule != "float16":
        return
    product = float(data.scale) * float(weight.scale.min())
    if product < _SMALLEST_HALF:
        raise ConfigError(
            f"UseFP32Scale=False: the scales of {data.name!r} and {weight.name!r} multiply to {product:.2g}, which "
            "float16 cannot hold, and ONNX Runtime would lose the bias. Leave UseFP32Scale on"
        )
