"""Tensors that must have one scale: the members of a group take the union of their ranges.

What only moves values shares its scale anyway; here it does so even where a later entry of the configuration gives its
readers another range.

NPU flows align positions instead, among the other rules of the device (``quark.onnx.npu.rules``): what one rule moves
another may have to align again.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.ir.surgery import name_of
from quark.numerics.granularity import Tensor

#: operator -> the option that aligns it.
_SWITCH = {
    "Concat": "AlignConcat",
    "MaxPool": "AlignPool",
    "AveragePool": "AlignPool",
    "GlobalAveragePool": "AlignPool",
    "Pad": "AlignPad",
    "Slice": "AlignSlice",
    "Transpose": "AlignTranspose",
    "Reshape": "AlignReshape",
}


def align(model: ir.Model, plan: Plan, job: Job) -> None:
    """Put the inputs and outputs of aligned operators into one group each."""
    if job.npu or not job.options.NPULimitationCheck:
        return
    groups = _Groups(plan)
    for node in model.graph:
        if node.op_type not in _SWITCH or not getattr(job.options, _SWITCH[node.op_type]):
            continue
        data = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        values = [value for value in (*data, *node.outputs) if value is not None and value.name in plan.tensors]
        groups.join([name_of(value) for value in values])
    groups.write()


class _Groups:
    """Groups that grow, written to the plan once: every join costs its own tensors, whatever the size of the groups."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._into: dict[str, str] = {}
        self._specs: dict[str, TensorSpec] = {}

    def join(self, names: list[str]) -> None:
        """One group for these activations and everything already grouped with them; the first one's quantization."""
        activations = [self._plan.tensors[name] for name in names if self._plan.tensors[name].role == "activation"]
        specs = [self._spec(tensor) for tensor in activations]
        if len(activations) < 2 or len({replace(spec, method="minmax") for spec in specs}) > 1:
            return
        root = self._root(activations[0].group)
        for tensor in activations:
            group = self._root(tensor.group)
            if group != root:
                self._into[group] = root
        self._specs[root] = specs[0]

    def write(self) -> None:
        """Every tensor gets the group that its own one has become."""
        for name, tensor in self._plan.tensors.items():
            root = self._root(tensor.group)
            if tensor.role == "activation" and root in self._specs:
                self._plan.tensors[name] = replace(tensor, group=root, spec=self._specs[root])

    def _root(self, group: str) -> str:
        path = []
        while group in self._into:
            path.append(group)
            group = self._into[group]
        self._into.update(dict.fromkeys(path, group))
        return group

    def _spec(self, tensor: TensorPlan) -> TensorSpec:
        return self._specs.get(self._root(tensor.group), tensor.spec)


def _split_groups(plan: Plan) -> None:
    """Members of a group that a later entry of the configuration gave another spec form a group of their own."""
    for members in plan.groups().values():
        first: dict[TensorSpec, str] = {}
        for member in members:
            first.setdefault(replace(member.spec, granularity=Tensor()), member.name)
        for member in members if len(first) > 1 else ():
            root = first[replace(member.spec, granularity=Tensor())]
            plan.put(replace(member, group=root, observed=member.observed or member.name == root))


def settle(plan: Plan) -> None:
    """What leaving tensors out has cut loose: groups without a range of their own."""
    _split_groups(plan)
    for name, members in plan.groups().items():
        if not any(member.observed for member in members):
            plan.put(replace(members[0], observed=True))
        if name not in plan.tensors:
            for member in members:
                plan.put(replace(plan.tensors[member.name], group=members[0].name))
