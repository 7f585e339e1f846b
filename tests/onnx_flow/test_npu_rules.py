"""Every rule of the NPU alone, at any positions: what moves, and where to, by the table of the device's limits.

``TensorQuantOverrides`` puts tensors at positions (a range of 127 * 2**-p has position p). The expected moves are
written down here once more, from the published limits; networks on which a rule acts are compared with the peer's own
positions in ``test_npu_golden`` and ``test_npu_real``, and ``PEER`` says which rules that covers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.onnx_flow import models
from tests.onnx_flow.test_npu_golden import GOLDEN, LEGACY, SPEC, quantized

from quark.config.options import OPTIONS
from quark.onnx import ModelQuantizer, QConfig, QLayerConfig, XInt8Spec
from quark.onnx.npu.rules import RULES

Positions = dict[str, int]
SWITCHES = sorted({rule.option for rule in RULES})
#: Rules that act in the networks whose positions the peer's are stored of.
PEER = {
    "concat": {"align_concat"},
    "pools": {"align_pool"},
    "acts": {"align_pool"},
    "shifts": {"shift_cut", "shift_bias", "shift_read", "shift_write", "align_concat"},
}
X = "g (float[1,4,6,6] x) => (float y) { "


@dataclass(frozen=True)
class Case:
    """One rule at one operator.

    Attributes:
        option: its switch.
        body: the operator and what feeds it.
        at: the tensors whose positions the rule is about.
        expected: positions before -> positions after.
    """

    option: str
    body: str
    at: tuple[str, ...]
    expected: Callable[[Positions], Positions]


def same(*names: str) -> Callable[[Positions], Positions]:
    """All at the least."""
    return lambda p: dict.fromkeys(names, min(p[name] for name in names))


def clipped(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def read(p: Positions) -> Positions:
    finest = "a" if p["a"] >= p["b"] else "b"
    low = min(p["a"], p["b"])
    return {finest: low + 7} if p[finest] - low > 7 else {}


def write(total: Callable[[int, int], int], low: int, high: int) -> Callable[[Positions], Positions]:
    return lambda p: {"y": total(p["a"], p["b"]) - clipped(total(p["a"], p["b"]) - p["y"], low, high)}


def cut(p: Positions) -> Positions:
    return {"w": clipped(p["w"] + p["x"] - p["y"], 0, 16) + p["y"] - p["x"]}


def bias(leaky: bool) -> Callable[[Positions], Positions]:
    def moved(p: Positions) -> Positions:
        shift = p["w"] + p["x"] - p["y"]
        low = 0 if leaky else min(0, -(24 - (8 + shift)))
        return {"b": p["w"] + p["x"] - clipped(p["w"] + p["x"] - p["b"], low, 15)}

    return moved


def hard(p: Positions) -> Positions:
    read_at, wrote = clipped(p["a"], 0, 15), max(p["y"], 7)
    return {"a": read_at, "y": 14 + read_at if 14 + read_at - wrote <= 0 else wrote}


CONV = "Conv<kernel_shape = [1,1]>"
TWO = f"a = {CONV}(x, w) b = {CONV}(x, v) y = "
ONE = f"a = {CONV}(x, w) y = "
CASES = {
    "concat": Case("AlignConcat", f"{TWO}Concat<axis = 1>(a, b) }}", ("a", "b", "y"), same("a", "b", "y")),
    "average pool": Case("AlignPool", f"{ONE}AveragePool<kernel_shape = [2,2]>(a) }}", ("a", "y"), same("a", "y")),
    "global pool": Case("AlignPool", f"{ONE}GlobalAveragePool(a) }}", ("a", "y"), same("a", "y")),
    "max pool": Case("AlignPool", f"{ONE}MaxPool<kernel_shape = [2,2]>(a) }}", ("a", "y"), same("a", "y")),
    "pad": Case("AlignPad", f"{ONE}Pad(a, pads) }}", ("a", "y"), same("a", "y")),
    "slice": Case("AlignSlice", f"{ONE}Slice(a, one, two, one) }}", ("a", "y"), same("a", "y")),
    "transpose": Case("AlignTranspose", f"{ONE}Transpose<perm = [0,2,1,3]>(a) }}", ("a", "y"), same("a", "y")),
    "reshape": Case("AlignReshape", f"{ONE}Reshape(a, flat) }}", ("a", "y"), same("a", "y")),
    "add, read": Case("AdjustShiftRead", f"{TWO}Add(a, b) }}", ("a", "b"), read),
    "sub, read": Case("AdjustShiftRead", f"{TWO}Sub(a, b) }}", ("a", "b"), read),
    "add, write": Case("AdjustShiftWrite", f"{TWO}Add(a, b) }}", ("a", "b", "y"), write(min, -7, 25)),
    "mul, write": Case("AdjustShiftWrite", f"{TWO}Mul(a, b) }}", ("a", "b", "y"), write(int.__add__, 0, 32)),
    "conv, cut": Case("AdjustShiftCut", f"y = {CONV}(x, w) }}", ("x", "w", "y"), cut),
    "conv and relu, cut": Case("AdjustShiftCut", f"a = {CONV}(x, w) y = Relu(a) }}", ("x", "w", "y"), cut),
    "gemm, cut": Case("AdjustShiftCut", "y = Gemm<transB = 1>(x, w) }", ("x", "w", "y"), cut),
    "conv, bias": Case("AdjustShiftBias", f"y = {CONV}(x, w, b) }}", ("x", "w", "b", "y"), bias(False)),
    "gemm, bias": Case("AdjustShiftBias", "y = Gemm<transB = 1>(x, w, b) }", ("x", "w", "b", "y"), bias(False)),
    "leaky, bias": Case(
        "AdjustShiftBias", f"a = {CONV}(x, w, b) y = LeakyRelu(a) }}", ("x", "w", "b", "y"), bias(True)
    ),
    "hard sigmoid": Case("AdjustHardSigmoid", f"{ONE}HardSigmoid<alpha = 0.16666667>(a) }}", ("a", "y"), hard),
    "swish": Case(
        "AdjustShiftSwish",
        f"a = {CONV}(x, w) b = HardSigmoid<alpha = 0.16666667>(a) y = Mul(a, b) }}",
        ("a", "b", "y"),
        write(int.__add__, 0, 15),
    ),
    "swish of a sigmoid": Case(
        "AdjustShiftSwish",
        f"a = {CONV}(x, w) b = Sigmoid(a) y = Mul(b, a) }}",
        ("a", "b", "y"),
        write(int.__add__, 0, 15),
    ),
}


def network(case: Case) -> onnx.ModelProto:
    """Numbers of input and output channels differ."""
    flat = "Gemm" in case.body
    weights = {
        "w": models.normal(*((5, 4) if flat else (5, 4, 1, 1)), seed=1),
        "v": models.normal(5, 4, 1, 1, seed=2),
        "b": models.normal(5, seed=3),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
        "one": np.array([1]),
        "two": np.array([2]),
        "flat": np.array([1, -1]),
    }
    head = X.replace("[1,4,6,6]", "[3,4]") if flat else X
    read_in = case.body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    made = {word for word, sign in pairwise(read_in) if sign == "="}
    return models.model(head + case.body, {n: w for n, w in weights.items() if n in read_in and n not in made})


def run(case: Case, at: Positions, switch: bool) -> tuple[Positions, set[str]]:
    """Where the tensors end with one rule on, or none; and which were moved."""
    proto = network(case)
    told = {name: [{"rmin": -127 * 2.0**-p, "rmax": 127 * 2.0**-p}] for name, p in at.items()}
    options = dict.fromkeys(SWITCHES, False) | {case.option: switch, "TensorQuantOverrides": told}
    config = QConfig(
        QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()),
        extra_options={"PrintSummary": False, "ForceQuantizeNoInputCheck": True, **options},
    )
    result = ModelQuantizer(config).run(proto, None, [models.feeds(proto)])
    assert result.proto is not None
    onnx.checker.check_model(result.proto, full_check=True)
    moved = {tensor.name for tensor in result.plan if tensor.changes}
    return {name: int(-np.log2(float(result.plan.tensors[name].scale))) for name in case.at}, moved  # type: ignore[arg-type]


FAR = ([0, 24, 24, 0], [24, 0, 0, 24], [0, 0, 24, 24])


@pytest.mark.parametrize("name", list(CASES))
@settings(max_examples=5)
@given(st.lists(st.integers(-3, 24), min_size=4, max_size=4))
@example(FAR[0])
@example(FAR[1])
@example(FAR[2])
def test_a_rule_moves_what_the_table_says_and_nothing_else(name: str, drawn: list[int]) -> None:
    case = CASES[name]
    at = dict(zip(case.at, drawn, strict=False))
    after = at | case.expected(at)
    assert run(case, at, True) == (after, {tensor for tensor in at if at[tensor] != after[tensor]})


@pytest.mark.parametrize("name", list(CASES))
def test_a_rule_that_is_switched_off_moves_nothing(name: str) -> None:
    """At positions at which it would."""
    case = CASES[name]
    starts = [dict(zip(case.at, drawn, strict=False)) for drawn in FAR]
    moving = next(at for at in starts if case.expected(at).items() - at.items())
    assert run(case, moving, False) == (moving, set())


def test_every_rule_and_every_switch_has_a_case() -> None:
    covered = {case.option for case in CASES.values()}
    stated = {name for name in OPTIONS if name.startswith(("Adjust", "Align"))}
    assert covered == set(SWITCHES) == stated - {"AdjustBiasScale", "AlignEltwiseQuantType"}
    found = {node.op_type for case in CASES.values() for node in network(case).graph.node}
    assert {op_type for rule in RULES for op_type in rule.op_types} <= found | {"HardSigmoid"}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_the_peers_positions_cover_these_rules(name: str) -> None:
    """Where a rule moves a tensor of these networks, the position it gives is the peer's (``test_npu_golden``)."""
    acted = {
        change.split(" by ")[1].split(" of ")[0]
        for api in (SPEC, LEGACY)
        for tensor in quantized(name, api, "limits on").plan
        for change in tensor.changes
    }
    assert acted == PEER.get(name, set())


