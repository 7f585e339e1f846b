"""The Plan: which tensor is quantized how, and why. The heart of the ONNX flow.

Placement writes it, calibration fills the ranges, the parameter step turns ranges into scales, emission reads it and
writes the graph once. It is plain data: it serializes to JSON and answers ``explain(tensor)``.

Tensors that must share a scale (a Reshape's input and output, the branches of an aligned Concat) form a *group*; it has
one range and one set of parameters, kept on every member so that readers need no second lookup.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, field, replace
from typing import Any, Literal, NoReturn

import numpy as np

from quark.config.tensor import TensorSpec
from quark.dataclass import dataclass
from quark.errors import ConfigError, unknown
from quark.files.ours import MARK
from quark.numerics.granularity import Block2D, Channel, Group, Tensor, Token

GRANULARITIES = {kind.__name__: kind for kind in (Tensor, Channel, Group, Block2D, Token)}
Role = Literal["activation", "weight", "bias"]


@dataclass(frozen=True)
class TensorPlan:
    """One tensor's decision.

    Attributes:
        name: tensor name in the prepared float model.
        role: activation (Q and DQ at run time), weight or bias (stored codes and DQ).
        spec: how it is quantized.
        reason: the rule that decided, in words.
        group: name of the tensor whose range this one shares (its own name when it shares with nobody).
        observed: whether its own range counts; a layout operator's output takes its group's.
        readers: nodes that read the quantized values; ``None`` means every reader.
        fixed_range: a range known without data (Softmax gives 0..1); a side that is found as ever is ``None``.
        given: scale and zero point that the user gave; nothing is searched.
        bias_of: for biases, (input tensor, weight tensor) whose scales multiply.
        range: (lo, hi) found by calibration, scalars or one per channel or group.
        scale, zero_point: the parameters; shaped by the spec's granularity.
        changes: what moved the parameters away from the range afterwards, in words.
        observer: in the torch flow the class that finds the range, of each stage, in a plan file their names; empty:
            the method says it.
    """

    name: str
    role: Role
    spec: TensorSpec
    reason: str
    group: str = ""
    observed: bool = True
    readers: frozenset[str] | None = None
    fixed_range: tuple[Any, Any] | None = None
    given: tuple[Any, Any] | None = None
    bias_of: tuple[str, str] | None = None
    range: tuple[Any, Any] | None = None
    scale: np.ndarray | None = None
    zero_point: np.ndarray | None = None
    changes: tuple[str, ...] = ()
    observer: tuple[Any, ...] = ()


@dataclass(frozen=True)
class NodePlan:
    """What happens to a node: quantized or left in float, and the reason in words."""

    name: str
    op_type: str
    quantized: bool
    reason: str


@dataclass
class Plan:
    """Every decision about a model. ``tensors`` and ``nodes`` are keyed by name, in graph order.

    ``proposals``: sentences about what the configuration could do better. ``floats``: tensors that stay float, and why.
    ``tuned``: what ``TuneSpeed`` measured, on which processor. ``preprocessing``: how pictures became samples,
    as ``preprocess.yaml`` has it; None: the samples were no pictures. ``read_from``: the quantized model that the
    plan was read off; empty: it was decided.
    """

    tensors: dict[str, TensorPlan] = field(default_factory=dict)
    nodes: dict[str, NodePlan] = field(default_factory=dict)
    proposals: list[str] = field(default_factory=list)
    floats: dict[str, str] = field(default_factory=dict)
    tuned: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] | None = None
    read_from: str = ""

    def __iter__(self) -> Iterator[TensorPlan]:
        return iter(self.tensors.values())

    def put(self, tensor: TensorPlan) -> None:
        """Record a decision, or replace the one about a tensor of the same name."""
        self.tensors[tensor.name] = tensor

    def read_by(self, node: str, tensor: TensorPlan) -> None:
        """Record a decision for one more reader; the first decision of a spec gives the reason."""
        known = self.tensors.get(tensor.name)
        if known is None:
            self.put(replace(tensor, readers=frozenset([node])))
        elif known.spec != tensor.spec:
            self.put(replace(tensor, readers=(known.readers or frozenset()) | {node}))
        elif known.readers is not None:
            self.put(replace(known, readers=known.readers | {node}))

    def leave(self, name: str, reason: str) -> None:
        """Take a tensor out: it stays float after all."""
        if self.tensors.pop(name, None) is not None:
            self.floats[name] = reason

    def leave_node(self, name: str, reason: str) -> None:
        """Take a node out: it computes in float after all."""
        self.nodes[name] = replace(self.nodes[name], quantized=False, reason=reason)

    def of_role(self, *roles: Role) -> list[TensorPlan]:
        """The decisions of these roles, in graph order."""
        return [tensor for tensor in self if tensor.role in roles]

    def groups(self) -> dict[str, list[TensorPlan]]:
        """The members of every group of activations that share one range."""
        found: dict[str, list[TensorPlan]] = {}
        for tensor in self.of_role("activation"):
            found.setdefault(tensor.group, []).append(tensor)
        return found

    def explain(self, name: str) -> str:
        """Why a tensor or node is what it is, in one line (two where a float tensor has the name of a node).

        Raises:
            ConfigError: neither a tensor nor a node of the plan has this name.
        """
        if name in self.tensors:
            tensor = self.tensors[name]
            shared = f"; shares the range of {tensor.group!r}" if tensor.group not in ("", name) else ""
            changes = "".join(f"; {change}" for change in tensor.changes)
            spec = tensor.spec.describe(tensor.given is not None)
            return f"{tensor.role} {name!r}: {spec}, because {tensor.reason}{shared}{changes}"
        if name in self.nodes:
            node = self.nodes[name]
            about = f"{node.op_type} {name!r}: {'quantized' if node.quantized else 'float'}, because {node.reason}"
            return f"{about}\n{self.explain_float(name)}" if node.quantized and name in self.floats else about
        if name in self.floats:
            return self.explain_float(name)
        raise ConfigError(unknown("tensor or node", name, [*self.tensors, *self.nodes, *self.floats]))

    def explain_float(self, name: str) -> str:
        """Why a tensor of ``floats`` stays float."""
        return f"tensor {name!r}: float, because {self.floats[name]}"

    def to_json(self) -> str:
        """The whole plan as JSON; floats round-trip exactly."""
        return json.dumps(
            {
                "by": MARK,
                "tensors": [_tensor_to_dict(t) for t in self],
                "nodes": [asdict(n) for n in self.nodes.values()],
                "proposals": self.proposals,
                "floats": self.floats,
                **({"tuned": self.tuned} if self.tuned else {}),
                **({} if self.preprocessing is None else {"preprocessing": self.preprocessing}),
                **({"read_from": self.read_from} if self.read_from else {}),
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that ``to_json`` wrote."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """The plan whose JSON this is."""
        tensors = [_tensor_from_dict(entry) for entry in data["tensors"]]
        names = [tensor.name for tensor in tensors]
        if twice := [name for name in set(names) if names.count(name) > 1] if len(set(names)) < len(names) else []:
            refuse(min(twice), "the plan has two rows of it, and a tensor has one")
        nodes = [NodePlan(**entry) for entry in data["nodes"]]
        proposals, floats = list(data.get("proposals", [])), dict(data.get("floats", {}))
        tuned = dict(data.get("tuned") or {})
        read = None if data.get("preprocessing") is None else dict(data["preprocessing"])
        seen = data.get("read_from", "")
        return cls({t.name: t for t in tensors}, {n.name: n for n in nodes}, proposals, floats, tuned, read, seen)


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def _tensor_to_dict(tensor: TensorPlan) -> dict[str, Any]:
    entry = {key: getattr(tensor, key) for key in tensor.__dataclass_fields__}
    entry["spec"] = _spec_to_dict(tensor.spec)
    entry["readers"] = None if tensor.readers is None else sorted(tensor.readers)
    entry["changes"] = list(tensor.changes)
    entry["observer"] = [getattr(one, "__name__", one) for one in tensor.observer]
    for key in ("range", "given"):
        entry[key] = None if entry[key] is None else [_listed(side) for side in entry[key]]
    for key in ("scale", "zero_point"):
        entry[key] = _listed(entry[key])
    return entry


def _spec_to_dict(spec: TensorSpec) -> dict[str, Any]:
    """Plain values; a second stage only where there is one."""
    entry = {**vars(spec), "granularity": {"kind": type(spec.granularity).__name__, **vars(spec.granularity)}}
    second = entry.pop("second")
    return entry if second is None else {**entry, "second": _spec_to_dict(second)}


def _spec_from_dict(entry: dict[str, Any]) -> TensorSpec:
    kind = dict(entry["granularity"])
    changed = {
        "granularity": GRANULARITIES[kind.pop("kind")](**kind),
        "settings": tuple((name, value) for name, value in entry["settings"]),
        "second": None if entry.get("second") is None else _spec_from_dict(entry["second"]),
    }
    return TensorSpec(**{**entry, **changed})


def _tensor_from_dict(entry: dict[str, Any]) -> TensorPlan:
    names = entry["observer"]
    changed: dict[str, Any] = {
        "spec": _spec_from_dict(entry["spec"]),
        "observer": tuple(filter(None, [names] if isinstance(names, str) else names)),
        "readers": None if entry["readers"] is None else frozenset(entry["readers"]),
        "changes": tuple(entry["changes"]),
        "scale": None if entry["scale"] is None else np.asarray(entry["scale"], np.float32),
        "zero_point": None if entry["zero_point"] is None else np.asarray(entry["zero_point"], np.int32),
    }
    for key in ("fixed_range", "bias_of", "range"):
        changed[key] = None if entry[key] is None else tuple(entry[key])
    if (given := entry["given"]) is not None:
        changed["given"] = np.asarray(given[0], np.float32), np.asarray(given[1], np.int32)
    return TensorPlan(**{**entry, **changed})


def refuse(name: str, why: str) -> NoReturn:
    """Raise ``ConfigError``: a plan from a file does not fit the model."""
    raise ConfigError(f"--plan-from: {name!r} does not fit: {why}")
