"""A quantized graph whose scales and code types can be changed: read into a Plan, moved there, and written back.

Every quantizer with constant parameters is a row: of an activation under the name of the float tensor, of a constant
under that of what its DequantizeLinear makes. A constant whose row has changed is rounded again,

    q' = round((q - z) · (s / s')) + z'

and int32 biases follow the scales of input and weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan, Role, TensorPlan
from quark.errors import as_a, known
from quark.ir.surgery import constant_array, int_attribute
from quark.onnx.graph.quantized import (
    DEQUANTIZE,
    LIMITS,
    QuantizedActivation,
    Rewriter,
    code_type,
    parameters,
    stages,
    stored,
)
from quark.onnx.passes import bias_scale
from quark.onnx.quantized_plan import REASON, granularity_of, spec_of


class QuantizedRows:
    """The rows of a graph.

    Attributes:
        plan: that the rows are in; what is put there is written back.
        keys: what a row is called, by the node that quantizes, or that dequantizes a constant.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model, self.plan, self.keys = model, Plan(), dict[ir.Node, str]()
        self._places: dict[str, QuantizedActivation | ir.Node] = {}
        for stage in stages(model):
            self._enter(str(stage.source.name), "activation", stage.first, stage)
        for node in stored(model):
            if node.op_type in DEQUANTIZE:
                self._enter(str(node.outputs[0].name), "weight", node, node)
        self._before = dict(self.plan.tensors)

    def _enter(self, name: str, role: Role, node: ir.Node, place: QuantizedActivation | ir.Node) -> None:
        found, kind = parameters(node), code_type(node)
        if found is None or kind not in LIMITS:
            return
        key = f"{name} by {node.name}" if name in self.plan.tensors else name
        low, high = ((limit - found[1]) * found[0] for limit in LIMITS[kind])
        spec = spec_of(kind.lower(), *found, granularity_of(node, found[0]))
        row = TensorPlan(key, role, spec, REASON, key, range=(low, high), scale=found[0], zero_point=found[1])
        self.plan.put(row)
        self.keys[node], self._places[key] = key, place

    def of(self, node: ir.Node) -> TensorPlan | None:
        """The row of a quantizer; None where its parameters are computed, or its codes are no integers."""
        return self.plan.tensors.get(self.keys.get(node, ""))

    def codes(self, row: TensorPlan) -> np.ndarray:
        """The codes of a constant."""
        return known(constant_array(as_a(ir.Node, self._places[row.name]).inputs[0]), "a constant")

    def move(self, row: TensorPlan, scale: Any, zero_point: Any, kind: str = "") -> None:
        """Give a row other parameters, and another type of codes where ``kind`` names one."""
        spec = replace(row.spec, format=kind.lower() or row.spec.format)
        self.plan.put(replace(row, spec=spec, scale=np.asarray(scale), zero_point=np.asarray(zero_point)))

    def write(self, biases: bool = True) -> int:
        """Write back what has changed, ``biases`` following; how many rows that were."""
        changed = [key for key in self._places if not alike([self._before[key], self.plan.tensors[key]])]
        if changed:
            rewriter = Rewriter(self.model)
            for key in changed:
                self._write(rewriter, self._places[key], self._before[key], self.plan.tensors[key])
            if biases:
                bias_scale.run(self.model)
        return len(changed)

    def _write(
        self, rewriter: Rewriter, place: QuantizedActivation | ir.Node, before: TensorPlan, row: TensorPlan
    ) -> None:
        dtype, scale = ir.DataType[row.spec.format.upper()], np.asarray(row.scale)
        zero_point = np.broadcast_to(np.asarray(row.zero_point), scale.shape)
        if isinstance(place, QuantizedActivation):
            rewriter.set_parameters(place, scale, zero_point, dtype)
            return
        codes, arrays = self.codes(row), (before.scale, before.zero_point, scale, zero_point)
        s, z, new, offset = (_beside(np.asarray(one), codes, place) for one in arrays)
        moved = np.rint((codes.astype(np.float64) - z) * (s / new)) + offset
        rewriter.set_constant(place, np.clip(moved, *LIMITS[dtype.name]), scale, dtype, zero_point)


def alike(rows: Iterable[TensorPlan]) -> bool:
    """Whether rows have the same parameters and codes."""
    first, *others = rows
    return all(
        one.spec.format == first.spec.format
        and np.array_equal(np.asarray(one.scale), np.asarray(first.scale))
        and np.array_equal(np.asarray(one.zero_point), np.asarray(first.zero_point))
        for one in others
    )


def _beside(values: np.ndarray, codes: np.ndarray, node: ir.Node) -> np.ndarray:
    """One value, or one per channel along the axis of a DQ, in a shape that broadcasts to the codes."""
    if values.size == 1:
        return values.reshape(())
    axis = int_attribute(node, "axis", 1) % codes.ndim
    return values.reshape([-1 if k == axis else 1 for k in range(codes.ndim)])
