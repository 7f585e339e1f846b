"""Decisions of the ONNX engine that whole models rarely meet, each asked directly; what is expected is written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tests.onnx_flow import models

from quark.config.overrides import Override
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError
from quark.numerics.granularity import Channel
from quark.onnx.graph.model import load
from quark.onnx.npu import positions
from quark.onnx.qdq import overrides, parameters, place, slots


@pytest.mark.parametrize("format, largest", [("bfloat16", 2.0), ("float16", 65504.0)])
def test_scaled_floats_put_the_larger_side_on_their_range(format: str, largest: float) -> None:
    """The range that AMD's float formats are reduced to; all zero needs no scale, which is then 1."""
    lo, hi = np.array([-3.0, -1.0, 0.5, -2.0, 0.0]), np.array([1.0, 5.0, 4.0, -1.0, 0.0])
    scale, zero_point = parameters.from_range(TensorSpec(format), lo, hi, True)
    np.testing.assert_allclose(scale, np.array([3.0, 5.0, 4.0, 2.0, largest]) / largest, rtol=1e-7)
    assert scale.dtype == np.float32 and zero_point.dtype == np.int64
    np.testing.assert_array_equal(zero_point, np.zeros(5))
    plain = parameters.from_range(TensorSpec("int8"), np.float64(-3), np.float64(1), False)
    assert float(plain[0]) == pytest.approx(3 / 127, rel=1e-6)


def planned(name: str, role: str = "activation", **fields: Any) -> TensorPlan:
    return TensorPlan(name, role, TensorSpec("int8"), "", name, **fields)


@pytest.mark.parametrize("readers", [None, {"n2", "n3"}, {"n1", "n2"}])
def test_nodes_that_an_algorithm_added_read_float(readers: set[str] | None) -> None:
    """Of a tensor that others read too, those keep their codes; one that nobody else reads stays float."""
    text = (
        "g (float[2] x) => (float[2] y, float[2] z, float[2] v) { y = Relu (x) z = Sqrt (x) v = Exp (x) a = Neg (y) }"
    )
    model, plan = load(models.model(text, {}, 17)), Plan()
    for number, node in enumerate(model.graph):
        node.name = f"n{number + 1}"
        if node.op_type in ("Relu", "Neg"):
            node.meta[slots.STAYS_FLOAT] = "added"
    plan.put(planned("x", readers=None if readers is None else frozenset(readers)))
    plan.put(planned("y"))
    placement: Any = SimpleNamespace(model=model, plan=plan)
    place._feed_float(placement)
    assert plan.tensors.keys() == {"x"}
    assert plan.tensors["x"].readers == {"n2", "n3"} - ({"n3"} if readers == {"n1", "n2"} else set())
    assert "only nodes that an algorithm added read it" in plan.explain("y")


@pytest.mark.parametrize("shape, axis, expected", [
    ((4,), -1, 0), ((4,), 0, 0), ((2, 3), -1, 1), ((2, 3), -2, 0), ((2, 3), 1, 1),
    ((4,), 1, "-1..0, not 1"), ((4,), -2, "-1..0, not -2"), ((2, 3), 2, "-2..1, not 2"),
    ((), 0, "this is a single number; leave it out"),
])  # fmt: skip
def test_axes_of_overridden_constants(shape: tuple[int, ...], axis: int, expected: Any) -> None:
    value = ir.Value(name="w", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    value.const_value = ir.tensor(models.normal(*shape))
    ir.Graph([], [], nodes=[], initializers=[value])
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            overrides._overridden(planned("w", "weight"), Override(axis=axis), value)
        return
    found = overrides._overridden(planned("w", "weight"), Override(axis=axis), value)
    assert found.spec.granularity == Channel(expected)


@pytest.mark.parametrize(
    "known, expected", [(None, None), ({"n1", "n2"}, {"n2", "x_convert"}), ({"n1"}, {"x_convert"})]
)
def test_readers_of_a_second_type_leave_the_first(known: set[str] | None, expected: set[str] | None) -> None:
    text = "g (float[2] x) => (float[2] y, float[2] z) { y = Relu (x) z = Sqrt (x) }"
    model, plan = load(models.model(text, {}, 17)), Plan()
    for number, node in enumerate(model.graph):
        node.name = f"n{number + 1}"
    plan.put(planned("x", readers=None if known is None else frozenset(known)))
    overrides._convert(model, plan, model.graph.inputs[0], Override(format="int16"), frozenset(["n1"]))
    assert plan.tensors["x"].readers == expected and plan.tensors["x"].spec.format == "int8"
    assert plan.tensors["x_convert"].spec.format == "int16" and plan.tensors["x_convert"].readers is None
    with pytest.raises(ConfigError, match="'n9' does not read this tensor"):
        overrides._convert(model, plan, model.graph.inputs[0], Override(format="int16"), frozenset(["n9"]))


@pytest.mark.parametrize("lo, hi, position, expected", [
    (-1.0, 3.0, 6, -64), (-1.0, 3.0, 5, -96), (1.0, 3.0, 6, -128), (-9.0, 1.0, 5, 127), (-0.5, 0.5, 7, -64),
])  # fmt: skip
def test_zero_points_follow_moved_positions(lo: float, hi: float, position: int, expected: int) -> None:
    """The lowest code stands for the least value, or 0: zero point = -128 - lo 2^p, within -128..127."""
    spec = TensorSpec("int8", symmetric=False, scale_rule="power_of_two")
    tensor = TensorPlan("x", "activation", spec, "", "x", scale=np.float32(1), zero_point=np.int8(3), range=(lo, hi))
    moved = positions._moved(tensor, np.array(position), "note")
    assert float(moved.scale) == 2.0**-position and int(moved.zero_point) == expected
    assert moved.changes == ("note",) and positions._moved(moved, np.array(position), "note").changes == ("note",)
    plain = TensorPlan("x", "activation", TensorSpec("int8"), "", "x", scale=np.float32(1), zero_point=np.int8(0))
    assert int(positions._moved(plain, np.array(position), "note").zero_point) == 0
