"""Placement: decide which tensors are quantized, with which spec, by which rule, and write it into a Plan.

Nothing in the graph changes here. Nodes are looked at in three rounds: operators that compute (their inputs, weights,
outputs), then layout operators in topological order (they take part when their input does, and share its parameters),
then the tensors that must stay float between fused operators are taken out again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import partial

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import NodePlan, Plan, TensorPlan
from quark.config.rules import Decision, NodeInfo
from quark.config.tensor import LayerSpec, TensorSpec
from quark.dataclass import dataclass
from quark.errors import check_name
from quark.ir.surgery import clip_bounds, is_constant, name_of, own_copy
from quark.ir.walk import bodies
from quark.numerics.formats import Int, get_format
from quark.numerics.granularity import Channel, Granularity, Group, Tensor
from quark.onnx.bodies import outside
from quark.onnx.qdq import (
    align,
    biases,
    block_axes,
    dual_pairs,
    empty,
    fuse,
    isolated,
    masks,
    outputs,
    overrides,
    own_inputs,
    passthrough,
    recurrent,
    selection,
    slots,
    slower,
    tables,
    weights_alone,
)
from quark.onnx.qdq.angles import NoData
from quark.onnx.qdq.block_axes import in_blocks, is_scalar
from quark.onnx.qdq.channel_axes import FUSED_INTEGERS, weight_axes
from quark.onnx.qdq.decoding import REASON as DECODES
from quark.onnx.qdq.decoding import decoding_nodes, proposals
from quark.onnx.qdq.divisors import makes_divisors
from quark.onnx.qdq.floats import note_floats
from quark.onnx.qdq.node_kinds import block_size
from quark.onnx.qdq.op_rules import DIVISORS, GENERIC, NON_NEGATIVE, OP_RULES, UNSIGNED_OF, OpRule


@dataclass
class Placement:
    """The state of one placement: the model, the job, the decision per node, and the Plan that grows."""

    model: ir.Model
    job: Job
    decisions: Mapping[str, Decision]
    plan: Plan = field(default_factory=Plan)
    no_data: NoData = field(default_factory=NoData)
    empty: set[ir.Node] = field(default_factory=set)
    dividing: set[ir.Node] = field(default_factory=set)
    decoding: set[ir.Node] = field(default_factory=set)
    masking: set[ir.Node] = field(default_factory=set)
    masked: set[ir.Value] = field(default_factory=set)
    ranks: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    apart: list[own_inputs.Apart] = field(default_factory=list)

    def add(
        self,
        value: ir.Value,
        spec: TensorSpec,
        reason: str,
        rank: int,
        reader: ir.Node | None = None,
        fixed: tuple[float, float] | None = None,
    ) -> None:
        """Record an activation as quantized; a second request adds a reader, its producer's makes every reader read it.

        The spec is that of the highest rank: later entries of the configuration win at tensors that nodes share.
        """
        name, plan = name_of(value), self.plan
        spec = in_blocks(spec, value)
        readers = frozenset([name_of(reader)]) if reader is not None else None
        known = plan.tensors.get(name)
        if known is None:
            plan.tensors[name] = TensorPlan(name, "activation", spec, reason, name, readers=readers, fixed_range=fixed)
            self.ranks[name] = rank
            return
        merged = None if readers is None or known.readers is None else known.readers | readers
        later = rank > self.ranks[name]
        self.ranks[name] = max(rank, self.ranks[name])
        plan.tensors[name] = replace(
            known,
            readers=merged,
            fixed_range=known.fixed_range if fixed is None else fixed,
            spec=spec if later else known.spec,
            reason=reason if later else known.reason,
        )


def place(model: ir.Model, job: Job, before: Sequence[NodeInfo] = ()) -> Plan:
    """The Plan of a prepared model: every decision but the ranges.

    Args:
        model: after the graph passes.
        job: what the user wants.
        before: the nodes before the graph passes, whose names the user may know (``selection.known_nodes``).

    Raises:
        ConfigError: a name or pattern of the configuration matches nothing.
    """
    nodes, decisions = list(model.graph), selection.bound(model, job, before)
    placement = Placement(model, job, decisions, no_data=NoData.of(model), dividing=makes_divisors(model))
    placement.masking, placement.masked = masks.masked_tensors(model, placement.no_data.nodes)
    placement.masked |= placement.no_data.tensors
    placement.empty = empty.may_be_empty(model)
    spared = job.options.FloatDecoding
    placement.decoding = decoding_nodes(model) if spared or (spared is None and _suits_cpu(job, None)) else set()
    chosen = {node: _consider(node, placement) for node in nodes}
    _leave_isolated(chosen, placement)
    _leave_slower(chosen, placement)
    placement.plan.proposals += proposals(model, {name_of(node) for node, found in chosen.items() if found})
    for node, (rule, layer) in _with_rules(chosen):
        if rule.output != "same":
            _quantize_node(node, rule, layer, placement)
    _carry_outputs(placement)
    for node, (rule, layer) in _with_rules(chosen):
        if rule.output == "same":
            _pass_through(node, layer, placement)
    recurrent.store_weights(model, placement.plan, job, decisions, _suits_cpu(job, job.options.DynamicLSTM))
    weights_alone.store_weights(model, placement.plan, decisions, partial(_for_weight, job=job))
    left = {*placement.no_data.nodes} | placement.decoding | placement.masking
    tables.store_tables(model, placement.plan, job, decisions, left)
    own_inputs.separate(model, placement.plan, placement.apart)
    _leave_outputs(placement)
    _feed_float(placement)
    outputs.leave_float(model, placement.plan, job)
    outputs.leave_ordered(model, placement.plan, job)
    fuse.drop_fused(model, placement.plan, job)
    if _suits_cpu(job, job.options.BiasBehindMatMul):
        biases.join_added(model, placement.plan, job)
    fuse.drop_before_moves(model, placement.plan)
    outputs.leave_inputs(model, placement.plan, {name for name, found in decisions.items() if found.inputs})
    dual_pairs.pair_boundaries(model, placement.plan, job, decisions)
    align.align(model, placement.plan, job)
    passthrough.pass_through(model, placement.plan, job.options.CalibPassthroughOpTypes)
    overrides.override(model, placement.plan, job.options)
    block_axes.refine(model, placement.plan, job)
    align.settle(placement.plan)
    biases.refit(model, placement.plan)
    note_floats(model, placement.plan)
    return placement.plan


def _with_rules(
    chosen: Mapping[ir.Node, tuple[OpRule, LayerSpec] | None],
) -> list[tuple[ir.Node, tuple[OpRule, LayerSpec]]]:
    return [(node, entry) for node, entry in chosen.items() if entry is not None]


def _leave_isolated(chosen: dict[ir.Node, tuple[OpRule, LayerSpec] | None], placement: Placement) -> None:
    """Take out the cheap nodes between float ones, but for those that the user asked for."""
    if placement.job.options.QuantizeAllOpTypes:
        return
    for node in isolated.isolated_nodes(node for node, entry in chosen.items() if entry is not None):
        if not _asked_for(node, placement):
            _leave(node, isolated.REASON, chosen, placement)


def _leave_slower(chosen: dict[ir.Node, tuple[OpRule, LayerSpec] | None], placement: Placement) -> None:
    """Take out the nodes that the CPU runs faster in float, but for those that the user asked for."""
    job = placement.job
    if job.options.TunedFloat is not None:
        _leave_tuned(job.options.TunedFloat, chosen, placement)
        return
    if not _suits_cpu(job, job.options.FloatWhereFaster):
        return
    nodes = [node for node, entry in chosen.items() if entry is not None]
    asked = {one for one in nodes if _asked_for(one, placement)}
    beside = any(node.op_type in recurrent.RECURRENT for node in placement.model.graph)
    for node in slower.faster_in_float(placement.model, nodes, asked, beside=beside):
        _leave(node, slower.REASON, chosen, placement)


def _leave_tuned(
    names: Sequence[str], chosen: dict[ir.Node, tuple[OpRule, LayerSpec] | None], placement: Placement
) -> None:
    """Take out the nodes that an earlier run with ``TuneSpeed`` left in float."""
    nodes = {name_of(node): node for node in placement.model.graph}
    for name in outside(placement.model, names):
        check_name("node in TunedFloat", name, nodes)
        if chosen.get(nodes[name]) is not None and not _asked_for(nodes[name], placement):
            _leave(nodes[name], slower.TUNED, chosen, placement)


def _asked_for(node: ir.Node, placement: Placement) -> bool:
    """Whether the configuration names the node, its operator type or an entry for it."""
    options = placement.job.options
    named = {*options.NodesToQuantize, *options.OpTypesToQuantize, *options.ExtraOpTypesToQuantize}
    everything = options.QuantizeAllOpTypes or placement.decisions[name_of(node)].rank > 0
    return everything or bool(named & {node.name, node.op_type})


def _leave(
    node: ir.Node, reason: str, chosen: dict[ir.Node, tuple[OpRule, LayerSpec] | None], placement: Placement
) -> None:
    chosen[node] = None
    placement.plan.leave_node(name_of(node), reason)


def _consider(node: ir.Node, placement: Placement) -> tuple[OpRule, LayerSpec] | None:
    """The rule and the specs of a node that is to be quantized; ``None``, the reason noted, for one that is not."""
    reason = _why_float(node, placement)
    decision = placement.decisions[name_of(node)]
    if reason is not None or decision.layer is None:
        placement.plan.nodes[name_of(node)] = NodePlan(name_of(node), node.op_type, False, reason or decision.reason)
        return None
    placement.plan.nodes[name_of(node)] = NodePlan(name_of(node), node.op_type, True, decision.reason)
    return OP_RULES.get(node.op_type, GENERIC), decision.layer


def _why_float(node: ir.Node, placement: Placement) -> str | None:
    """The reason why a node stays float, or ``None``."""
    options = placement.job.options
    if placement.decisions[name_of(node)].layer is None:
        return placement.decisions[name_of(node)].reason
    if node.domain not in ("", "ai.onnx") or bodies(node):
        return f"no rule for the operator {node.domain or 'ai.onnx'}::{node.op_type}"
    if slots.STAYS_FLOAT in node.meta:
        return str(node.meta[slots.STAYS_FLOAT])
    if options.NodesToQuantize and node.name not in options.NodesToQuantize:
        return "NodesToQuantize does not name it"
    if not _in_op_set(node.op_type, placement.job):
        return f"{node.op_type} is not among the operator types to quantize"
    if node in placement.no_data.nodes:
        return placement.no_data.nodes[node]
    if node in placement.empty:
        return empty.REASON
    if node in placement.decoding:
        return DECODES
    if node in placement.dividing or DIVISORS.get(node.op_type) == 0:  # a Log itself: what it reads is float
        return "something is divided by its result, or its logarithm taken, or it divides exponentials: never 0"
    rule = OP_RULES.get(node.op_type, GENERIC)
    if not slots.data_inputs(node, rule) and slots.weight_input(node, rule) is None:
        return slots.in_float64(node) or "it reads no float tensor"
    if node.op_type == "MatMul" and _const_b_only(placement.job) and slots.weight_input(node, rule) is None:
        return "MatMulConstBOnly: its second input is not constant"
    if node in placement.masking:
        return "it carries an attention mask or padding: a scale that covers it would leave the values no resolution"
    return None


def _in_op_set(op_type: str, job: Job) -> bool:
    options, rule = job.options, OP_RULES.get(op_type)
    if options.QuantizeAllOpTypes or op_type in options.ExtraOpTypesToQuantize:
        return True
    if options.OpTypesToQuantize:
        return op_type in options.OpTypesToQuantize
    if options.EnableNPUTransformer:
        return op_type in ("Gemm", "MatMul")
    if rule is None:
        return False
    extended = job.npu or not _in_eight_bits(job)
    return rule.op_set == "base" or (rule.op_set == "extended" and extended)


def _const_b_only(job: Job) -> bool:
    wanted = job.options.MatMulConstBOnly
    return job.options.EnableNPUTransformer if wanted is None else wanted


def _suits_cpu(job: Job, wanted: bool | None) -> bool:
    """Whether an option for kernels of 8 bits holds, which is on by default (None) for the CPU target."""
    return (job.target == "cpu" if wanted is None else wanted) and _in_eight_bits(job) and not job.options.WeightsOnly


def _in_eight_bits(job: Job) -> bool:
    specs = (job.rules.default.inputs, job.rules.default.weight)
    rows = [get_format(spec.format) for spec in specs if spec is not None]
    return all(isinstance(row, Int) and row.bits == 8 for row in rows)


# ---- one node --------------------------------------------------------------------------------------------------------


def _quantize_node(node: ir.Node, rule: OpRule, layer: LayerSpec, placement: Placement) -> None:
    reason = f"{placement.plan.nodes[name_of(node)].reason}: {node.op_type} {node.name!r}"
    decision = placement.decisions[name_of(node)]
    weight = slots.weight_input(node, rule)
    if weight is not None and layer.weight is not None:
        _add_constant(node, weight, _for_weight(layer.weight, node, rule, weight, placement.job), reason, placement)
    for position in rule.parameters:
        value = node.inputs[position] if position < len(node.inputs) else None
        if is_constant(value) and slots.is_float(value) and layer.weight is not None and value is not None:
            _add_constant(node, value, in_blocks(replace(layer.weight, granularity=Tensor()), value), reason, placement)
    if layer.inputs is None or placement.job.options.WeightsOnly:
        return
    for value in slots.data_inputs(node, rule):
        if is_constant(value):
            _add_constant(node, value, in_blocks(_for_operand(layer, placement.job), value), reason, placement)
        elif decision.own_inputs and len(value.uses()) > 1:
            placement.apart.append(own_inputs.Apart(node, value, layer.inputs, reason))
        else:
            placement.add(value, layer.inputs, reason, decision.rank_of("inputs"), reader=node)
    for value in node.outputs:
        if (
            rule.output == "own"
            and slots.is_float(value)
            and layer.outputs is not None
            and value not in placement.masked
        ):
            spec = _for_output(layer.outputs, node, placement.job)
            known = None if placement.job.options.MeasureSoftmax else rule.fixed_range
            fixed = value.meta.get(slots.KNOWN_RANGE, known)
            placement.add(value, spec, reason, decision.rank_of("outputs"), fixed=fixed)
    _add_bias(node, rule, layer, reason, placement)


def _carry_outputs(placement: Placement) -> None:
    """Where a layer is one kernel with the activation function behind it, what its entry of the configuration says
    about its outputs holds for the result of both: the tensor between them is float."""
    for node in placement.model.graph:
        producer = fuse.fused_producer(node, placement.plan, placement.job)
        if producer is None or node.outputs[0].name not in placement.plan.tensors:
            continue
        decision = placement.decisions[name_of(producer)]
        if decision.outputs and decision.layer is not None and decision.layer.outputs is not None:
            spec = _for_output(decision.layer.outputs, node, placement.job)
            reason = f"{decision.reason}: {producer.op_type} {producer.name!r} with {node.op_type} {node.name!r}"
            placement.add(node.outputs[0], spec, reason, decision.rank)


def _for_weight(spec: TensorSpec, node: ir.Node, rule: OpRule, weight: ir.Value, job: Job) -> TensorSpec:
    """The weight's spec with the axes that this operator has; a tensor of rank 1 has no channels."""
    rank = len(weight.shape or ())
    channel, reduce = weight_axes(node, rule)
    size = block_size(spec)
    if size is not None:
        return replace(spec, granularity=Group(reduce % max(rank, 1), size))
    if rank < 2 or isinstance(spec.granularity, Tensor):
        return replace(spec, granularity=Tensor())
    granularity: Granularity = spec.granularity
    if isinstance(granularity, Channel) and node.op_type == "MatMul" and rank > 2 and spec.format in FUSED_INTEGERS:
        granularity = Tensor()
    elif isinstance(granularity, Channel):
        granularity = Channel(selection.channel_axis(job.options, node, rank, channel))
    elif isinstance(granularity, Group):
        granularity = Group(reduce % rank, granularity.size)
    return replace(spec, granularity=granularity)


