"""Angles: what a sine or cosine is taken of, such as positions times frequencies. A rounded angle is another angle.

    position_ids → Cast → MatMul(frequencies) → Concat → Sin, Cos        rotary positions
    timestep → Mul(frequencies) → Sin, Cos                               the time of a diffusion model
    coordinates → MatMul(directions) → Mul(2 pi) → Sin, Cos              Fourier features
    layer → Mul(30) → Sin                                                a network of sines

8 bits over some 1,000 radians have steps of 4. Such tensors stay float, and the nodes that make nothing else; layers
that lead to them are quantized, but for products of coordinates (a few numbers each), which cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import field

import onnx_ir as ir

from quark.dataclass import dataclass
from quark.onnx.qdq.expectations import REASON as EXPECTED
from quark.onnx.qdq.expectations import takes_expectations
from quark.onnx.qdq.index_paths import computes_shapes, of_coordinates
from quark.onnx.qdq.op_rules import MOVES_VALUES
from quark.onnx.qdq.powers import REASON as POWER
from quark.onnx.qdq.powers import saturating_powers
from quark.onnx.qdq.units import REASON as UNITS
from quark.onnx.qdq.units import changes_units

SHAPE = "it computes a shape or an index"
ANGLE = "a sine or cosine is taken of its result, and a rounded angle is another angle"
_TAKES = frozenset(["Sin", "Cos", "Tan"])
_LEADS = MOVES_VALUES | frozenset(["Add", "Concat", "Div", "Mul", "Neg", "Sub"])


def makes_angles(model: ir.Model) -> tuple[set[ir.Node], set[ir.Value]]:
    """The nodes that make angles and nothing else, and the tensors that hold them."""
    nodes, values, results = set[ir.Node](), set[ir.Value](), set(model.graph.outputs)
    for node in reversed(model.graph):
        readers = [use.node for value in node.outputs for use in value.uses()]
        if not readers or results.intersection(node.outputs):
            continue
        if all(reader in nodes or reader.op_type in _TAKES for reader in readers):
            values.update(node.outputs)
            if node.op_type in _LEADS or of_coordinates(node):
                nodes.add(node)
    return nodes, values


@dataclass(frozen=True)
class NoData:
    """Numbers of which none may be rounded.

    Attributes:
        nodes: that compute them, and why.
        tensors: that nobody quantizes, whoever makes them.
    """

    nodes: Mapping[ir.Node, str] = field(default_factory=dict)
    tensors: Set[ir.Value] = frozenset()

    @classmethod
    def of(cls, model: ir.Model) -> NoData:
        """Those of a model."""
        nodes, values = makes_angles(model)
        reasons = dict.fromkeys(changes_units(model), UNITS) | dict.fromkeys(takes_expectations(model), EXPECTED)
        reasons |= dict.fromkeys(saturating_powers(model), POWER) | dict.fromkeys(nodes, ANGLE)
        return cls(reasons | dict.fromkeys(computes_shapes(model), SHAPE), values)
