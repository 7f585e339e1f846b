"""Patterns of operators, written as the formula that they compute.

    half = op("Mul", any_("x"), number(0.5))
    gelu = op("Mul", half, op("Add", op("Erf", op("Div", any_("x"), number(2**0.5))), number(1)))
    found = match(gelu, value)          # {"x": the value} or None

A pattern is a function: a value and what is bound so far in, every way to bind the rest out. Operands of Add, Mul, Max
and Min match in either order, and the same name is the same value wherever it stands. A match looks at the nodes of the
pattern only, so searching a graph is linear in it.

Not handled: outputs other than a node's first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from math import prod

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import constant_array, constant_shape, has_array

Bound = Mapping[str, ir.Value]
Pattern = Callable[[ir.Value, Bound], Iterator[Bound]]
COMMUTE = frozenset(["Add", "Mul", "Max", "Min"])


def match(pattern: Pattern, value: ir.Value | None) -> dict[str, ir.Value] | None:
    """The first way to bind the names of a pattern, None where it does not fit."""
    found = None if value is None else next(pattern(value, {}), None)
    return None if found is None else dict(found)


def any_(name: str) -> Pattern:
    """Any value, bound to a name; the same value wherever the name stands."""

    def run(value: ir.Value, bound: Bound) -> Iterator[Bound]:
        if bound.get(name, value) is value:
            yield {**bound, name: value}

    return run


def constant(name: str) -> Pattern:
    """Any constant, bound to a name."""

    def run(value: ir.Value, bound: Bound) -> Iterator[Bound]:
        if bound.get(name, value) is value and has_array(value):
            yield {**bound, name: value}

    return run


def number(expected: float, tolerance: float = 1e-4) -> Pattern:
    """A constant with one element of this value, up to a relative error."""

    def run(value: ir.Value, bound: Bound) -> Iterator[Bound]:
        found = scalar(value)
        if found is not None and abs(found - expected) <= tolerance * abs(expected):
            yield bound

    return run


def op(op_type: str, *operands: Pattern, name: str = "", only: bool = False) -> Pattern:
    """The result of an operator on these operands; ``name`` binds the result.

    Operands after the last one given are free, unless ``only`` says that there are none.
    """
    orders = list(permutations(operands)) if op_type in COMMUTE and len(operands) == 2 else [operands]

    def run(value: ir.Value, bound: Bound) -> Iterator[Bound]:
        node = value.producer()
        if node is None or node.op_type != op_type or node.domain != "" or value is not node.outputs[0]:
            return
        if only and any(operand is not None for operand in node.inputs[len(operands) :]):
            return
        if name and bound.get(name, value) is not value:
            return
        here = {**bound, name: value} if name else bound
        for order in orders:
            yield from _operands(order, node, here)

    return run


def _operands(patterns: tuple[Pattern, ...], node: ir.Node, bound: Bound, position: int = 0) -> Iterator[Bound]:
    if position == len(patterns):
        yield bound
        return
    value = node.inputs[position] if position < len(node.inputs) else None
    if value is not None:
        for one in patterns[position](value, bound):
            yield from _operands(patterns, node, one, position + 1)


def either(*patterns: Pattern) -> Pattern:
    """What any of the patterns matches, the first ones first."""

    def run(value: ir.Value, bound: Bound) -> Iterator[Bound]:
        for pattern in patterns:
            yield from pattern(value, bound)

    return run


def scalar(value: ir.Value) -> float | None:
    """The number that a constant of one element holds, None for anything else."""
    array = constant_array(value) if prod(constant_shape(value) or (1,)) == 1 else None
    return None if array is None else float(np.asarray(array, np.float64).reshape(()))
