"""The layers that can be tuned: which they are, what stands behind them, and why others cannot be."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan, TensorPlan
from quark.config.rules import NodeInfo, Rule, Rules
from quark.config.tensor import LayerSpec
from quark.dataclass import dataclass
from quark.ir.surgery import constant_array, input_at, input_name, is_constant, label, name_of, sole_consumer
from quark.onnx.algorithms.forward import ACTIVATIONS


@dataclass(frozen=True)
class Tunable:
    """A layer with a quantized constant weight.

    Attributes:
        node: in the float model.
        weight: its plan.
        bias: the plan of its bias, ``None`` where there is none or it stays float.
        activation: the one activation function that alone reads the result.
    """

    node: ir.Node
    weight: TensorPlan
    bias: TensorPlan | None
    activation: ir.Node | None

    @property
    def name(self) -> str:
        """The node's name."""
        return name_of(self.node)

    @property
    def source(self) -> str:
        """The tensor it reads in the float model."""
        return input_name(self.node, 0)

    @property
    def target(self) -> str:
        """The tensor whose values are to be met."""
        return str((self.activation or self.node).outputs[0].name)

    def constant(self, position: int) -> np.ndarray | None:
        """The float values of a constant input; read only."""
        return constant_array(input_at(self.node, position))


def tunable_layers(
    model: ir.Model, plan: Plan, op_types: Collection[str], names: Sequence[str] = ()
) -> tuple[list[Tunable], list[str]]:
    """Layers of these types in graph order, and one sentence for every other one that looked like one.

    Args:
        names: names or ^patterns of the only layers that are wanted; empty: all.

    Raises:
        ConfigError: a name that no node has.
    """
    found, refused, wanted = [], [], named(model, names)
    for node in model.graph:
        if wanted is not None and node.name not in wanted:
            continue
        if node.op_type not in op_types or node.domain not in ("", "ai.onnx"):
            refused += [] if wanted is None else [f"{label(node)} stays: it is a {node.op_type}"]
            continue
        layer = _layer(node, plan)
        if isinstance(layer, str):
            refused.append(f"{label(node)} stays: {layer}")
        else:
            found.append(layer)
    return found, refused


def named(model: ir.Model, names: Sequence[str]) -> set[str] | None:
    """The nodes that names or ^patterns mean, or None where there are none.

    Raises:
        ConfigError: a name that no node has.
    """
    if not names:
        return None
    infos = [NodeInfo(name_of(node), node.op_type) for node in model.graph]
    rules = Rules(LayerSpec(), (Rule(tuple(names), None, "layers"),))
    return {name for name, decision in rules.bind(infos).items() if decision.layer is None}


def _layer(node: ir.Node, plan: Plan) -> Tunable | str:
    value, bias = input_at(node, 1), input_at(node, 2)
    weight = None if value is None else plan.tensors.get(str(value.name))
    if value is None or weight is None or weight.role == "activation" or not is_constant(value):
        return "it has no quantized constant weight"
    if len(value.uses()) > 1:
        return "its weight is shared with other nodes"
    if bias is not None and not is_constant(bias):
        return "its bias is computed"
    return Tunable(node, weight, None if bias is None else plan.tensors.get(str(bias.name)), _activation(node))


def _activation(node: ir.Node) -> ir.Node | None:
    reader = sole_consumer(node.outputs[0])
    fits = reader is not None and reader.op_type in ACTIVATIONS and reader.inputs[0] is node.outputs[0]
    return reader if fits and reader is not None and not node.outputs[0].is_graph_output() else None
