"""What each layer of a graph owns under every candidate, and what that costs.

A layer owns its weights, its biases and what it reads; what it makes belongs to the layers that read it, and to it only
where no quantized layer does. So the units of all layers together hold every quantized tensor once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.config.plan import Plan, TensorPlan
from quark.dataclass import dataclass
from quark.ir.surgery import name_of
from quark.onnx.fingerprint import of_arrays
from quark.onnx.graph.run import Feed, Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.graph.shapes import static_shape
from quark.onnx.qdq.op_rules import GENERIC, OP_RULES
from quark.onnx.quantization.config.tuners import split
from quark.search.trials import TriedLayer
from quark.search.values import FLOAT

#: Bits of a value that is not quantized.
FLOAT_BITS = 32
Tensors = tuple[TensorPlan, ...]


@dataclass(frozen=True)
class Unit(TriedLayer):
    """A layer, and what becomes of its tensors under every candidate that fits it."""

    tensors: Mapping[str, Tensors]

    def digest(self, candidate: str) -> bytes:
        """Equal where two candidates make the same of a layer (an addition has no weights that could differ)."""
        arrays: dict[str, np.ndarray] = {}
        for tensor in self.tensors[candidate]:
            spec = tensor.spec
            what = f"{split(candidate)[1]} {self.name} {tensor.name} {spec.grid} {spec.granularity} {spec.rounding}"
            arrays |= {f"{what} scale": np.asarray(tensor.scale), f"{what} zero": np.asarray(tensor.zero_point)}
        return of_arrays(arrays)


def units_of(
    model: ir.Model, plans: Mapping[str, Plan], names: Sequence[str], sizes: Mapping[str, int], place: str = ""
) -> Iterator[Unit]:
    """The layers and what each of them owns; ``place``: what the names of a body's layers begin with."""
    owned = {name: _owned(model, plan) for name, plan in plans.items()}
    for node in model.graph:
        name = name_of(node)
        tensors = {key: found[name] for key, found in owned.items() if found.get(name)}
        if not tensors:
            continue
        tensors = {key: () if key == FLOAT else tensors[key] for key in names if key == FLOAT or key in tensors}
        kept = {tensor.name for found in tensors.values() for tensor in found}
        made = [value for value in node.outputs if value.name in kept]
        costs = {key: _costs([*node.inputs, *made], found, sizes) for key, found in tensors.items()}
        yield Unit(place + name, node.op_type, costs, tensors)


def _owned(model: ir.Model, plan: Plan) -> dict[str, Tensors]:
    """The tensors of every layer that computes: its constants, what it reads, and what it makes for nobody else.

    Layers that the configuration names in ``layers`` are decided already and left out.
    """
    computing = [node for node in model.graph if _computes(node, plan)]
    pinned = {name for name, decision in plan.nodes.items() if decision.reason.startswith("layers: ")}
    groups = {tensor.name: tensor.group for tensor in plan.of_role("activation")}
    read = {groups[t.name] for node in computing for t in _inputs(node, plan)}
    found = {}
    for node in computing:
        mine = frozenset([name_of(node)])
        constants = [t for t in plan.of_role("weight", "bias") if name_of(node) in (t.readers or ())]
        inputs = [replace(t, group=t.name) for t in _inputs(node, plan)]
        made = [plan.tensors[name_of(value)] for value in node.outputs if name_of(value) in groups]
        last = [replace(t, group=t.name) for t in made if t.group not in read]
        if node.name in pinned:
            continue
        found[name_of(node)] = (*(replace(t, readers=mine) for t in (*constants, *inputs)), *last)
    return found


def _computes(node: ir.Node, plan: Plan) -> bool:
    decision = plan.nodes.get(name_of(node))
    return decision is not None and decision.quantized and OP_RULES.get(node.op_type, GENERIC).output != "same"


def _inputs(node: ir.Node, plan: Plan) -> list[TensorPlan]:
    """The activations that a node reads quantized, each once."""
    names = dict.fromkeys(name_of(value) for value in node.inputs if value is not None)
    found = [plan.tensors[name] for name in names if name in plan.tensors]
    mine = name_of(node)
    return [t for t in found if t.role == "activation" and (t.readers is None or mine in t.readers)]


def _costs(values: Sequence[ir.Value | None], tensors: Tensors, sizes: Mapping[str, int]) -> dict[str, float]:
    """Bits of all values of a layer, and bytes of its float constants; those of quantized ones a trial tells."""
    by_name = {tensor.name: tensor for tensor in tensors}
    size = bits = 0.0
    for value in {value.name: value for value in values if value is not None}.values():
        name, tensor = name_of(value), by_name.get(name_of(value))
        source = value.const_value
        if not is_float(value):
            continue
        size += 0 if source is None else source.nbytes
        width = float(tensor.spec.row.bits) if tensor is not None else FLOAT_BITS
        bits += width * (sizes.get(name, 1) if source is None else source.size)
    return {"size": float(size), "bits": bits}


def sizes_of(model: ir.Model, feed: Feed, options: Options) -> dict[str, int]:
    """Elements of every activation; where shapes are not known they are those of the sample."""
    operands = [value for node in model.graph for value in (*node.inputs, *node.outputs)]
    values = [value for value in operands if value is not None and value.const_value is None]
    found = {name_of(value): prod(shape) for value in values if (shape := static_shape(value)) is not None}
    unknown = [value.name for value in values if value.name and value.name not in found and is_float(value)]
    if unknown:
        runner = Runner(model, unknown, (), Runtime.of(options))
        found |= {name: array.size for name, array in runner.run(feed).values.items()}
    return found


def is_float(value: ir.Value) -> bool:
    """Whether a value holds numbers that may be quantized."""
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)
