"""What differs between two plans: tensor by tensor, node by node, in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from quark.config.plan import Plan, Role, TensorPlan
from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.files.schema import Schema, checked
from quark.reading import DAMAGED_TEXT, parse_json, read_text, reason_of

LARGEST = 1 << 28  # bytes of a plan file: some 500,000 tensors
_Pair = Annotated[list[Any], Field(min_length=2, max_length=2)]


class _Spec(Schema):
    format: str
    symmetric: bool
    narrow: bool
    granularity: dict[str, str | int | None]
    scale_rule: str
    rounding: str
    method: str
    settings: list[Annotated[tuple[str, Any], Field(strict=False)]]
    dynamic: bool
    reduced: bool
    real_zero: bool
    second: _Spec | None = None


class _Tensor(Schema):
    name: str
    role: Role
    spec: _Spec
    reason: str
    group: str
    observed: bool
    readers: list[str] | None
    fixed_range: _Pair | None
    given: _Pair | None
    bias_of: Annotated[list[str], Field(min_length=2, max_length=2)] | None
    range: _Pair | None
    scale: Any
    zero_point: Any
    changes: list[str]
    observer: str | list[str]


class _Node(Schema):
    name: str
    op_type: str
    quantized: bool
    reason: str


class _Tuned(Schema, extra="allow"):
    """What else was measured only explains."""

    TunedFloat: list[str]


class _Plan(Schema):
    """What a plan file may hold."""

    by: str = ""
    tensors: list[_Tensor]
    nodes: list[_Node]
    proposals: list[str] = Field(default_factory=list)
    floats: dict[str, str] = Field(default_factory=dict)
    tuned: _Tuned | None = None
    preprocessing: dict[str, Any] | None = None
    read_from: str = ""


@dataclass(frozen=True)
class Difference:
    """One tensor or node that two plans decide differently about.

    Attributes:
        name: of it.
        before, after: what either plan says.
    """

    name: str
    before: str
    after: str


def read_plan(path: Path) -> Plan:
    """The plan in a file that ``--plan`` wrote.

    Raises:
        ConfigError: the file is not a plan, or one that was changed into none.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(
            f"{str(path)!r} is not a plan ({why}): `quark onnx quantize --plan` and `quark torch plan --plan` write one"
        )

    text = read_text(path, ConfigError, "the plan", LARGEST)
    try:
        data = parse_json(text, "it", ConfigError)
    except ConfigError as error:
        raise refuse(str(error)) from error
    told = checked(data, _Plan, refuse).model_dump(exclude_unset=True)
    try:
        return Plan.from_dict(told)
    except (ConfigError, KeyError, TypeError, *DAMAGED_TEXT, ArithmeticError) as error:
        raise refuse(reason_of(error)) from error


def differences(before: Plan, after: Plan) -> Iterator[Difference]:
    """Where two plans differ: in what is quantized, how, and by which rule; parameters count where both have them.

    A plan that was read off a quantized model knows no rules, methods and nodes: these do not count then.
    """
    off = bool(before.read_from or after.read_from)
    for name in {**before.tensors, **after.tensors}:
        one, other = _said(before, name, off), _said(after, name, off)
        if one != other:
            yield Difference(name, one, other)
        elif name in before.tensors and not _same_parameters(before, after, name):
            yield Difference(name, "one scale or zero point", "another one")
    for name in {**before.nodes, **after.nodes} if not off else ():
        one, other = _said_of_node(before, name), _said_of_node(after, name)
        if one != other:
            yield Difference(name, one, other)


def _said(plan: Plan, name: str, off: bool) -> str:
    if name not in plan.tensors:
        if off:
            return "float"
        return f"float ({plan.floats[name]})" if name in plan.floats else "float"
    tensor = plan.tensors[name]
    if off:
        seen = replace(tensor.spec, narrow=True, scale_rule="float32")
        return f"{tensor.role} {seen.describe(given=True)}"
    return f"{tensor.role} {tensor.spec.describe(tensor.given is not None)} ({tensor.reason})"


def _said_of_node(plan: Plan, name: str) -> str:
    node = plan.nodes.get(name)
    return "not there" if node is None else f"{'quantized' if node.quantized else 'float'} ({node.reason})"


def _same_parameters(before: Plan, after: Plan, name: str) -> bool:
    one, other = before.tensors[name], after.tensors[name]
    known = [
        (a, b) for a, b in zip(_parameters(one), _parameters(other), strict=True) if a is not None and b is not None
    ]
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in known)


def _parameters(tensor: TensorPlan) -> tuple[Any, Any]:
    """Its scale and zero point: those that were found, or that are given."""
    if tensor.scale is None and tensor.given is not None:
        return np.asarray(tensor.given[0]), np.asarray(tensor.given[1])
    return tensor.scale, tensor.zero_point
