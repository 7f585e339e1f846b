"""Rules of the NPU and of selections asked directly, with positions and nodes that models seldom have."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.test_asked_directly import named, planned

from quark.config.nbits import NBits
from quark.config.options import Options
from quark.config.overrides import Override
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError
from quark.numerics.granularity import Channel, Group
from quark.onnx.graph.model import load
from quark.onnx.npu import rules
from quark.onnx.qdq import block_axes, fuse, nbits, overrides, place, recurrent, selection, tables


def test_one_position_of_a_bias_fits_the_channel_with_the_least() -> None:
    """Weights per channel and a bias with one position: a shift that leaves the accumulator for none of them."""
    node = load(
        models.model(
            "g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) { y = Conv (x, w, b) }",
            {"w": models.normal(2, 2, 1, 1), "b": models.normal(2)},
            17,
        )
    ).graph[0]
    positions = {"x": np.array(5), "w": np.array([3, 30]), "b": np.array(6), "y": np.array(4)}

    def read(of: Any, slot: int, channels: bool) -> str:
        assert channels is (slot > 0)
        return ("x", "w", "b")[slot]

    at: Any = SimpleNamespace(read=read, written=lambda of: "y", of=positions.get)
    ((name, moved),) = rules.shift_bias(node, at)
    # accumulators at 8 and 35: shifts of 2 and 29, of which a shifter has at most 15, leave the bias at 6 and 20
    assert name == "b" and int(moved) == 6


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        ("y = Add (x, w)", [True]),
        ("y = Add (w, x)", [True]),
        ("a = Relu (x) y = Add (a, w)", [True, False]),
        ("a = Relu (x) y = Add (a, x)", [True, True]),
        ("y = Add (w, w)", [False]),
    ],
)
def test_nodes_that_read_an_input_of_the_model(body: str, reads: list[bool]) -> None:
    text = f"g (float[2] x) => (float[2] y) {{ {body} }}"
    nodes = load(models.model(text, {"w": models.normal(2)} if "w" in body else {}, 17)).graph
    assert [selection._info(node).reads_graph_input for node in nodes] == reads


@pytest.mark.parametrize(("kind", "beside"), [("LSTM", True), ("Tanh", False)])
def test_recurrent_layers_are_quantized_beside_what_is_measured(
    kind: str, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "y = LSTM<hidden_size = 3> (a, w, r)" if kind == "LSTM" else "y = Tanh (a)"
    text = f"g (float[4, 1, 2] x) => (float[?] y) {{ a = Relu (x) {body} }}".replace(
        "?", "N, M, K, L"[: 10 if beside else 7]
    )
    weights = {"w": models.normal(1, 12, 2), "r": models.normal(1, 12, 3)} if beside else {}
    placement: Any = SimpleNamespace(model=load(models.model(text, weights, 17)))
    placement.job = SimpleNamespace(options=SimpleNamespace(TunedFloat=None, FloatWhereFaster=True))
    seen: list[bool] = []

    def measured(model: Any, nodes: Any, asked: Any, beside: bool) -> set[Any]:
        seen.append(beside)
        return set()

    monkeypatch.setattr(place, "_suits_cpu", lambda job, option: True)
    monkeypatch.setattr(place.slower, "faster_in_float", measured)
    place._leave_slower(dict.fromkeys(placement.model.graph), placement)
    assert seen == [beside]


# ---- what is given, and where it goes --------------------------------------------------------------------------------


def constant(*shape: int, alone: bool = False) -> ir.Value:
    value = ir.Value(name="w", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))
    value.const_value = ir.tensor(models.normal(*shape))
    if not alone:
        ir.Graph([], [], nodes=[], initializers=[value])
    return value


@pytest.mark.parametrize("format, zeros, fits", [
    ("int8", (-128, 127), True), ("int8", (0, 128), False), ("int8", (-129, 0), False), ("uint8", (0, 255), True),
    ("uint8", (-1, 0), False), ("int4", (8, 0), False), ("fp8_e4m3", (500, 0), True),
])  # fmt: skip
def test_zero_points_that_are_given_are_codes(format: str, zeros: tuple[int, ...], fits: bool) -> None:
    wanted, spec = Override(parameters=((0.5, 0.25), zeros)), TensorSpec(format, symmetric=format[0] != "u")
    with nullcontext() if fits else pytest.raises(ConfigError, match="zero_point must lie in"):
        scale, zero = overrides._parameters(planned("w", "weight"), spec, wanted, constant(2, 3))
        assert scale.tolist() == [0.5, 0.25] and zero.tolist() == list(zeros)


@pytest.mark.parametrize("axis, channels", [(None, ()), (0, (2,)), (1, (3,))])
def test_one_scale_that_is_given_is_that_of_every_channel(axis: int | None, channels: tuple[int, ...]) -> None:
    wanted = Override(parameters=((0.5,), (3,)), axis=axis)
    scale, zero = overrides._parameters(planned("w", "weight"), TensorSpec("int8"), wanted, constant(2, 3))
    assert scale.shape == zero.shape == channels
    assert (scale == np.float32(0.5)).all() and (zero == 3).all()
    for column, expected in (
        (None, None),
        ((1.0,), 1.0 if axis is None else [1.0] * channels[0]),
        ((1.0, 2.0), [1, 2]),
    ):
        assert overrides._shaped(column, wanted, constant(2, 3)) == expected


@pytest.mark.parametrize("text, expected", [
    ("y = MatMul (x, z)", {"x": -1, "z": -2, "y": -1}), ("y = Gemm (x, z)", {"x": 1, "z": 0}),
    ("y = Gemm<transA = 1> (x, z)", {"x": 0, "z": 0}), ("y = Gemm<transB = 1> (x, z)", {"x": 1, "z": 1}),
    ("y = Softmax (x)", {"x": -1}), ("y = Softmax<axis = 0> (x)", {"x": -2}), ("y = Softmax<axis = 1> (x)", {"x": -1}),
    ("y = Softmax<axis = -2> (x)", {"x": -2}), ("y = Relu (x)", {}),
])  # fmt: skip
def test_along_which_axes_blocks_run(text: str, expected: dict[str, int]) -> None:
    node = named(f"g (float[4, 4] x, float[4, 4] z) => (float[4, 4] y) {{ {text} }}").graph[0]
    assert {str(value.name): axis for value, axis in block_axes._axes(node) if value is not None} == expected


@pytest.mark.parametrize("given", [None, True, False])
def test_the_first_reader_settles_the_axis_of_blocks(given: bool | None) -> None:
    model, plan = named("g (float[4, 6] x) => (float[4, 6] y) { a = MatMul (z, x) y = Softmax (x) }"
                        .replace("float[4, 6] x)", "float[4, 6] x, float[4, 4] z)")), Plan()  # fmt: skip
    blocks = TensorSpec("mxfp8_e4m3", granularity=Group(1, 32))
    for name, role in (("x", "activation"), ("z", "weight"), ("y", "activation")):
        plan.put(TensorPlan(name, role, blocks if name != "y" else TensorSpec("int8"), "", name))
    block_axes.refine(model, plan, SimpleNamespace(options=SimpleNamespace(RefineBlockAxis=given)))  # type: ignore[arg-type]
    assert plan.tensors["x"].spec.granularity == Group(1 if given is False else 0, 32)
    assert plan.tensors["z"].spec.granularity == Group(1, 32) and plan.tensors["y"].spec.format == "int8"


@pytest.mark.parametrize("columns, bits, axis, told", [
    (4, 4, 0, None), (3, 4, 0, "fill no whole bytes"), (1, 8, 0, None), (4, 2, 0, None), (2, 2, 0, "fill no whole"),
    (4, 4, 1, "it gathers columns"), (None, 4, 0, "fill no whole bytes"),
])  # fmt: skip
def test_rows_that_fill_bytes(columns: int | None, bits: int, axis: int, told: str | None) -> None:
    table = ir.Value(name="t", shape=ir.Shape([9, columns if columns else "n"]))
    node = ir.node("Gather", [table, ir.Value(name="i")], attributes={"axis": axis} if axis else {})
    found = nbits._why_not_gather(node, table, NBits(Bits=bits))
    assert found is None if told is None else told in str(found)


TABLES: dict[str, tuple[Any, bool]] = {
    "large": ({}, True),
    "a vector": ({"shape": (1 << 16,)}, False),
    "few numbers": ({"shape": (16, 128)}, False),
    "as few as may be, in rows as short": ({"shape": (512, 8)}, True),
    "rows a number shorter": ({"shape": (1024, 7)}, False),
    "short rows": ({"shape": (1 << 14, 4)}, False),
    "short rows of two axes": ({"shape": (1 << 12, 2, 16)}, True),
    "columns": ({"axis": 1}, False),
    "indices": ({"as_indices": True}, False),
    "an output": ({"output": True}, False),
    "read in float": ({"other": True}, False),
    "read by another quantized node": ({"other": True, "known": True}, True),
}


@pytest.mark.parametrize("name", TABLES)
def test_which_tables_are_stored_as_codes(name: str) -> None:
    given, expected = TABLES[name]
    shape = given.get("shape", (1 << 11, 32))
    table = constant(*shape, alone=True)
    index = ir.Value(name="i")
    inputs = [index, table] if "as_indices" in given else [table, index]
    nodes = [ir.node("Gather", inputs, attributes={"axis": given.get("axis", 0)}, name="take")]
    if "other" in given:
        nodes.append(ir.node("Relu", [table], name="other"))
    outputs = [table] if "output" in given else [nodes[0].outputs[0]]
    ir.Graph([index], outputs, nodes=nodes, initializers=[table])
    plan = Plan()
    if "known" in given:
        plan.put(planned("w", "weight", readers=frozenset(["other"])))
    assert tables._suits(table, plan, TensorSpec("int8", granularity=Channel(0))) is expected
    assert not tables._suits(None, plan, TensorSpec("int8", granularity=Channel(0)))


@pytest.mark.parametrize("change", ["none", "GRU", "layout", "float16", "a second reader", "9 bits", "slower"])
def test_which_recurrent_layers_compute_in_integers(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = named("g (float[4, 1, 2] x) => (float[4, 1, 1, 3] y) { y = LSTM<hidden_size = 3> (x, w, r) }",
                  {"w": models.normal(1, 12, 2), "r": models.normal(1, 12, 3)})  # fmt: skip
    node, spec = model.graph[0], TensorSpec("int16" if change == "9 bits" else "int8")
    if change == "GRU":
        node.op_type = "GRU"
    elif change == "layout":
        node.attributes["layout"] = ir.AttrInt64("layout", 1)
    elif change == "float16":
        node.inputs[2].type = ir.TensorType(ir.DataType.FLOAT16)  # type: ignore[union-attr]
    elif change == "a second reader":
        model.graph.append(ir.node("Relu", [node.inputs[1]]))
    monkeypatch.setattr(recurrent.slower, "dynamic_is_faster", lambda node: change != "slower")
    assert recurrent._is_faster(node, spec) is (change == "none")


@pytest.mark.parametrize("format, scalar, kept", [
    ("int8", True, True), ("int8", False, True), ("mxfp8_e4m3", True, False), ("mxfp8_e4m3", False, True)
])  # fmt: skip
def test_single_numbers_have_no_blocks(format: str, scalar: bool, kept: bool) -> None:
    value = constant() if scalar else constant(2, 32)
    node = ir.node("Add", [ir.Value(name="x"), value], name="n")
    placement: Any = SimpleNamespace(plan=Plan(), model=None)
    spec = TensorSpec(format) if format == "int8" else TensorSpec(format, granularity=Group(1, 32))
    place._add_constant(node, value, spec, "because", placement)
    assert set(placement.plan.tensors) == ({"w"} if kept else set())


@pytest.mark.parametrize(
    ("weight", "stored"), [("constant", True), ("computed", False), ("double", False), (None, False)]
)
def test_blocks_of_codes_are_of_constant_float_matrices(weight: str | None, stored: bool) -> None:
    matrix = models.normal(8, 8).astype(np.float64 if weight == "double" else np.float32)
    model = named("g (float[8, 8] x, float[8, 8] v) => (float[8, 8] y) { y = MatMul (x, w) }", {"w": matrix})
    node = model.graph[0]
    node.replace_input_with(1, {"computed": model.graph.inputs[1], None: None}.get(weight, node.inputs[1]))
    why = nbits._why_float(node, NBits(), Options(), None)
    told = "it computes in float64: export it in float32" if weight == "double" else "it has no constant weight"
    assert why == (None if stored else told)


def test_an_activation_function_without_a_producer_is_in_no_kernel() -> None:
    model = named("g (float[2] x) => (float[2] y) { y = Relu (x) }", {})
    plan, job = Plan(), None
    plan.put(planned("x"))
    for node in (model.graph[0], ir.node("Relu", []), ir.node("Relu", [None])):
        assert fuse.fused_producer(node, plan, job) is None  # type: ignore[arg-type]