def _for_operand(layer: LayerSpec, job: Job) -> TensorSpec:
    """The spec of a constant operand of Add, Mul, …: that of the activation beside it, searched on its own values.

    Kernels want one type for both operands, and 8-bit constants beside 16-bit activations would undo their precision.
    """
    spec = layer.inputs or TensorSpec()
    if layer.weight is not None and not job.options.AlignEltwiseQuantType:
        spec = replace(layer.weight, granularity=Tensor())
    method = "mse" if spec.scale_rule == "power_of_two" else "minmax"
    return replace(spec, method=method, settings=spec.settings if method == spec.method else ())


def _for_output(spec: TensorSpec, node: ir.Node, job: Job) -> TensorSpec:
    """The output's spec; results that are never negative take the whole unsigned range where that is asked for."""
    clipped = node.op_type == "Relu" or (node.op_type == "Clip" and (clip_bounds(node) or (None,))[0] == 0.0)
    positive = clipped or (job.target == "cpu" and node.op_type in NON_NEGATIVE)
    if positive and job.options.UseUnsignedReLU and spec.symmetric and spec.format in UNSIGNED_OF:
        return replace(spec, format=UNSIGNED_OF[spec.format], symmetric=False)
    return spec


def _add_constant(node: ir.Node, value: ir.Value, spec: TensorSpec, reason: str, placement: Placement) -> None:
    """Record a constant; one that another node already uses with another spec gets a copy of its own."""
    plan, name = placement.plan, name_of(value)
    if block_size(spec) is not None and is_scalar(value):
        return
    known = plan.tensors.get(name)
    if known is not None and known.spec != spec:
        name = own_copy(node, value, placement.model)
        known = None
    if known is None:
        plan.tensors[name] = TensorPlan(name, "weight", spec, reason, name, readers=frozenset([name_of(node)]))
    else:
        plan.put(replace(known, readers=(known.readers or frozenset()) | {name_of(node)}))


