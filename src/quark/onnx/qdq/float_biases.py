"""Biases that stay float beside integer operands.

ONNX Runtime 1.31 does not leave such a bias alone: it rounds it to int32 at scale input x weight when it opens the
model (WeightBiasQuantization), and saturates where that does not fit. So the scales must suit it as if quantized.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.errors import ConfigError
from quark.numerics.formats import get_format
from quark.numerics.granularity import Group
from quark.onnx.qdq import slots
from quark.onnx.qdq.op_rules import OP_RULES

_WIDEST = 16
#: The smallest normal float16: a product of float16 scales below it is no scale any more.
_SMALLEST_HALF = 2.0**-14


def float_biases(model: ir.Model, plan: Plan) -> Iterator[TensorPlan]:
    """What the plan would say of every float bias whose node computes on integers, were it quantized."""
    for node in model.graph:
        rule = OP_RULES.get(node.op_type)
        bias = None if rule is None else slots.bias_input(node, rule)
        if bias is None or bias.name in plan.tensors or len(bias.shape or ()) != 1:
            continue
        data, weight = (
            plan.tensors.get((value.name if value is not None else None) or "") for value in node.inputs[:2]
        )
        whole = weight is not None and not slots.is_off_channel(node, weight.spec.granularity)
        if data is not None and weight is not None and whole and _integers(data) and _integers(weight):
            name = bias.name or ""
            yield TensorPlan(name, "bias", weight.spec, "float", name, bias_of=(data.name, weight.name))


def _integers(tensor: TensorPlan) -> bool:
    row = get_format(tensor.spec.format)
    return (
        not tensor.spec.dynamic
        and row.has_zero_point
        and row.bits <= _WIDEST
        and not isinstance(tensor.spec.granularity, Group)
    )


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
