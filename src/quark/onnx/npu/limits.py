"""The rules of the NPU in rounds, on a graph without Q/DQ nodes and the Plan that says what is quantized in it.

A round applies every rule in order; rounds end when one moves nothing, or only what the round before has moved too, or
at their greatest number. Every move is a sentence in the Plan.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.onnx.graph.report import PassReport
from quark.onnx.npu.positions import Positions
from quark.onnx.npu.rules import PositionRule

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MovedTensor:
    """A tensor that a rule moved, and where to."""

    rule: PositionRule
    name: str
    position: int


def limit(model: ir.Model, plan: Plan, rules: Sequence[PositionRule], rounds: int) -> PassReport:
    """Move the positions in ``plan`` until the rules hold."""
    nodes = {rule: [node for node in model.graph if node.op_type in rule.op_types] for rule in rules}
    positions, total = Positions(plan), 0
    before: list[MovedTensor] = []
    moved: list[MovedTensor] = []
    for _ in range(rounds):
        before, moved = moved, [move for rule in rules for move in _apply(rule, nodes[rule], positions)]
        total += len(moved)
        if moved == before or not any(move.rule.repeats for move in moved):
            break  # nothing moves any more, or only back and forth: every further round ends where this one did
    return PassReport("npu_limits", total, _unsettled([move for move in moved if move.rule.repeats]))


def _apply(rule: PositionRule, nodes: list[ir.Node], positions: Positions) -> list[MovedTensor]:
    """What one rule moved."""
    return [
        MovedTensor(rule, name, int(np.min(position)))
        for node in nodes
        for name, position in rule.moves(node, positions)
        if positions.move(name, position, f"{rule.name} of {node.name}")
    ]


def _unsettled(moves: list[MovedTensor]) -> tuple[str, ...]:
    """One sentence about tensors on which rules disagree, or that needed more rounds."""
    if not moves:
        return ()
    names = list(dict.fromkeys(move.name for move in moves))
    rules = " and ".join(dict.fromkeys(move.rule.name for move in moves))
    few = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
    note = f"the NPU rules {rules} still moved {len(names)} tensors ({few}) in the last round: the last move holds"
    _log.info(note)
    return (note,)