def _add_bias(node: ir.Node, rule: OpRule, layer: LayerSpec, reason: str, placement: Placement) -> None:
    bias, options = slots.bias_input(node, rule), placement.job.options
    data = node.inputs[0]
    if bias is None or data is None or not options.QuantizeBias or layer.weight is None:
        return
    own = layer.bias or (layer.weight if biases.like_weight(layer.weight, placement.job) else None)
    rescaled = own is not None and own.row.onnx_type == "INT32" and options.AdjustBiasScale
    scale_tensor = biases.shared_scale(node, layer, bias, placement.plan) if own is None or rescaled else None
    if own is not None and scale_tensor is None:
        _add_constant(node, bias, in_blocks(replace(own, granularity=Tensor()), bias), reason, placement)
    if scale_tensor is None:
        return
    granularity = placement.plan.tensors[name_of(scale_tensor)].spec.granularity
    if name_of(bias) in placement.plan.tensors:
        bias_name = own_copy(node, bias, placement.model)
    else:
        bias_name = name_of(bias)
    spec = TensorSpec(format="int16" if options.Int16Bias else "int32", granularity=granularity)
    placement.plan.tensors[bias_name] = TensorPlan(
        bias_name,
        "bias",
        spec,
        reason,
        bias_name,
        readers=frozenset([name_of(node)]),
        bias_of=(name_of(data), name_of(scale_tensor)),
    )