@pytest.mark.parametrize("op_type", ["Concat <axis = 1>", "Add", "Sub"])
@pytest.mark.parametrize("zeros", ["Sub(x, x)", "Mul(x, none)", "Identity(nothing)"])
@pytest.mark.parametrize("first", [True, False])
def test_zeros_say_nothing_of_the_values_beside_them(op_type: str, zeros: str, first: bool) -> None:
    """A tensor that is always zero has no scale of its own: small values joined or added to it keep theirs."""
    pair = "a, z" if first else "z, a"
    channels = 8 if "Concat" in op_type else 4
    text = f"""g (float[1,4,6,6] x) => (float[1,{channels},6,6] y, float[1,4,6,6] a) {{
        s = Relu(x) a = Conv(s, w) z = {zeros} y = {op_type} ({pair}) }}"""
    weights = {"w": models.normal(4, 4, 1, 1, scale=1e-3), "none": np.float32(0)}
    weights["nothing"] = np.zeros((1, 4, 6, 6), np.float32)
    proto = models.model(text, {name: array for name, array in weights.items() if name in text.split("{")[1]})
    feed = models.feeds(proto)
    made = ModelQuantizer(QConfig.get_default_config("XINT8")).quantize_model(proto, None, [feed])
    assert made is not None
    for found, exact in zip(models.run(made, feed), models.run(proto, feed), strict=True):
        np.testing.assert_allclose(found, exact, atol=0.03 * np.abs(exact).max())
