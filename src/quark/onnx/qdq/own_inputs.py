"""A pair of their own for layers that read, in another precision, a tensor that others read too.

    producer → pair of the others' type → others
             → pair of the layer's own type → layer

Without it the type of the later entry of the configuration holds for all readers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.dataclass import dataclass
from quark.ir.surgery import name_of
from quark.onnx.qdq.block_axes import in_blocks
from quark.onnx.qdq.second_type import hand_over, insert


@dataclass(frozen=True)
class Apart:
    """A layer, the tensor that it shares with others, and the type in which it reads it."""

    node: ir.Node
    value: ir.Value
    spec: TensorSpec
    reason: str


def separate(model: ir.Model, plan: Plan, wanted: Iterable[Apart]) -> None:
    """Let every layer read its tensor in its own type; where others read the same type there is one pair."""
    made: dict[tuple[str, TensorSpec], ir.Value] = {}
    for one in wanted:
        name, reader = name_of(one.value), name_of(one.node)
        spec, shared = in_blocks(one.spec, one.value), plan.tensors.get(name)
        if shared is None:
            plan.put(TensorPlan(name, "activation", spec, one.reason, name, readers=frozenset([reader])))
        elif shared.spec == spec:
            plan.put(shared if shared.readers is None else replace(shared, readers=shared.readers | {reader}))
        elif (name, spec) in made:
            hand_over(plan, one.value, made[name, spec], [one.node])
        else:
            copy = made[name, spec] = insert(model, plan, one.value, f"{name}_{reader}", [one.node])
            own, fixed = name_of(copy), shared.fixed_range
            plan.put(TensorPlan(own, "activation", spec, one.reason, own, fixed_range=fixed))