# ---- layout operators and outputs ------------------------------------------------------------------------------------


def _pass_through(node: ir.Node, layer: LayerSpec, placement: Placement) -> None:
    """A layout operator takes part when its input does (or when forced); its outputs share the input's parameters."""
    plan, name = placement.plan, name_of(node)
    source = node.inputs[0]
    if source is None or layer.inputs is None or placement.job.options.WeightsOnly:
        plan.leave_node(name, "weights only")
        return
    left = "its input is constant" if is_constant(source) else slots.leaves_range(node)
    if name_of(source) not in plan.tensors and not placement.job.options.ForceQuantizeNoInputCheck:
        left = "its input is not quantized"
    if left is not None:
        plan.leave_node(name, left)
        return
    reason = f"{plan.nodes[name].reason}: {node.op_type} {name!r}"
    rank = placement.decisions[name].rank_of("inputs")
    placement.add(source, layer.inputs, reason, rank, reader=node)
    members = plan.tensors[name_of(source)]
    for value in node.outputs:
        if not slots.is_float(value) or value in placement.masked:
            continue
        moved = f"{reason} moves the values of {source.name!r}"
        asked = placement.ranks[name_of(value)]
        placement.add(value, members.spec, moved, rank)
        own = plan.tensors[name_of(value)]
        if asked <= rank or own.spec == members.spec:  # otherwise a later entry gives its reader a spec of its own
            plan.put(replace(own, group=members.group, spec=members.spec, observed=False, reason=moved))


