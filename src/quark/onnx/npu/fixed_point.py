"""What the fixed-point arithmetic of the NPU makes of single operators: what is found at a node, and its rewrite.

    LeakyRelu               alpha becomes round(256 alpha) / 256, ties to even
    Sigmoid                 1 / (1 + exp(-x)) becomes clip(x / 6 + 1/2, 0, 1), a HardSigmoid
    HardSigmoid             x / 6 is x * 2731 / 2**14: the same, times 1.0001220703125; other slopes have no table
    AveragePool, ReduceMean   y = f(x) becomes y_Mul = f(x), y = y_Mul * y_Scale
    InstanceNormalization   com.amd.quark::ExtendedInstanceNormalization, which comes as a function for every runtime
    Clip                    whole bounds within -128..127; an absent bound is one of them

The device divides by n as a multiplication and a shift: 1/n is replaced by K / 2**s with K = round(2**s / n) and the s
of least error up to 6 + ceil(log2 n); the exact mean of n values is then off by n K / 2**s. For the kernels of
``POOLS`` it has constants of its own, and beyond 255 it divides exactly.

Not handled: pools that are not square or of unknown size, means over computed axes or unknown sizes.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    Names,
    add_initializer,
    axes_of,
    constant_array,
    drop_if_unused,
    float_attribute,
    has_array,
    input_at,
    ints_attribute,
    set_input,
)
from quark.onnx.graph.rewriting import put_behind

STEPS = 256
"""Of the slope of LeakyRelu."""
ALPHA, BETA, TOLERANCE = 1 / 6, 0.5, 1e-6
"""The HardSigmoid that the device has."""
SIXTH = 2731 / 2**14 * 6
PRECISION = 7
"""Bits of a multiplier beyond those of the divisor."""
POOLS = {3: (7, 6), 5: (10, 8), 6: (7, 8)}
"""Side of the kernel -> (multiplier, shift) of the device."""
LARGEST = 255
"""Sides above this are divided exactly."""
LOWEST, HIGHEST = -128, 127


# ---- attributes ------------------------------------------------------------------------------------------------------


def slope_of(node: ir.Node) -> float | None:
    """The slope that a LeakyRelu gets; None where it has it."""
    alpha = float_attribute(node, "alpha", 0.01)
    rounded = round(STEPS * alpha) / STEPS
    return None if rounded == alpha else rounded


def set_slope(node: ir.Node, alpha: float, _: Names) -> None:
    """Another slope."""
    node.attributes["alpha"] = ir.AttrFloat32("alpha", alpha)


def to_hard_sigmoid(node: ir.Node, *_: object) -> None:
    """A HardSigmoid under the same name."""
    node.op_type = "HardSigmoid"
    node.attributes["alpha"], node.attributes["beta"] = ir.AttrFloat32("alpha", ALPHA), ir.AttrFloat32("beta", BETA)


def to_own_operator(node: ir.Node, *_: object) -> None:
    """The device's own operator; a compiler that has a kernel for it uses that."""
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", float_attribute(node, "epsilon", 1e-5))
    node.op_type, node.domain = "ExtendedInstanceNormalization", "com.amd.quark"


# ---- factors ---------------------------------------------------------------------------------------------------------


def is_sixth(node: ir.Node) -> bool:
    """Whether a HardSigmoid is the one that the device has."""
    alpha, beta = float_attribute(node, "alpha", 0.2), float_attribute(node, "beta", BETA)
    return abs(alpha - ALPHA) < TOLERANCE and abs(beta - BETA) < TOLERANCE


def of_sixth(node: ir.Node) -> float | str:
    """The factor of a HardSigmoid."""
    return SIXTH if is_sixth(node) else "the device has alpha 1/6 and beta 1/2 only"


def of_pool(node: ir.Node) -> float | str:
    """The factor of an average pool."""
    sides = kernel(node)
    if sides is None or len(set(sides)) != 1 or len(sides) != 2:
        return f"its kernel {sides or 'of unknown size'} is not square"
    side = sides[0]
    if side in POOLS:
        multiplier, shift = POOLS[side]
        return side**2 * multiplier / 2**shift
    return 1.0 if side > LARGEST else mean_factor(side**2)


def kernel(node: ir.Node) -> list[int] | None:
    """The sides of a pool's window; ``None`` where they are unknown."""
    if node.op_type == "AveragePool":
        return ints_attribute(node, "kernel_shape")
    source = node.inputs[0]
    sides = list(source.shape[2:]) if source is not None and source.shape is not None else []
    known = [side for side in sides if isinstance(side, int)]
    return known if sides and len(known) == len(sides) else None


def of_mean(node: ir.Node) -> float | str:
    """The factor of a ReduceMean."""
    count = reduced(node)
    return "the number of values that it averages is not known" if count is None else mean_factor(count)


def reduced(node: ir.Node) -> int | None:
    """How many values one result is the mean of; ``None`` where that is not known."""
    source, second = node.inputs[0], input_at(node, 1)
    if source is None or source.shape is None or (second is not None and not has_array(second)):
        return None
    sizes = [source.shape[axis] for axis in axes_of(node) or range(len(source.shape))]
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(sizes) and math.prod(known) > 0 else None


def mean_factor(count: int) -> float:
    """n K / 2**s for a mean of ``count`` values."""
    powers = np.exp2(np.arange(PRECISION + math.ceil(math.log2(count))))
    found = np.rint(powers / count) / powers
    return float(count * found[np.argmin(np.abs(found - 1 / count))])


def multiply(node: ir.Node, factor: float, names: Names) -> bool:
    """Multiply the first output by ``factor``, unless that is 1; whoever reads it sees the product under its name."""
    source, graph = node.outputs[0], node.graph
    if factor == 1.0 or not isinstance(graph, ir.Graph):
        return False
    name = f"{source.name}_Mul"
    scale = add_initializer(graph, np.asarray(factor, number_of(source)), names.fresh(f"{source.name}_Scale"))
    put_behind(source, [ir.node("Mul", [source, scale], name=name)], names.fresh(name))
    return True


def number_of(value: ir.Value | None) -> type[np.floating]:
    """The type of numbers beside a tensor."""
    return np.float16 if value is not None and value.dtype == ir.DataType.FLOAT16 else np.float32


# ---- bounds ----------------------------------------------------------------------------------------------------------


def bounds_of(node: ir.Node) -> list[ir.Value | None] | str:
    """The bounds of a Clip."""
    given = [input_at(node, 1), input_at(node, 2)]
    computed = any(value is not None and not has_array(value) for value in given)
    return "its bounds are not constant" if computed else given


def make_whole(node: ir.Node, given: list[ir.Value | None], names: Names) -> bool:
    """Whole bounds; whether they were not."""
    changed, graph = False, node.graph
    for slot, (value, absent, side) in enumerate(zip(given, (LOWEST, HIGHEST), ("min", "max"), strict=True), start=1):
        array = constant_array(value)
        bound = absent if array is None else float(np.clip(np.rint(array.reshape(-1)[0]), LOWEST, HIGHEST))
        if isinstance(graph, ir.Graph) and (array is None or bound != array.reshape(-1)[0]):
            name = names.fresh(f"{node.outputs[0].name}_{side}")
            set_input(node, slot, add_initializer(graph, np.asarray(bound, number_of(node.inputs[0])), name))
            drop_if_unused(value)
            changed = True
    return changed
