"""Every rule of the NPU over all small positions: it moves one tensor as little as its shifter needs, or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tests.onnx_flow import models

from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.onnx.graph.model import load
from quark.onnx.npu import limits, rules
from quark.onnx.npu.positions import Positions

#: Of each rule the operands, and the shift that its device makes with its bounds, from positions (operands, result).
SHIFTERS: dict[Any, tuple[int, Any, tuple[int, int]]] = {
    rules.write_add: (2, lambda a, b, y: min(a, b) - y, (-7, 25)),
    rules.write_mul: (2, lambda a, b, y: a + b - y, (0, 32)),
    rules.shift_swish: (2, lambda a, b, y: a + b - y, (0, 15)),
}


def positions(**known: int) -> Any:
    """What rules ask for: the operands "0", "1", .. of a node, and its result "y"."""
    found: Any = SimpleNamespace(always_zero=lambda name: False, written=lambda node: "y", of=known.get)
    found.read = lambda node, slot, channels=False: str(slot) if str(slot) in known else None
    return found


def nodes() -> Iterator[ir.Node]:
    """x * HardSigmoid(x) and the other way round."""
    x = ir.Value(name="x")
    gate = ir.node("HardSigmoid", [x]).outputs[0]
    yield from (ir.node("Mul", inputs) for inputs in ([x, gate], [gate, x]))


@pytest.mark.parametrize("rule", SHIFTERS, ids=lambda rule: rule.__name__)
def test_results_move_as_little_as_the_write_shifter_needs(rule: Any) -> None:
    count, shift, (least, most) = SHIFTERS[rule]
    for node, (a, b, y) in itertools.product(nodes(), itertools.product((-9, -1, 0, 2, 8, 20), repeat=count + 1)):
        ((name, moved),) = rule(node, positions(**{"0": a, "1": b, "y": y}))
        fitting = (place for place in range(-80, 80) if least <= shift(a, b, place) <= most)
        assert (name, moved) == ("y", min(fitting, key=lambda place: abs(place - y)))


def test_operands_of_a_sum_come_within_seven() -> None:
    node = next(nodes())
    for a, b in itertools.product(range(-12, 13), repeat=2):
        moved = dict(rules.shift_read(node, positions(**{"0": a, "1": b, "y": 0})))
        assert moved == ({} if abs(a - b) <= 7 else {"01"[b > a]: min(a, b) + 7})


def test_weights_and_biases_move_as_little_as_their_shifters_need() -> None:
    """The accumulator goes down to the result by 0 to 16 bits; a bias of 8 bits stays within its 24."""
    node = ir.node("Conv", [ir.Value(name=name) for name in "xwb"])
    for x, w, b, y in itertools.product((-3, 0, 5, 12), (-9, 0, 4, 30), (-20, 0, 9, 40), (-3, 0, 7, 30)):
        at = positions(**{"0": x, "1": w, "2": b, "y": y})
        ((name, moved),) = rules.shift_cut(node, at)
        fitting = (place for place in range(-99, 99) if 0 <= x + place - y <= 16)
        assert (name, moved) == ("1", min(fitting, key=lambda place: abs(place - w)))
        ((name, moved),) = rules.shift_bias(node, at)
        fitting = (place for place in range(-99, 99) if min(0, x + w - y - 16) <= x + w - place <= 15)
        assert (name, moved) == ("2", min(fitting, key=lambda place: abs(place - b)))


def test_the_table_of_a_hard_sigmoid_has_16_input_positions_and_7_bits() -> None:
    node = ir.node("HardSigmoid", [ir.Value(name="x")], attributes={"alpha": ir.AttrFloat32("alpha", 1 / 6)})
    for x, y in itertools.product(range(-3, 20), range(-3, 40)):
        place = min(max(x, 0), 15)
        fitting = range(7, 14 + place + 1)
        moved = dict(rules.hard_sigmoid(node, positions(**{"0": x, "y": y})))
        assert moved == {"0": place, "y": min(fitting, key=lambda one: abs(one - y))}


@pytest.mark.parametrize("silent", [(), ("0",), ("y",), ("0", "1", "y")])
def test_branches_and_results_meet_at_the_least_position_of_those_that_say_something(silent: tuple[str, ...]) -> None:
    node = next(nodes())
    for a, b, y in itertools.product((-2, 0, 3), repeat=3):
        known = {"0": a, "1": b, "y": y}
        at = positions(**known)
        at.always_zero = silent.__contains__
        telling = [place for name, place in known.items() if name not in silent] or list(known.values())
        assert dict(rules.align_concat(node, at)) == dict.fromkeys(known, min(telling))
        same = [place for name, place in (("0", a), ("y", y)) if name not in silent] or [a, y]
        assert dict(rules.align_same(node, at)) == dict.fromkeys(("0", "y"), min(same))


@pytest.mark.parametrize("zeros", ["0", "1"])
def test_zeros_beside_other_operands_of_a_sum_take_their_position(zeros: str) -> None:
    for a, b in itertools.product((-4, 0, 30), repeat=2):
        at = positions(**{"0": a, "1": b, "y": 0})
        at.always_zero = zeros.__eq__
        assert dict(rules.shift_read(next(nodes()), at)) == {zeros: b if zeros == "0" else a}
    at = positions(**{"0": 1, "1": 9, "2": 4, "y": 0})
    at.always_zero = "2".__eq__
    node = ir.node("Add", [ir.Value(name=name) for name in "xwb"])
    assert dict(rules.shift_read(node, at)) == {"2": 1, "1": 8}


def test_weights_and_biases_have_a_position_per_channel_where_both_do() -> None:
    node = ir.node("Conv", [ir.Value(name=name) for name in "xwb"])
    at = positions(**{"0": 3, "1": 5, "2": 1, "y": 2})
    at.read = lambda node, slot, channels=False: str(slot) if channels or slot == 0 else None
    known: dict[str, Any] = {"0": 3, "1": np.array([5, 30]), "2": np.array([1, 1]), "y": 2}
    at.of = known.get
    assert [(name, found.tolist()) for name, found in rules.shift_cut(node, at)] == [("1", [5, 15])]
    assert [(name, found.tolist()) for name, found in rules.shift_bias(node, at)] == [("2", [1, 18])]
    known["2"] = np.array(1)  # one position for all channels: that of the coarsest
    assert [(name, int(found)) for name, found in rules.shift_bias(node, at)] == [("2", 1)]


@pytest.mark.parametrize(("behind", "low"), [("LeakyRelu", 0), ("Relu", -16)])
def test_a_bias_in_front_of_a_leaky_relu_is_not_shifted_up(behind: str, low: int) -> None:
    node = ir.node("Conv", [ir.Value(name=name) for name in "xwb"])
    ir.node(behind, node.outputs)
    ((_, moved),) = rules.shift_bias(node, positions(**{"0": 0, "1": 0, "2": 40, "y": 0}))
    assert moved == -low


@pytest.mark.parametrize(("chain", "swish"), [
    (("HardSigmoid",), True), (("HardSigmoid", "Mul"), True), (("Sigmoid",), False), (("Mul",), False), ((), False),
])  # fmt: skip
def test_a_swish_is_a_product_with_its_own_hard_sigmoid(chain: tuple[str, ...], swish: bool) -> None:
    """Perhaps corrected by a factor."""
    x = gate = ir.Value(name="x")
    for op_type in chain:
        gate = ir.node(op_type, [gate, ir.Value(name="k")][: 1 + (op_type == "Mul")]).outputs[0]
    at = positions(**{"0": 0, "1": 0, "y": 0})
    other = ir.Value(name="z")
    if chain:
        assert len(list(rules.shift_swish(ir.node("Mul", [x, gate]), at))) == swish
    for inputs in ([other, gate], [gate, other]):
        assert list(rules.shift_swish(ir.node("Mul", inputs), at)) == []


@pytest.mark.parametrize(("op_type", "behind", "held"), [
    ("Conv", [], "0"), ("Conv", ["Relu"], "1"), ("Conv", ["Mul"], None), ("AveragePool", ["Mul"], "1"),
    ("AveragePool", ["Mul", "Relu"], "2"), ("AveragePool", ["Relu"], "1"), ("Conv", ["Relu", "Relu"], None),
    ("HardSigmoid", ["Mul"], "1"), ("ReduceMean", ["Mul"], "1"), ("Conv", ["Sigmoid"], None),
])  # fmt: skip
def test_a_result_is_held_behind_a_correction_and_a_fused_activation(
    op_type: str, behind: list[str], held: str | None
) -> None:
    """Only the last tensor of the chain has a position; a Mul corrects what the device computes by a shift."""
    first = value = ir.node(op_type, [ir.Value(name="x")])
    for number, kind in enumerate(behind):
        value.outputs[0].name = str(number)
        value = ir.node(kind, [value.outputs[0], ir.Value(name="k")][: 1 + (kind == "Mul")])
    value.outputs[0].name = str(len(behind))
    plan = Plan()
    spec = TensorSpec("int8", scale_rule="power_of_two")
    last = str(len(behind))
    plan.put(TensorPlan(last, "activation", spec, "", last, scale=np.float32(0.5)))
    assert Positions(plan).written(first) == held


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_moves_are_counted_until_nothing_changes(rounds: int) -> None:
    """A tensor that two rules want elsewhere goes back and forth: each round moves it twice, and ends like the last."""
    model = load(models.model("g (float[2] x) => (float[2] y) { y = Relu (x) }", {}, 17))
    plan = Plan()
    plan.put(TensorPlan("y", "activation", TensorSpec("int8", scale_rule="power_of_two"), "", "y", scale=np.float32(1)))
    both = [rules.PositionRule(name, "", frozenset(["Relu"]), lambda node, at, to=to: iter([("y", to)]))  # type: ignore[misc]
            for name, to in (("up", 3), ("down", 1))]  # fmt: skip
    report = limits.limit(model, plan, both, rounds)
    assert (report.fired, len(report.refused)) == (2 * min(rounds, 2), 1)
    once = limits.limit(model, plan, both[:1], rounds)
    assert (once.fired, len(once.refused)) == (1, rounds == 1)


def test_rules_go_on_while_one_that_repeats_moves_something() -> None:
    """Beside it one that moves another tensor in the first round, and does not ask for a second."""
    model = load(models.model("g (float[2] x) => (float[2] y) { y = Relu (x) }", {}, 17))
    plan, spec = Plan(), TensorSpec("int8", scale_rule="power_of_two")
    for name in "xy":
        plan.put(TensorPlan(name, "activation", spec, "", name, scale=np.float32(1)))
    once = rules.PositionRule("once", "", frozenset(["Relu"]), lambda node, at: iter([("x", 4)]), repeats=False)
    up = rules.PositionRule("up", "", frozenset(["Relu"]), lambda node, at: iter([("y", min(int(at.of("y")) + 1, 3))]))
    report = limits.limit(model, plan, [once, up], 9)
    assert (report.fired, report.refused) == (1 + 3, ())
    assert [float(plan.tensors[name].scale) for name in "xy"] == [2.0**-4, 2.0**-3]