def _leave_outputs(placement: Placement) -> None:
    """Take out the outputs that the user excludes: they stay float for every reader."""
    options = placement.job.options
    if options.EnableVaimlBF16:
        for value in placement.model.graph.outputs:
            placement.plan.leave(name_of(value), "EnableVaimlBF16 leaves results float")
    for node in placement.model.graph:
        listed = node.op_type in options.OpTypesToExcludeOutputQuantization
        if listed or node.name in options.NodesToExcludeOutputQuantization:
            option = "OpTypesToExcludeOutputQuantization" if listed else "NodesToExcludeOutputQuantization"
            for value in node.outputs:
                placement.plan.leave(name_of(value), f"{option}: {node.op_type if listed else node.name}")


def _feed_float(placement: Placement) -> None:
    """Nodes that an algorithm has added and that stay float read float values: that is what they are there for."""
    plan = placement.plan
    for value in dict.fromkeys(node.inputs[0] for node in placement.model.graph if slots.STAYS_FLOAT in node.meta):
        tensor = plan.tensors.get(name_of(value)) if value is not None else None
        if value is None or tensor is None:
            continue
        others = frozenset(name_of(use.node) for use in value.uses() if slots.STAYS_FLOAT not in use.node.meta)
        if others:
            plan.put(replace(tensor, readers=others if tensor.readers is None else tensor.readers & others))
        else:
            plan.leave(tensor.name, "only nodes that an algorithm added read it, and they compute in float")
