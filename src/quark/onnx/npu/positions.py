"""Scales as integer positions: ``scale = 2**-position``, read from a Plan and moved in it.

The device multiplies by shifting, so its rules are about positions. A tensor's group shares one position, and moves
together. Only tensors whose spec has power-of-two scales have a position; weights may have one per channel.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.ir.surgery import input_at, name_of, sole_consumer
from quark.numerics import scales

LOWEST, HIGHEST = -127, 127
#: Bits of the widest codes that the device's rules are about.
WIDEST = 16
#: Activation functions that a producer feeds without Q/DQ between (``quark.onnx.qdq.fuse``).
FUSED = frozenset(["Relu", "Clip", "LeakyRelu", "PRelu", "Gelu"])
#: Operators behind which a simulation puts a Mul (``quark.onnx.npu.simulate``).
CORRECTED = frozenset(["AveragePool", "GlobalAveragePool", "HardSigmoid", "ReduceMean"])


class Positions:
    """The positions of a Plan, by tensor and by slot of a node."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._groups = {name: [member.name for member in members] for name, members in plan.groups().items()}
        self._known: dict[str, np.ndarray | None] = {}

    def of(self, name: str) -> np.ndarray | None:
        """The position of a tensor, int64 scalar or one per channel; ``None`` where it has none."""
        if name not in self._known:
            self._known[name] = self._read_off(name)
        return self._known[name]

    def _read_off(self, name: str) -> np.ndarray | None:
        tensor = self._plan.tensors.get(name)
        if tensor is None or tensor.scale is None or tensor.spec.scale_rule != "power_of_two":
            return None
        if tensor.spec.row.bits > WIDEST:
            return None  # the shifters are those of an accumulator of 32 bits, which such codes do not enter
        scale = np.asarray(tensor.scale, np.float32)
        return np.asarray(scales.position(scale.reshape(-1))).astype(np.int64).reshape(scale.shape)

    def always_zero(self, name: str) -> bool:
        """Whether all that was seen of a tensor, or of its group, is zero: its position says nothing."""
        found = self._plan.tensors[name].range
        return found is not None and not np.any(np.asarray(found))

    def read(self, node: ir.Node, slot: int, channels: bool = False) -> str | None:
        """The tensor that a node reads in this slot, if it has a position and the node reads its quantized values.

        Args:
            channels: whether it may have a position per channel; a shifter has one position for every other operand.
        """
        value = input_at(node, slot)
        name = name_of(value)
        tensor = self._plan.tensors.get(name)
        if tensor is None or (tensor.readers is not None and name_of(node) not in tensor.readers):
            return None
        position = self.of(name)
        return name if position is not None and (channels or position.ndim == 0) else None

    def written(self, node: ir.Node) -> str | None:
        """The tensor with a position that holds a node's result, a correction or a fused activation behind it included.

        ``None`` where the result stays float.
        """
        value: ir.Value | None = node.outputs[0]
        for allowed in (frozenset(["Mul"]) if node.op_type in CORRECTED else frozenset(), FUSED):
            if value is None or name_of(value) in self._plan.tensors:
                break
            follower = sole_consumer(value)
            value = follower.outputs[0] if follower is not None and follower.op_type in allowed else value
        name = name_of(value)
        return name if self.of(name) is not None else None

    def move(self, name: str, position: np.ndarray | int, reason: str) -> bool:
        """Give a tensor and its group another position; the reason goes into the Plan.

        Returns:
            Whether anything changed.
        """
        old = self.of(name)
        new = np.clip(np.asarray(position, np.int64), LOWEST, HIGHEST)
        if old is None or np.array_equal(np.broadcast_to(new, old.shape), old):
            return False
        new = np.broadcast_to(new, old.shape)
        note = f"position {_written(old)} → {_written(new)} by {reason}"
        tensor = self._plan.tensors[name]
        for member in self._groups[tensor.group] if tensor.role == "activation" else [name]:
            self._plan.put(_moved(self._plan.tensors[member], new, note))
            self._known[member] = new
        return True


def _moved(tensor: TensorPlan, position: np.ndarray, note: str) -> TensorPlan:
    """The tensor with the scale of a position; where the zero point is free it follows, so that its range stays."""
    scale = np.ldexp(np.float32(1), -position).astype(np.float32)
    zero_point = np.asarray(tensor.zero_point)
    if not tensor.spec.grid.centred and tensor.range is not None:
        row = tensor.spec.row
        lowest = np.asarray(tensor.range[0], np.float64).reshape(scale.shape)
        zero_point = np.clip(np.rint(row.min - lowest / scale), row.min, row.max).astype(zero_point.dtype)
    changes = (*(change for change in tensor.changes if change != note), note)
    return replace(tensor, scale=scale, zero_point=zero_point, changes=changes)


def _written(position: np.ndarray) -> str:
    """One number, or the least and the largest of many."""
    low, high = int(position.min()), int(position.max())
    return str(low) if low == high else f"{low}..{high}"
