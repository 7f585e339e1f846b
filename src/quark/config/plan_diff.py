"""What differs between two plans: tensor by tensor, node by node, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.reading import read_text

LARGEST = 1 << 28  # bytes of a plan file: some 500,000 tensors


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
        ConfigError: the file is no plan, or one that was changed into none.
    """
    try:
        return Plan.from_json(read_text(path, ConfigError, "the plan", LARGEST))
    except (KeyError, TypeError, ValueError, AttributeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{path} is not a plan ({type(error).__name__}: {error}): `quark onnx quantize --plan` and "
            "`quark torch plan --plan` write one"
        ) from error


def differences(before: Plan, after: Plan) -> Iterator[Difference]:
    """Where two plans differ: in what is quantized, how, and by which rule; parameters count where both have them."""
    for name in {**before.tensors, **after.tensors}:
        one, other = _said(before, name), _said(after, name)
        if one != other:
            yield Difference(name, one, other)
        elif name in before.tensors and not _same_parameters(before, after, name):
            yield Difference(name, "one scale or zero point", "another one")
    for name in {**before.nodes, **after.nodes}:
        one, other = _said_of_node(before, name), _said_of_node(after, name)
        if one != other:
            yield Difference(name, one, other)


def _said(plan: Plan, name: str) -> str:
    if name not in plan.tensors:
        return f"float ({plan.floats[name]})" if name in plan.floats else "float"
    tensor = plan.tensors[name]
    return f"{tensor.role} {tensor.spec.describe()} ({tensor.reason})"


def _said_of_node(plan: Plan, name: str) -> str:
    node = plan.nodes.get(name)
    return "not there" if node is None else f"{'quantized' if node.quantized else 'float'} ({node.reason})"


def _same_parameters(before: Plan, after: Plan, name: str) -> bool:
    one, other = before.tensors[name], after.tensors[name]
    pairs = ((one.scale, other.scale), (one.zero_point, other.zero_point))
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return all(a.shape == b.shape and bool((a == b).all()) for a, b in known)
