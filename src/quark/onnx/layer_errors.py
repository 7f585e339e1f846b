"""The error that quantizing each layer alone makes at its output, of all layers in one pass.

Every layer computes quantized from the float model's tensors, which are fed; the error is the difference to what it
made in float.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.config.plan import NodePlan, Plan
from quark.dataclass import dataclass
from quark.ir.surgery import apart, name_of
from quark.onnx.graph.run import FLOATS, Runner
from quark.onnx.injected import crossing_of, cut, fed, runtime_of
from quark.onnx.layer_runs import FloatModelFiles, OnnxLayerRuns, opened, take_over
from quark.onnx.layer_units import Unit
from quark.onnx.npu.simulate import simulate
from quark.onnx.qdq.modes import MODES
from quark.search.values import FLOAT

_ERROR = "{}__error"


@dataclass(frozen=True)
class Local:
    """The quantized layers, each alone.

    Attributes:
        model: gives the errors.
        floats: tensors of the float model that it is fed; none where they cannot be: it computes them then.
        sizes: bytes of the quantized constants by layer.
    """

    model: ir.Model
    floats: tuple[str, ...]
    sizes: Mapping[str, float]


def local_model(common: FloatModelFiles, units: Sequence[Unit], candidate: str, floats: AbstractSet[str]) -> Local:
    """Quantized copies of all layers, that read the tensors of the float model; ``floats``: those that can be fed."""
    model = apart(opened(str(common.model)))
    tuned = apart(opened(str(common.folder / common.tuned[candidate]))) if candidate in common.tuned else None
    nodes = {node.name: node for node in model.graph}
    plan = Plan({}, {})
    homes: dict[str, str] = {}
    sizes: dict[str, float] = {}
    for number, unit in enumerate(units):
        if candidate not in unit.tensors or candidate == FLOAT:
            continue
        copy = _QuantizedCopy(model, nodes[unit.name], f"__alone{number}", unit, candidate)
        if tuned is not None:
            copy.tune(tuned)
        homes |= dict.fromkeys(copy.put(plan), unit.name)
        sizes[unit.name] = copy.float_bytes()
    if common.job.npu:
        simulate(model, plan, common.job)
    made = MODES["static"].emit(model, plan, common.job.options)
    constants = {tensor.name for tensor in plan if tensor.role != "activation"}
    for key, value in made.graph.initializers.items():
        owner = max((one for one in constants if key == one or key.startswith(f"{one}_")), key=len, default=None)
        if owner is not None and value.const_value is not None:
            sizes[homes[owner]] += value.const_value.nbytes
    before = [node for node in made.graph if node.name in nodes]
    crossing = crossing_of(before)
    if crossing is None or not floats >= set(crossing):
        return Local(made, (), sizes)
    return Local(cut(made, before), crossing, sizes)


class _QuantizedCopy:
    """A copy of a layer's node, with copies of everything that its candidate quantizes."""

    def __init__(self, model: ir.Model, node: ir.Node, ending: str, unit: Unit, candidate: str) -> None:
        self.model, self.unit, self.ending = model, unit, ending
        self.tensors = {tensor.name: tensor for tensor in unit.tensors[candidate]}
        self.copies: dict[str, ir.Value] = {}
        inputs = [None if value is None else self.copied(value, node) for value in node.inputs]
        self.node = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=f"{node.name}{ending}",
        )
        model.graph.insert_after(node, self.node)
        for value, own in zip(node.outputs, self.node.outputs, strict=True):
            own.name, own.type, own.shape = f"{value.name}{ending}", value.type, value.shape
            self.copies.setdefault(name_of(value), own)
            if value.dtype in FLOATS and value.name:
                error = ir.Node("", "Sub", [own, value], name=_ERROR.format(own.name))
                error.outputs[0].name, error.outputs[0].type = _ERROR.format(value.name), value.type
                model.graph.insert_after(self.node, error)
                model.graph.outputs.append(error.outputs[0])

    def copied(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """A value of the copy's own, for those that are quantized."""
        name = name_of(value)
        if name not in self.tensors:
            return value
        if name not in self.copies:
            data = value.const_value
            self.copies[name] = self.passed(value, node) if data is None else self.constant(value, data)
        return self.copies[name]

    def constant(self, value: ir.Value, data: ir.TensorProtocol) -> ir.Value:
        """A second constant of the same data."""
        own = ir.Value(name=f"{value.name}{self.ending}", shape=value.shape, type=value.type)
        own.const_value = ir.tensor(data.numpy(), name=own.name)
        self.model.graph.register_initializer(own)
        return own

    def passed(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """A second name of an activation."""
        same = ir.Node("", "Identity", [value], name=f"{value.name}{self.ending}_same")
        own = same.outputs[0]
        own.name, own.type, own.shape = f"{value.name}{self.ending}", value.type, value.shape
        self.model.graph.insert_before(node, same)
        return own

    def tune(self, tuned: ir.Model) -> None:
        """Give the copy the weights that an algorithm of the candidate made."""
        own = [replace(one, name=name) for name, one in self.tensors.items() if one.role != "activation"]
        take_over(self.model, tuned, own, self.ending)

    def put(self, plan: Plan) -> Iterator[str]:
        """Add what is decided about the copy to a plan; the names of its tensors."""
        name = name_of(self.node)
        plan.nodes[name] = NodePlan(name, self.node.op_type, True, "alone")
        for old, tensor in self.tensors.items():
            if old not in self.copies:
                continue
            new = str(self.copies[old].name)
            plan.put(replace(tensor, name=new, group=new, readers=None))
            yield new

    def float_bytes(self) -> float:
        """Bytes of the layer's float constants that stay as they are."""
        kept = {
            value.name: value.const_value.nbytes
            for value in self.node.inputs
            if value is not None and value.const_value is not None and value.name not in self._names()
        }
        return float(sum(kept.values()))

    def _names(self) -> set[str]:
        return {str(value.name) for value in self.copies.values()}


def local_errors(
    made: OnnxLayerRuns, local: Local, candidate: str, samples: Sequence[int]
) -> Iterator[tuple[int, dict[str, dict[str, np.ndarray]]]]:
    """For these samples: (sample, {layer: {output: what quantizing this layer alone changes there}})."""
    there = {value.name for node in local.model.graph for value in node.outputs}
    names = {
        unit.name: [name for name in _outputs(made.common, unit) if _ERROR.format(name) in there]
        for unit in made.layers
        if candidate in unit.tensors
    }
    wanted = [_ERROR.format(name) for found in names.values() for name in found]
    runner = Runner(local.model, wanted, (), runtime_of(made.common))
    for number in samples:
        values = runner.run(fed(made.common, local.floats, number)).values
        yield number, {layer: {name: values[_ERROR.format(name)] for name in found} for layer, found in names.items()}


def _outputs(common: FloatModelFiles, unit: Unit) -> list[str]:
    node = next(node for node in opened(str(common.model)).graph if node.name == unit.name)
    return [str(value.name) for value in node.outputs if value.name]
