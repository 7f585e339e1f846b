"""Parts of unlike ranges behind one Concat: each gets a scale of its own where a normalization stands behind it.

Every form of the normalization (Mul, Div, BatchNormalization; Add or Sub behind), axes, operands in both orders,
parts that others read too. The outputs of the float graph stay; quantized with presets for CPU and NPU the model keeps
what the small part carries.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.graph.model import load, to_proto
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes import norm_before_concat

WIDE = 500.0
#: name -> what normalizes j, of 8 channels along the axis; the axis; the power of the constant
FORMS = {
    "mul": ("y = Mul (j, s)", 1, -1),
    "mul, constant first": ("y = Mul (s, j)", 1, -1),
    "div": ("y = Div (j, s)", 1, 1),
    "mul add": ("m = Mul (j, s)\n y = Add (m, t)", 1, -1),
    "mul add, constant first": ("m = Mul (j, s)\n y = Add (t, m)", -3, -1),
    "div sub": ("m = Div (j, s)\n y = Sub (m, t)", 1, 1),
    "mul add of one number": ("m = Mul (j, s)\n y = Add (m, one)", 1, -1),
    "mul by every place, add to every column": ("m = Mul (j, places)\n y = Add (m, columns)", 1, -1),
    "batch norm": ("y = BatchNormalization (j, g, t1, mean, var)", 1, 2),
}


def _model(form: str, wide: float = WIDE, last: bool = False) -> onnx.ModelProto:
    """Two parts, the second ``wide`` times as large and read by a layer too; a layer behind the normalization."""
    text, axis, power = FORMS[form]
    graph = f"""
    parts (float[1, 4, 5, 5] x) => (float[1, 3, 5, 5] o, float[1, 4, 5, 5] q) {{
        r = Relu (x)
        b = Conv (x, wide)
        q = Conv (b, narrow)
        j = Concat <axis = {axis}> (r, b)
        {text}
        o = Conv (y, w)
    }}"""
    sizes = np.repeat(np.float32([1, wide]), 4)
    s, t = (sizes ** np.float32(np.sign(power))).reshape(8, 1, 1), models.normal(8, 1, 1, scale=0.3)
    weights = {"wide": wide * models.normal(4, 4, 1, 1), "narrow": models.normal(4, 4, 1, 1) / wide}
    weights |= {"w": models.normal(3, 8, 1, 1), "s": s, "t": t, "one": np.float32(0.5), "g": np.ones(8, np.float32)}
    weights |= {"places": s * np.float32(1 + models.normal(8, 5, 5, scale=0.3) ** 2), "columns": models.normal(5)}
    weights |= {"t1": t.reshape(8), "mean": t.reshape(8) * sizes, "var": sizes**2}
    return models.model(graph, {name: array for name, array in weights.items() if name in graph.replace("y =", "")})


def _moved(proto: onnx.ModelProto) -> tuple[int, onnx.ModelProto, tuple[str, ...]]:
    model = load(proto)
    infer_shapes(model)
    report = norm_before_concat.run(model)
    return report.fired, to_proto(model), report.refused


@pytest.mark.parametrize("form", FORMS)
def test_the_function_stays_and_no_part_is_wide(form: str) -> None:
    proto = _model(form)
    fired, moved, _ = _moved(proto)
    assert fired == 1
    onnx.checker.check_model(moved, full_check=True)
    feeds = models.feeds(proto)
    models.assert_close(models.run(moved, feeds), models.run(proto, feeds), 1e-5)
    concat = next(node for node in moved.graph.node if node.op_type == "Concat")
    assert [node.op_type for node in moved.graph.node if set(concat.output) & set(node.input)] == ["Conv"]
    assert {value.name for value in moved.graph.value_info} >= set(concat.input), "their shapes stay known"
    moved.graph.output.extend(onnx.ValueInfoProto(name=name) for name in concat.input)
    parts = [float(np.abs(part).max()) for part in models.run(moved, feeds)[2:]]
    assert max(parts) < 10, "normalized behind the Concat, these are 1 and 500"


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "A8W8_CPU", "BFP16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_small_part_survives(form: str, preset: str) -> None:
    """SQNR of the layer behind; in one scale, or in blocks across both parts, the small one is zeros: below 10 dB."""
    proto = _model(form)
    samples = [models.feeds(proto, seed) for seed in range(6)]
    made = ModelQuantizer(QConfig.get_default_config(preset)).quantize_model(proto, None, samples[:4])
    want, got = (np.stack([models.run(one, feed)[0] for feed in samples[4:]]) for one in (proto, made))
    assert 10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()) > 20


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wide", [1.0, 4.0, 1 / 4.0])
def test_parts_alike_stay_joined(form: str, wide: float) -> None:
    proto = _model(form, wide)
    fired, same, refused = _moved(proto)
    assert fired == 0 and not refused
    assert [node.op_type for node in same.graph.node] == [node.op_type for node in proto.graph.node]


#: factors of x and of x again, each of two channels; whether they are told apart, in Mul and in Div
SIZES = {
    "at the bound": ([1, 1, 8, 8], True, True),
    "below it": ([1, 1, 7.9, 7.9], False, False),
    "large in both": ([1, 100, 100, 100], False, True),
    "small in both": ([1, 100, 1, 1], True, False),
    "a part of zeros": ([0, 0, 1, 1], False, False),
    "all zeros": ([0, 0, 0, 0], False, False),
    "one zero": ([0, 1, 1, 1], False, False),
    "one number": ([100], False, False),
}


def _decided(
    body: str, inputs: str = "float[1, 2, 5, 5] x", **weights: object
) -> tuple[int, tuple[str, ...], list[str]]:
    """How many moved, what was told, and which operators read the Concat in the end."""
    arrays = {name: np.asarray(array) for name, array in weights.items()}
    fired, made, told = _moved(models.model(f"g ({inputs}) => (float y) {{ {body} }}", arrays, domains={"my": 1}))
    joined = next(node.output[0] for node in made.graph.node if node.op_type == "Concat")
    return fired, told, [node.op_type for node in made.graph.node if joined in node.input]


@pytest.mark.parametrize("kind", ["Mul", "Div"])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_largest_factor_of_each_part_decides(sizes: str, kind: str) -> None:
    factors, *moves = SIZES[sizes]
    s = np.float32(factors).reshape(-1, 1, 1)
    assert _decided(f"j = Concat <axis = 1> (x, x) y = {kind} (j, s)", s=s)[0] == moves[kind == "Div"]


S = np.float32([1, 1, 100, 100])
NORM = dict.fromkeys(("g", "b", "m"), S) | {"v": np.float32([1, 1, 1, 1])}
FREE = "float[N, 2, 3] free, float[2, 2, 3] known, float[4] line, int32[1, 2, 5, 5] n"
FREE = f"{FREE}, float[3, 2, N] thin, float[3, 1, 2] slim"
COLUMN = S.reshape(4, 1, 1)


@pytest.mark.parametrize(
    ("body", "weights", "fired", "told"),
    [
        ("j = Concat <axis = 1> (x, x) y = Div (s, j)", {"s": S.reshape(4, 1, 1)}, 0, ""),
        ("j = Concat <axis = 1> (x, x) k = Relu (x) l = Concat <axis = 1> (k, k) y = Mul (j, l)", {}, 0, ""),
        ("j = Concat <axis = 1> (n, n) y = Mul (j, s)", {"s": np.int32(S).reshape(4, 1, 1)}, 0, ""),
        ("j = Concat <axis = 1> (x, x) y = BatchNormalization (j, g, b, m, v)", NORM, 1, ""),
        ("j = Concat <axis = 1> (x, x) y = BatchNormalization <training_mode = 1> (j, g, b, m, v)", NORM, 0, ""),
        ("j = Concat <axis = 1> (x, x) y = BatchNormalization (j, line, b, m, v)", NORM, 0, ""),
        ("j = Concat <axis = 0> (line, line) y = Mul (j, s)", {"s": np.repeat(S, 2)}, 1, ""),
        ("j = Concat <axis = 1> (x, x) y = Mul (j, s)", {"s": S.reshape(1, 4, 1, 1)}, 1, ""),
        ("j = Concat <axis = 1> (x, x) y = Mul (j, s)", {"s": S.reshape(1, 1, 4, 1, 1)}, 0, "the constant"),
        ("j = Concat <axis = 1> (x, x) y = Mul (j, s)", {"s": np.float32([1, 2, 3, 4, 50])}, 0, ""),
        ("j = Concat <axis = 1> (x, x) y = Mul (j, s)", {"s": np.ones((4, 5, 1), np.float32)}, 0, ""),
        ("j = Concat <axis = 1> (x, x) y = Mul (j, s)", {"s": np.tile(COLUMN, (1, 5, 5))}, 1, ""),
        ("j = Concat <axis = 1> (x, x) y = Mul (j, s)", {"s": np.stack([COLUMN] * 3)}, 0, "the constant"),
        ("j = Concat <axis = 1> (thin, thin) y = Mul (j, s)", {"s": np.tile(COLUMN[..., 0], 7)}, 0, "the constant"),
        ("j = Concat <axis = 1> (slim) y = Mul (j, s)", {"s": S.reshape(4, 1)}, 0, "the constant"),
        ("j = Concat <axis = 1> (x) y = Mul (j, s)", {"s": S[1:3].reshape(2, 1, 1)}, 0, ""),
        ("k = my.Op (x) j = Concat <axis = 1> (k, x) y = Mul (j, s)", {"s": S}, 0, "the rank"),
        ("k = my.Op (x) j = Concat <axis = 1> (x, k) y = Mul (j, s)", {"s": S}, 0, "the rank"),
        ("k = my.Op (x) j = Concat <axis = 1> (k, k) y = Mul (j, s)", {"s": S}, 0, "the rank"),
        ("j = Concat <axis = 0> (known, free) y = Mul (j, s)", {"s": S.reshape(4, 1, 1)}, 0, "the size"),
    ],
)
def test_what_constants_and_parts_must_be(body: str, weights: dict[str, np.ndarray], fired: int, told: str) -> None:
    made, why, _ = _decided(body, f"float[1, 2, 5, 5] x, {FREE}", **weights)
    assert made == fired and len(why) == bool(told) and told in "".join(why)


@pytest.mark.parametrize(
    ("behind", "t", "reads"),
    [
        ("Add (m, t)", [[[0.5]]], "Relu"),
        ("Add (m, t)", [[[[0.5]]]], "Relu"),
        ("Sub (t, m)", [[[0.5]]], "Sub"),
        ("Max (m, t)", [[[0.5]]], "Max"),
        ("my.Add (m, t)", [[[0.5]]], "Add"),
        ("Add (m, x1)", [0.5], "Add"),
        ("Add (m, t)", [[[1], [2], [3], [4], [5]]], "Relu"),
        ("Add (m, t)", [[[[1]]], [[[2]]]], "Add"),
    ],
)
def test_only_a_constant_shift_moves_too(behind: str, t: object, reads: str) -> None:
    body = f"x1 = ReduceMax (x) j = Concat <axis = 1> (x, x) m = Mul (j, s) a = {behind} y = Relu (a)"
    assert _decided(body, s=S.reshape(4, 1, 1), t=np.float32(t)) == (1, (), [reads])


def test_what_is_behind_a_batch_normalization_stays() -> None:
    body = "j = Concat <axis = 1> (x, x) n = BatchNormalization (j, g, b, m, v) a = Add (n, t) y = Relu (a)"
    assert _decided(body, t=np.float32(0.5), **NORM) == (1, (), ["Add"])


def _text(body: str, shape: str = "1, 8, 5, 5", outputs: str = "float[1, 8, 5, 5] y") -> onnx.ModelProto:
    graph = f"""
    parts (float[{shape}] x, float[N, 2, 3] free) => ({outputs}) {{
        {body}
    }}"""
    s = np.repeat(np.float32([1, WIDE]), 8)
    weights = {"s": s.reshape(16, 1, 1), "s3": np.repeat(np.float32([1, WIDE]), 2).reshape(1, 1, 1, 4)}
    return models.model(graph, {name: array for name, array in weights.items() if name in body})


def _returned(form: str) -> onnx.ModelProto:
    """What the Concat makes is an output, and a Relu reads it."""
    proto = _model(form)
    proto.graph.node.append(onnx.helper.make_node("Relu", ["j"], ["z"]))
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, 1, [1, 8, 5, 5]) for name in "jz")
    return proto


def _ending_a_branch(form: str) -> onnx.ModelProto:
    """The Concat is outside of the branch of an If whose output the normalization makes."""
    proto = _model(form)
    *before, last = proto.graph.node
    ends = next(k for k, node in enumerate(before) if "j" in node.input)
    inside = [*before[ends:]]
    then, other = (
        onnx.helper.make_graph(nodes, name, [], [onnx.helper.make_tensor_value_info(made, 1, [1, 8, 5, 5])])
        for nodes, name, made in (
            (inside, "then", "y"),
            ([onnx.helper.make_node("Concat", ["x", "x"], ["n"], axis=1)], "else", "n"),
        )
    )
    del proto.graph.node[ends:]
    choice = onnx.helper.make_node("If", ["yes"], ["chosen"], "choice", then_branch=then, else_branch=other)
    last.input[0] = "chosen"
    proto.graph.node.extend([choice, last])
    proto.graph.input.append(onnx.helper.make_tensor_value_info("yes", 9, []))
    return proto


#: how -> the model, and the preset: where a Concat stays, AlignConcat rounds its parts with its own scale
SHARED = {"returned": (_returned, "A8W8_CPU"), "ending a branch": (_ending_a_branch, "A8W8")}


@pytest.mark.parametrize("how", SHARED)
@pytest.mark.parametrize("form", FORMS)
def test_a_concat_that_others_read_stays_for_them(form: str, how: str) -> None:
    build, preset = SHARED[how]
    proto = build(form)
    fired, moved, _ = _moved(proto)
    assert fired == 1
    onnx.checker.check_model(moved, full_check=True)
    feeds = {**models.feeds(proto), "yes": np.array(True)}
    feeds = {value.name: feeds[value.name] for value in proto.graph.input}
    models.assert_close(models.run(moved, feeds), models.run(proto, feeds), 1e-5)
    samples = [feeds, {**feeds, "x": -feeds["x"]}]
    made = ModelQuantizer(QConfig.get_default_config(preset)).quantize_model(proto, None, samples)
    assert made is not None
    want, got = (models.run(one, feeds)[0] for one in (proto, made))
    assert 10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()) > 20


@pytest.mark.parametrize(
    ("body", "outputs", "told"),
    [
        ("j = Concat <axis = 1> (x, x)\n y = Mul (j, j)", "float[1,16,5,5] y", 0),
        ("j = Concat <axis = 2> (x, x)\n a = Concat <axis = 1> (j, j)\n k = Relu(a)\n y = Mul (k, s)", "float y", 0),
        ("a = Relu (free)\n j = Concat <axis = 0> (free, a)\n y = Mul (j, s3)", "float y", 1),
    ],
)
def test_what_cannot_move_stays(body: str, outputs: str, told: int) -> None:
    """No constant; another axis; sizes that are not known, which is told."""
    proto = _text(body, outputs=outputs)
    fired, same, refused = _moved(proto)
    assert (fired, len(refused)) == (0, told)
    assert [node.op_type for node in same.graph.node] == [node.op_type for node in proto.graph.node]


def test_names_of_the_normalization_hold_for_its_parts() -> None:
    """A node that the user excludes by name stays float in front of the Concat too."""
    proto = _model("mul add")
    for number, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}_{number}"
    config = QConfig.get_default_config("A8W8")
    excluded = [node.name for node in proto.graph.node if node.op_type in ("Mul", "Add")]
    config.global_quant_config.nodes_to_exclude = excluded
    samples = [models.feeds(proto, seed) for seed in range(2)]
    made = ModelQuantizer(config).quantize_model(proto, None, samples)
    written = {name for node in made.graph.node if node.op_type == "QuantizeLinear" for name in node.input}
    muls = [node for node in made.graph.node if node.op_type == "Mul"]
    assert len(muls) == 2 and not written.intersection(node.output[0] for node in muls)
