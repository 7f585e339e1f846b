"""``EnableDualQuantNodePairs``: two pairs of quantization nodes at a tensor between two precisions.

Where a later entry of the configuration gives a node another type, the tensor that it shares with its neighbours has
one type, and one of the two nodes reads or writes a type that is not its own. With two pairs

    producer → pair of the producer's type → pair of the reader's type → reader

each node has its own type on both sides. A graph input (or what a float node makes) belongs to no quantized producer:
its readers of another type get a pair beside the first one instead of behind it. Readers of one type share a pair.

A node next to a tensor that ``TensorQuantOverrides`` gives a type takes that type on all its sides. Layout operators
have the type of what they move. Constants are quantized for each reader anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

import onnx_ir as ir

from quark.config.job import Job
from quark.config.overrides import Override, parse_overrides
from quark.config.plan import Plan, TensorPlan
from quark.config.rules import Decision
from quark.config.tensor import LayerSpec, TensorSpec
from quark.dataclass import dataclass
from quark.ir.surgery import name_of
from quark.onnx.qdq.block_axes import in_blocks
from quark.onnx.qdq.op_rules import GENERIC, OP_RULES, UNSIGNED_OF
from quark.onnx.qdq.second_type import hand_over, insert

OPTION = "EnableDualQuantNodePairs"
_SIGNED = {unsigned: signed for signed, unsigned in UNSIGNED_OF.items() if unsigned != signed}


@dataclass
class Boundaries:
    """A Plan, and the second pairs made so far: by tensor and type."""

    model: ir.Model
    plan: Plan
    overrides: Mapping[str, Override]
    unsigned: bool
    made: dict[tuple[str, str], ir.Value] = field(default_factory=dict)

    def format_of(self, tensor: TensorPlan) -> str:
        """The type that a tensor will have."""
        told = self.overrides.get(tensor.name)
        return tensor.spec.format if told is None or told.format is None else told.format

    def differ(self, one: str, other: str) -> bool:
        """Whether two types are two precisions (under ``UseUnsignedReLU`` a sign makes none)."""
        forms = [_SIGNED.get(name, name) if self.unsigned else name for name in (one, other)]
        return forms[0] != forms[1]


def pair_boundaries(model: ir.Model, plan: Plan, job: Job, decisions: Mapping[str, Decision]) -> None:
    """Give every quantized node the type of its own entry on all sides, in graph order."""
    if not job.options.EnableDualQuantNodePairs:
        return
    overrides = parse_overrides(job.options.TensorQuantOverrides)
    at = Boundaries(model, plan, overrides, job.options.UseUnsignedReLU)
    for node in list(model.graph):
        name = name_of(node)
        layer = decisions[name].layer
        if layer is None or layer.inputs is None or not plan.nodes[name].quantized:
            continue
        own = _own(node, layer, at)
        for value in dict.fromkeys(value for value in node.inputs if value is not None):
            _settle_input(node, value, own, at)
        for value in node.outputs:
            _settle_output(node, value, own, at)
    for name, tensor in list(plan.tensors.items()):
        if tensor.readers is not None and not tensor.readers:
            del plan.tensors[name]


def _own(node: ir.Node, layer: LayerSpec, at: Boundaries) -> LayerSpec:
    """The specs of a node: its entry's, those of a tensor beside it that was told a type, or of what it moves."""
    found = [at.plan.tensors.get(name_of(value)) for value in (*node.inputs, *node.outputs) if value is not None]
    beside = [tensor for tensor in found if tensor is not None and tensor.role == "activation"]
    told = next((tensor for tensor in beside if at.format_of(tensor) != tensor.spec.format), None)
    if told is not None:
        override = at.overrides[told.name]
        symmetric = told.spec.symmetric if override.symmetric is None else override.symmetric
        spec = replace(told.spec, format=at.format_of(told), symmetric=symmetric)
        return replace(layer, inputs=spec, outputs=spec)
    if OP_RULES.get(node.op_type, GENERIC).output == "same" and beside:
        return replace(layer, inputs=beside[0].spec, outputs=beside[0].spec)
    return layer


def _settle_input(node: ir.Node, value: ir.Value, own: LayerSpec, at: Boundaries) -> None:
    """A pair of the node's own type before it, where the tensor has another."""
    tensor, name = at.plan.tensors.get(name_of(value)), name_of(node)
    read = tensor is not None and (tensor.readers is None or name in tensor.readers)
    if tensor is None or own.inputs is None or tensor.role != "activation" or not read:
        return
    if not at.differ(at.format_of(tensor), own.inputs.format):
        return
    key = (tensor.name, own.inputs.format)
    reason = f"{OPTION}: {node.op_type} {name!r} reads {tensor.name!r} in its own type"
    if tensor.readers == frozenset([name]) and key not in at.made:  # the last reader of the first pair takes it over
        at.plan.put(replace(tensor, spec=in_blocks(own.inputs, value), reason=reason))
        return
    if tensor.readers is not None:
        at.plan.put(replace(tensor, readers=tensor.readers - {name}))
    if key in at.made:
        hand_over(at.plan, value, at.made[key], [node])
        return
    number = sum(known == tensor.name for known, _ in at.made)
    copy = insert(at.model, at.plan, value, f"{value.name}_additional{number or ''}", [node])
    at.made[key] = copy
    at.plan.put(_second(tensor, copy, own.inputs, reason))


def _second(tensor: TensorPlan, copy: ir.Value, spec: TensorSpec, reason: str) -> TensorPlan:
    """The decision about the second pair; a range known without data holds for both."""
    name = name_of(copy)
    return TensorPlan(name, "activation", in_blocks(spec, copy), reason, name, fixed_range=tensor.fixed_range)


def _settle_output(node: ir.Node, value: ir.Value, own: LayerSpec, at: Boundaries) -> None:
    """The node writes its own type; readers of another type find their own pair later."""
    tensor = at.plan.tensors.get(name_of(value))
    if tensor is None or own.outputs is None or tensor.readers is not None:
        return
    if at.differ(at.format_of(tensor), own.outputs.format):
        reason = f"{OPTION}: {node.op_type} {node.name!r} writes its own type"
        at.plan.put(replace(tensor, spec=in_blocks(own.outputs, value), reason=reason))
