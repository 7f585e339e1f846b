"""AveragePool and GlobalAveragePool as the device computes them (ConvertAvgPoolToDPUVersion).

The division by k * k is a multiplication and a shift, see ``dpu_factor``. For the kernels of ``KNOWN`` the device has
constants of its own; beyond 255 it divides exactly. Not handled: kernels that are not square, and global pools of
unknown size.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.graph.surgery import ints_attribute
from quark.onnx.passes.dpu_factor import correct, mean_factor

#: Side of the kernel -> (multiplier, shift) of the device.
KNOWN = {3: (7, 6), 5: (10, 8), 6: (7, 8), 7: (21, 10), 14: (21, 12)}
#: Sides above this are divided exactly.
LARGEST = 255


def run(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> PassReport:
    """Rewrite the wanted nodes of ``model`` in place."""

    def look(node: ir.Node) -> float | str:
        sides = kernel(node)
        if sides is None or len(set(sides)) != 1 or len(sides) != 2:
            return f"its kernel {sides or 'of unknown size'} is not square"
        return pool_factor(sides[0])

    return correct(model, "dpu_average_pool", ("AveragePool", "GlobalAveragePool"), wanted, look)


def kernel(node: ir.Node) -> list[int] | None:
    """The sides of a pool's window; ``None`` where they are unknown."""
    if node.op_type == "AveragePool":
        return ints_attribute(node, "kernel_shape")
    source = node.inputs[0]
    sides = list(source.shape[2:]) if source is not None and source.shape is not None else []
    known = [side for side in sides if isinstance(side, int)]
    return known if sides and len(known) == len(sides) else None


def pool_factor(side: int) -> float:
    """What the device's mean over side * side values is of the exact one."""
    if side in KNOWN:
        multiplier, shift = KNOWN[side]
        return side * side * multiplier / 2**shift
    return 1.0 if side > LARGEST else mean_factor(side * side)
