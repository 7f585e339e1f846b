"""Tables of operators beside the schemas of ONNX; shapes, decoding, dynamic kernels; parameters, and casts of codes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest
from tests.onnx_flow.test_plan_steps import INT8, graph, job, node, ones

from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.numerics.granularity import Channel, Granularity, Tensor
from quark.onnx.npu.positions import Positions
from quark.onnx.qdq import decoding, dynamic, emit, index_paths, op_rules, parameters
from quark.onnx.qdq.op_rules import OP_RULES

# ---- tables, beside the schemas of ONNX ------------------------------------------------------------------------------


def input_names(op: str) -> list[str]:
    return [one.name for one in onnx.defs.get_schema(op, 9 if op == "Upsample" else 20).inputs]


@pytest.mark.parametrize("op", OP_RULES)
def test_slots_of_an_operator_are_those_of_its_schema(op: str) -> None:
    rule, names = OP_RULES[op], input_names(op)
    statistics = {"BatchNormalization": ("scale", "B", "input_mean", "input_var")}
    learned = [k for k, name in enumerate(names) if name in ("W", "R", "B", "C", "slope", "scale", "Scale")]
    weight = {"Gemm": 1, "MatMul": 1, "Conv": 1, "ConvTranspose": 1}.get(op)
    assert rule.weight == weight
    if weight is not None or op == "InstanceNormalization":
        assert rule.bias == (None if op == "MatMul" else 2) and names[rule.bias or 2 - (op == "MatMul")] in ("B", "C")
    else:
        assert rule.bias is None
    if weight is None and op not in statistics and rule.data == (0,) and op != "Div":
        assert [*rule.parameters, *([rule.bias] if rule.bias else [])] == learned
    if rule.data is not None:
        data = [k for k, name in enumerate(names) if name in ("X", "Y", "A", "input", "data", "data_0")]
        assert list(rule.data) == data


def test_positions_of_shapes_indices_and_divisors() -> None:
    numbers = ("shape", "indices", "axes", "pads", "repeats", "split", "K", "roi", "start", "starts", "scales")
    for op, first in index_paths.SHAPE_INPUTS_FROM.items():
        assert input_names(op)[first] in (*numbers, "input") and all(
            name not in numbers for name in input_names(op)[:first]
        )
    places = {"grid", "rois", "batch_indices", "indices"}
    for op, found in index_paths.PLACE_INPUTS.items():
        names = input_names(op) if op != "MaxRoiAlign" else ["X", "rois"]
        assert {names[k] for k in found} == {name for name in names if name in places}
    assert {op: input_names(op)[k] for op, k in op_rules.DIVISORS.items()} == {
        "Div": "B",
        "Reciprocal": "X",
        "Log": "input",
    }


# ---- shapes and decoding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("[s] s=Shape(x) [c] f = Cast<to=1>(s) [m] g = MatMul(f, w) [d] i = Cast<to=7>(g) [r] y=Reshape(x, i)", "cmd"),
        ("[s] s=Size(x) [c] f = Cast<to=1>(s) [m] g = Mul(f, k) [d] i = Cast<to=7>(g) [r] y = Expand(x, i)", "cmd"),
        ("[m] g = MatMul(x, w) [c] h = Floor(g) [d] i = Cast<to = 7>(h) [r] y = Gather(x, i)", "mcd"),  # of coordinates
        ("[p] p = MatMul(x, n) [m] g = MatMul(p, k2) [c] h = Floor(g) [d] i = Cast<to=7>(h) [r] y=Gather(x, i)", "cd"),
        ("[m] g = Tanh(x) [c] h = Floor(g) [d] i = Cast<to = 7>(h) [r] y = Gather(x, i)", "cd"),
        ("[m] g = Mul(x, k) [c] h = Floor(g) [d] i = Cast<to = 7>(h) [r] y = Gather(x, i)", "mcd"),
        ("[m] v, j = TopK(x, one) [c] i = Unsqueeze(j, zero) [r] y = Gather(x, i)", "c"),
        ("[a] h = Relu(x) [m] g = Mul(x, k) [d] i = Cast<to = 7>(g) [r] y = Gather(h, i)", "md"),
    ],
)  # fmt: skip
def test_what_ends_in_a_shape_or_an_index(body: str, found: str) -> None:
    numbers = {"k": np.float32(2), "one": np.array([1]), "zero": np.array([0])}
    model = graph("float[2,2] x", "float y", body, w=ones(2, 2), n=ones(2, 5), k2=ones(5, 2), **numbers)
    assert {one.name for one in index_paths.computes_shapes(model)} - {"s"} == set(found)


@pytest.mark.parametrize(
    ("tail", "found"),
    [
        ("[a] a, b = Split<axis = 1>(h) [e] c = Exp(a) [j] y = Concat<axis = 1>(c, b)", "aej"),
        ("[a] a, b = Split<axis = 1>(h) [e] c = Mul(a, k) [j] y = Concat<axis = 1>(c, b)", "aej"),
        ("[e] c = Exp(h) [j] y = Concat<axis = 1>(c, w)", ""),
        ("[e] c = Relu(h) [a] a, b = Split<axis = 1>(c) [j] y = Concat<axis = 1>(a, b)", ""),
        ("[e] c = Exp(h) [f] y = Add(c, h)", ""),
        ("[a] a, b = Split<axis = 1>(h) [e] c = Exp(a) [m] y = MatMul(c, b)", ""),
    ],
)
def test_what_decodes_the_outputs(tail: str, found: str) -> None:
    model = graph("float[2,2] x", "float y", f"[l] h = MatMul(x, w) {tail}", w=ones(2, 2), k=np.float32(2))
    assert {one.name for one in decoding.decoding_nodes(model)} == set(found)
    told = decoding.proposals(model, set("laejmf"))
    assert bool(told) == bool(found) and decoding.proposals(model, {"l"}) == []
    assert not told or told[0].startswith(f"{len(found)} nodes from '{found[0]}' to '{found[-1]}'")


# ---- dynamic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("MatMul(x, w)", None),
        ("MatMul(x, v)", "fewer than two axes"),
        ("Gemm(x, w)", None),
        ("Gemm<transB = 1>(x, w)", None),
        ("Gemm<transA = 1>(x, w)", "transposes"),
        ("Gemm(x, x)", "not constant"),
        ("Gemm<beta = 2.0>(x, w, v)", None),
        ("Gemm<beta = 2.0>(x, w, x)", "scales a computed bias"),
        ("Gemm(x, w, x)", None),
        ("Conv(c, k)", None),
        ("Conv(c, k, v)", None),
        ("Conv(c, c)", "not constant"),
        ("Conv(c, k, z)", "not constant"),
        ("Gather(w, i)", None),
        ("Gather<axis = 1>(w, i)", "no rows"),
        ("Gather(v, i)", "no rows"),
        ("Gather(x, i)", "no rows"),
        ("LSTM<hidden_size = 2>(t, r, r)", None),
        ("LSTM<hidden_size = 2, layout = 1>(t, r, r)", "layout"),
        ("LSTM<hidden_size = 2>(t, r, t)", "not constant"),
        ("LSTM<hidden_size = 2>(t, t, r)", "not constant"),
    ],
)
def test_what_has_a_dynamic_kernel(body: str, why: str | None) -> None:
    inputs = "float[2,2] x, float[1,2,4,4] c, float[2] z, int64[1] i, float[1,2,2] t"
    op = body.split("(")[0].split("<")[0]
    model = graph(inputs, "float y", f"[n] y = {body}", w=ones(2, 2), v=ones(2), k=ones(2, 2, 1, 1), r=ones(1, 8, 2))
    found = dynamic.DYNAMIC_RULES[op].why_not(node(model, "n"), INT8)
    assert found is None if why is None else why in (found or "")


@pytest.mark.parametrize(
    ("body", "shape", "granularity", "symmetric", "wanted"),
    [
        ("MatMul(x, w)", (2, 3), Channel(0), False, (Channel(1), False)),
        ("MatMul(x, w)", (1, 2, 3), Channel(0), False, (Tensor(), False)),
        ("MatMul(x, w)", (2, 3), Tensor(), False, (Tensor(), False)),
        ("Gemm(x, w)", (2, 3), Channel(0), False, (Channel(1), False)),
        ("Gemm<transB = 1>(x, w)", (3, 2), Channel(0), False, (Channel(0), False)),
        ("Conv(x, w)", (2, 2, 1), Channel(0), False, (Channel(0), True)),
        ("Conv(x, w)", (2, 2, 1), Tensor(), False, (Tensor(), False)),
        ("Gather(w, x)", (2, 2), Tensor(), False, (Channel(0), True)),
        ("LSTM(x, w)", (1, 8, 2), Tensor(), False, (Channel(0), False)),
        ("LSTM(x, w)", (1, 8, 2), Tensor(), True, (Channel(0), True)),
    ],
)
def test_scales_of_dynamic_weights(
    body: str, shape: tuple[int, ...], granularity: Granularity, symmetric: bool, wanted: tuple[Granularity, bool]
) -> None:
    x, w = ir.Value(name="x", shape=ir.Shape((2, 2))), ir.Value(name="w", shape=ir.Shape(shape))
    op = body.split("(")[0].split("<")[0]
    made = ir.node(op, [w, x] if "w, x" in body else [x, w], attributes={"transB": 1} if "transB" in body else {})
    spec = TensorSpec("int8", symmetric=symmetric, granularity=granularity)
    found = dynamic._for_node(spec, made, dynamic.DYNAMIC_RULES[op], 0 if "w, x" in body else 1)
    assert (found.granularity, found.symmetric) == wanted


# ---- scales that grow, constants behind Cast -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "needed", "rule", "grown"),
    [
        (1.0, [0.5, 3.0, 1.0], "float32", 3.0),
        (4.0, [0.5, 3.0, 1.0], "float32", 4.0),
        ([1.0, 1.0], [0.5, 3.0, 2.0, 1.0], "float32", [2.0, 3.0]),
        ([1.0, 1.0], [2.0, 1.0, 0.5, 3.0], "float32", [2.0, 3.0]),
        ([1.0, 1.0], [0.5, 3.0, 2.0, 1.0], "power_of_two", [2.0, 4.0]),
        ([[1.0], [1.0]], [0.5, 3.0], "power_of_two", [[1.0], [4.0]]),
        (1.0, [0.5, 9.0], "power_of_two", 16.0),
    ],
)
def test_scales_of_weights_grow_as_far_as_their_biases_need(scale: Any, needed: Any, rule: Any, grown: Any) -> None:
    tensor = TensorPlan("w", "weight", replace(INT8, scale_rule=rule), "r", scale=np.array(scale, np.float32))
    found = parameters._grown(tensor, np.array(needed))
    np.testing.assert_array_equal(found, np.array(grown, np.float32))
    assert found.dtype == np.float32 and found.shape == np.shape(grown)


@pytest.mark.parametrize("scale", [[1.0, 1.0], [1.0, 0.5]])
@pytest.mark.parametrize("zero_point", [[0, 0], [0, 1], [2, 1]])
def test_constants_behind_a_cast_are_their_codes_less_the_zero_point_times_the_scale(
    scale: list[float], zero_point: list[int]
) -> None:
    codes, parts = np.array([[0, 1], [2, 3]]), (np.array(scale, np.float32), np.array(zero_point))
    wanted = ((codes - parts[1]) * parts[0]).astype(np.float32)
    model = graph("float[2,2] x", "float[2,2] y", "[n] y = Add(x, w)", opset=21, w=wanted)
    spec = TensorSpec("uint2", symmetric=False, granularity=Channel(1))
    plan = Plan({"w": TensorPlan("w", "weight", spec, "r", "w", scale=parts[0], zero_point=parts[1])})
    written = ir.to_proto(emit.emit(model, plan, job().options))
    kinds = [one.op_type for one in written.graph.node]
    assert ("Sub" in kinds) is any(zero_point) and ("Mul" in kinds) is (scale[1] != 1.0)
    found = onnx.reference.ReferenceEvaluator(written).run(None, {"x": np.zeros((2, 2), np.float32)})[0]
    np.testing.assert_array_equal(found, wanted)


# ---- positions of the NPU --------------------------------------------------------------------------------------------

POWER = TensorSpec("int8", scale_rule="power_of_two")


def at_positions(**scales: Any) -> Plan:
    """Tensors with these scales; ``x`` and ``h`` share a range, what begins with w is a weight."""
    made = [
        TensorPlan(name, "weight" if name[0] == "w" else "activation", POWER, "r", "x" if name in "xh" else name,
                   scale=np.array(scale, np.float32), zero_point=np.zeros(np.shape(scale), np.int64))
        for name, scale in scales.items()
    ]  # fmt: skip
    return Plan({one.name: one for one in made})


def test_positions_are_read_off_and_moved_with_their_group() -> None:
    plan = at_positions(x=0.25, h=0.25, y=0.5, w=[0.5, 0.125])
    positions = Positions(plan)
    assert [int(positions.of(name)) for name in "xhy"] == [2, 2, 1]  # type: ignore[arg-type]
    assert positions.of("w").tolist() == [1, 3] and positions.of("none") is None  # type: ignore[union-attr]
    assert positions.move("x", 4, "a rule") is True and positions.move("x", 4, "a rule") is False
    assert [float(plan.tensors[name].scale) for name in "xhy"] == [0.0625, 0.0625, 0.5]  # type: ignore[arg-type]
    assert plan.tensors["h"].changes == ("position 2 → 4 by a rule",) and plan.tensors["y"].changes == ()
    assert positions.move("w", 2, "another") is True and plan.tensors["w"].scale.tolist() == [0.25, 0.25]  # type: ignore[union-attr]
    assert plan.tensors["w"].changes == ("position 1..3 → 2 by another",)
    assert positions.move("none", 1, "a rule") is False
    assert positions.move("y", 1000, "a rule") is True and -64 < int(positions.of("y")) < 200  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "known"),
    [
        ({}, True),
        ({"scale": None}, False),
        ({"spec": replace(POWER, scale_rule="float32")}, False),
        ({"spec": replace(POWER, format="int16")}, True),
        ({"spec": replace(POWER, format="int32")}, False),
    ],
)
def test_what_has_a_position(change: dict[str, Any], known: bool) -> None:
    plan = at_positions(x=0.25)
    plan.put(replace(plan.tensors["x"], **change))
    assert (Positions(plan).of("x") is not None) is known


def test_positions_by_slot() -> None:
    model = graph("float[2,2] x", "float[2,2] y", "[n] h = MatMul(x, w) [m] y = Relu(h) [k] z = Tanh(y)", w=ones(2, 2))
    plan = at_positions(x=0.25, w=[0.5, 0.25])
    plan.put(replace(plan.tensors["x"], readers=frozenset(["n"])))
    read = Positions(plan).read
    assert read(node(model, "n"), 0) == "x" and read(node(model, "m"), 0) is None and read(node(model, "n"), 2) is None
    assert read(node(model, "n"), 1) is None and read(node(model, "n"), 1, channels=True) == "w"
    plan.put(replace(plan.tensors["x"], readers=frozenset(["m"])))
    assert Positions(plan).read(node(model, "n"), 0) is None
    for held, found in ({"h": 0.5}, "h"), ({"y": 0.5}, "y"), ({"z": 0.5}, None), ({}, None):
        assert Positions(at_positions(**held)).written(node(model, "n")) == found


def test_formats_without_a_scale_have_the_scale_1() -> None:
    model = graph("float[2] x", "float[2] y", "[n] y = Add(x, w)", w=ones(2))
    half = TensorSpec("bfloat16")
    plan = Plan(
        {name: TensorPlan(name, role, half, "r", name) for name, role in (("x", "activation"), ("w", "weight"))}
    )  # type: ignore[arg-type]
    parameters.set_parameters(model, plan, {}, job().options)
    assert [(float(one.scale), int(one.zero_point)) for one in plan] == [(1.0, 0), (1.0, 0)]  # type: ignore[arg-type]
