"""What the CPU's kernels cost, by hand: rows of the table, kernels of several nodes, conversions, and the best choice.

Expected times are computed here from the columns of the table; the best choice is found by trying all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models

from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.bodies import alone, graphs
from quark.onnx.graph.model import load
from quark.onnx.qdq import slower

ROWS = {
    tuple(line.split("\t")[:2]): [float(part) for part in line.split("\t")[2:]]
    for line in files("quark.onnx.qdq").joinpath("kernel_times.tsv").read_text("utf-8").splitlines()
    if line[0] != "#" and not line.startswith("kind")
}
TABLES = Path(__file__).parents[2] / "benchmarks" / "results" / "kernel_times"
IMAGE = "float[1, 8, 6, 6]"
FORMS = ("float", "integer")


def test_the_table_is_the_mean_of_what_was_measured_on_each_processor_and_number_of_threads() -> None:
    """By hand: each setting counts by its speed of float convolutions of 1x1, so that no slow one decides alone."""
    settings = []
    for name in ("narrow_1", "wide_1", "wide_2"):
        lines = (TABLES / f"{name}.tsv").read_text("utf-8").splitlines()
        cells = [line.split("\t") for line in lines if line[0] != "#"][1:]
        settings.append({(kind, form): [float(one) for one in times] for kind, form, *times in cells})
    speeds = [1 / one["Conv 1x1", "float"][2] for one in settings]
    assert ROWS.keys() == settings[0].keys()
    for key, row in ROWS.items():
        for k, found in enumerate(row):
            wanted = sum(speed * one[key][k] for speed, one in zip(speeds, settings, strict=True)) / sum(speeds)
            assert found == pytest.approx(wanted, rel=0.006, abs=1e-9)  # three digits are stored


def time(kind: str, form: str, elements: float, products: float = 0.0) -> float:
    call, element, product = ROWS[kind, form]
    return call + element * elements / 1000 + product * products / 1000000


def loaded(graph: str, shapes: dict[str, Sequence[int]] | None = None, scalars: Sequence[str] = ()) -> ir.Model:
    weights = {name: models.normal(*shape) for name, shape in (shapes or {}).items()}
    weights |= {name: models.normal() for name in scalars}
    model = load(onnx.shape_inference.infer_shapes(models.model(graph, weights, 18)))
    for number, node in enumerate(model.graph):
        node.name = f"n{number}"
    return model


#: Graph, weights, the row, elements that are moved, products.
SINGLE = {
    "conv": (
        f"({IMAGE} x) => (float[1, 5, 4, 4] y) {{ y = Conv (x, w) }}",
        (5, 8, 3, 3),
        "Conv narrow",
        16 * 3,
        256 * 72,
    ),
    "1x1": (
        f"({IMAGE} x) => (float[1, 5, 6, 6] y) {{ y = Conv (x, w) }}",
        (5, 8, 1, 1),
        "Conv 1x1 narrow",
        36,
        576 * 8,
    ),
    "3x1": (
        f"({IMAGE} x) => (float[1, 9, 4, 6] y) {{ y = Conv (x, w) }}",
        (9, 8, 3, 1),
        "Conv narrow",
        24 * 3,
        384 * 24,
    ),
    "16": (f"({IMAGE} x) => (float[1, 16, 4, 4] y) {{ y = Conv (x, w) }}", (16, 8, 3, 3), "Conv", 288, 256 * 72),
    "17": (
        f"({IMAGE} x) => (float[1, 17, 6, 6] y) {{ y = Conv (x, w) }}",
        (17, 8, 1, 1),
        "Conv 1x1 odd",
        612,
        1152 * 8,
    ),
    "depthwise 8": (
        "(float[1, 8, 6, 6] x) => (float[1, 8, 4, 4] y) { y = Conv<group = 8> (x, w) }",
        (8, 1, 3, 3),
        "Conv depthwise 8",
        8 * 36,
        16 * 16 * 9,
    ),
    "depthwise 32": (
        "(float[1, 32, 6, 6] x) => (float[1, 32, 4, 4] y) { y = Conv<group = 32> (x, w) }",
        (32, 1, 3, 3),
        "Conv depthwise",
        32 * 36,
        32 * 16 * 9,
    ),
    "depthwise 24": (
        "(float[1, 24, 6, 6] x) => (float[1, 24, 4, 4] y) { y = Conv<group = 24> (x, w) }",
        (24, 1, 3, 3),
        "Conv depthwise 8",
        24 * 36,
        32 * 16 * 9,
    ),
    "depthwise 12": (
        "(float[1, 12, 6, 6] x) => (float[1, 12, 4, 4] y) { y = Conv<group = 12> (x, w) }",
        (12, 1, 3, 3),
        "Conv depthwise 4",
        12 * 36,
        16 * 16 * 9,
    ),
    "depthwise 20": (
        "(float[1, 20, 6, 6] x) => (float[1, 20, 4, 4] y) { y = Conv<group = 20> (x, w) }",
        (20, 1, 3, 3),
        "Conv depthwise 4",
        20 * 36,
        32 * 16 * 9,
    ),
    "depthwise 22": (
        "(float[1, 22, 6, 6] x) => (float[1, 22, 4, 4] y) { y = Conv<group = 22> (x, w) }",
        (22, 1, 3, 3),
        "Conv depthwise 1",
        (0, (22 + 8 * 6) * 16 * 9),
        22 * 16 * 9,
    ),
    "grouped": (
        f"({IMAGE} x) => (float[1, 8, 4, 4] y) {{ y = Conv<group = 2> (x, w) }}",
        (8, 4, 3, 3),
        "Conv grouped",
        288,
        128 * 36,
    ),
    "nearest": (f"({IMAGE} x) => (float[1, 8, 12, 12] y) {{ y = Resize (x, , w) }}", (4,), "Resize", 8 * 144, 0),
    "linear": (
        f'({IMAGE} x) => (float[1, 8, 12, 12] y) {{ y = Resize <mode = "linear"> (x, , w) }}',
        (4,),
        "Resize linear",
        8 * 144,
        0,
    ),
    "image": (
        "(float[1, 4, 6, 6] x) => (float[1, 5, 4, 4] y) { y = Conv (x, w) }",
        (5, 4, 3, 3),
        "Conv image",
        16 * 3,  # places, and the rows of the kernel that are copied for each
        256 * 36,  # 16 channels are computed at a time
    ),
    "five channels": (
        "(float[1, 5, 6, 6] x) => (float[1, 5, 4, 4] y) { y = Conv (x, w) }",
        (5, 5, 3, 3),
        "Conv narrow",
        16 * 3,
        256 * 45,
    ),
    "volume": (
        "(float[1, 3, 4, 4, 4] x) => (float[1, 5, 2, 2, 2] y) { y = Conv (x, w) }",
        (5, 3, 3, 3, 3),
        "Conv 3D",
        (8 * 27 * 3, 8 * 27),  # places, and what the kernel covers at each: in float of every channel
        8 * 16 * 81,
    ),
    "wide volume": (
        "(float[1, 3, 4, 4, 4] x) => (float[1, 17, 2, 2, 2] y) { y = Conv (x, w) }",
        (17, 3, 3, 3, 3),
        "Conv 3D",
        (8 * 27 * 3, 8 * 27),
        8 * 32 * 81,
    ),
    "grouped volume": (
        "(float[1, 4, 4, 4, 4] x) => (float[1, 16, 2, 2, 2] y) { y = Conv<group = 2> (x, w) }",
        (16, 2, 3, 3, 3),
        "Conv 3D",
        (8 * 27 * 4, 8 * 27 * 2),  # in integers once for each group
        8 * 16 * 54,
    ),
    "volume, place by place": (
        "(float[1, 8, 4, 4, 4] x) => (float[1, 16, 4, 4, 4] y) { y = Conv (x, w) }",
        (16, 8, 1, 1, 1),
        "Conv 1x1",
        64 * 16,
        64 * 16 * 8,
    ),
    "depthwise volume": (
        "(float[1, 3, 4, 4, 4] x) => (float[1, 3, 2, 2, 2] y) { y = Conv<group = 3> (x, w) }",
        (3, 1, 3, 3, 3),
        "Conv 3D depthwise",
        8 * 27,
        24 * 27,
    ),
    "sound": (
        "(float[1, 3, 9] x) => (float[1, 5, 7] y) { y = Conv (x, w) }",
        (5, 3, 3),
        "Conv 1D odd",
        35,
        16 * 16 * 9,
    ),
    "sound of odd channels": (
        "(float[1, 7, 9] x) => (float[1, 16, 7] y) { y = Conv (x, w) }",
        (16, 7, 3),
        "Conv 1D odd",
        112,
        16 * 16 * 21,
    ),
    "points of a sound": (
        "(float[1, 8, 24] x) => (float[1, 20, 24] y) { y = Conv (x, w) }",
        (20, 8, 1),
        "Conv 1D 1",
        20 * 24,
        32 * 24 * 8,
    ),
    "no point of a sound": (
        "(float[1, 8, 2] x) => (float[1, 20, 0] y) { y = Conv (x, w) }",
        (20, 8, 3),
        "Conv 1D",
        16,
        0,
    ),
    "one point of a sound": (
        "(float[1, 8, 1] x) => (float[1, 20, 1] y) { y = Conv (x, w) }",
        (20, 8, 1),
        "Conv 1D 1",
        20,
        32 * 4 * 8,
    ),
    "depthwise sound": (
        "(float[1, 3, 9] x) => (float[1, 3, 7] y) { y = Conv<group = 3> (x, w) }",
        (3, 1, 3),
        "Conv 1D depthwise",
        27,
        21 * 3,
    ),
    "rows": ("(float[3, 8] x) => (float[3, 5] y) { y = MatMul (x, w) }", (8, 5), "MatMul weight", 24, 120),
    "rows of one": ("(float[2, 8] x) => (float[2, 1] y) { y = MatMul (x, w) }", (8, 1), "MatMul weight", 16, 16),
    "one row": ("(float[1, 8] x) => (float[1, 5] y) { y = MatMul (x, w) }", (8, 5), "MatMul row", 8, 40),
    "two rows": ("(float[2, 3] x) => (float[2, 9] y) { y = Gemm (x, w) }", (3, 9), "MatMul weight", 18, 54),
    "activations": (
        "(float[2, 8] x, float[8, 5] z) => (float[2, 5] y) { y = MatMul (x, z) }",
        None,
        "MatMul",
        40,
        80,
    ),
    "free": ("(float[N, 8, M, K] x) => (float[N, 8, M, K] y) { y = Relu (x) }", None, "Relu", 8 * 64 * 64, 0),
    "like another": (f"({IMAGE} x) => (float[1, 8, 6, 6] y) {{ y = Clip (x) }}", None, "Relu", 288, 0),
    "own row": (f"({IMAGE} x) => (float[1, 8, 6, 6] y) {{ y = Tanh (x) }}", None, "Tanh", 288, 0),
    "no row": (f"({IMAGE} x) => (float[1, 8, 6, 6] y) {{ y = Erf (x) }}", None, "Sqrt", 288, 0),
    "makes more": (
        "(float[1, 2, 3, 3] x, int64[4] s) => (float[2, 2, 3, 3] y) { y = Expand (x, s) }",
        None,
        "Concat",
        36,
        0,
    ),
    "concat": (
        "(float[1, 2, 3] x, float[1, 2, 4] z) => (float[1, 2, 7] y) { y = Concat<axis = 2> (x, z) }",
        None,
        "Concat",
        14,
        0,
    ),
    "two operands": ("(float[4, 6] x, float[6] z) => (float[4, 6] y) { y = Add (x, z) }", None, "Add", 24, 0),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_node_takes_what_its_row_says(name: str) -> None:
    text, weight, kind, elements, products = SINGLE[name]
    node = loaded(f"g {text}", {"w": weight} if weight else {}).graph[0]
    counts = elements if isinstance(elements, tuple) else (elements, elements)
    expected = [time(kind, form, each, products) for form, each in zip(("float", "integer"), counts, strict=True)]
    assert slower._node_times(node) == pytest.approx(expected)
    assert expected[0] != pytest.approx(expected[1])


@pytest.mark.parametrize(
    ("body", "one"),
    [
        ("m = MatMul (x, z) y = Mul (m, f)", True),
        ("m = MatMul (x, z) y = Mul (f, m)", True),
        ("m = MatMul (x, z) y = Div (m, f)", True),
        ("m = MatMul (x, z) y = Div (f, m)", False),
        ("m = MatMul (x, z) y = Mul (m, row)", False),
        ("m = MatMul (x, z) n = Neg (m) y = Mul (m, f)", False),
        ("m = Add (x, z) y = Mul (m, f)", False),
        ("m = Gemm (x, z) y = Mul (m, f)", False),
        ("m = MatMul (x, z) y = Mul (m, x)", False),
    ],
)
def test_a_number_behind_a_product_costs_a_float_kernel_nothing(body: str, one: bool) -> None:
    shapes, scalars = ({"row": (8,)}, []) if "row" in body else ({}, ["f"] if "f)" in body or "(f" in body else [])
    graph = list(loaded(f"g (float[8, 8] x, float[8, 8] z) => (float[8, 8] y) {{ {body} }}", shapes, scalars).graph)
    chosen = {graph[0], graph[-1]}
    units = slower._units(graph, chosen)
    times = [slower._node_times(node) for node in (graph[0], graph[-1])]
    assert len(units) == (1 if one else 2)
    assert units[0].float_time == times[0][0]
    assert sum(unit.integer_time for unit in units) == pytest.approx(times[0][1] + times[1][1])


#: Shapes of input and weight, group, microseconds in float and in integers (ONNX Runtime 1.31, AVX-512 VNNI).
TIMED = {
    "volume of 8 channels": ((8, 16, 16, 16), (8, 8, 3, 3, 3), 1, 446, 1068),
    "volume of 3 channels": ((3, 16, 16, 16), (32, 3, 3, 3, 3), 1, 171, 706),
    "volume of 4 groups": ((16, 12, 12, 12), (16, 4, 3, 3, 3), 4, 255, 1038),
    "volume of 64 channels": ((64, 16, 16, 16), (64, 64, 3, 3, 3), 1, 10619, 2698),
    "picture of 8 channels": ((8, 56, 56), (8, 8, 3, 3), 1, 66, 88),
    "picture of 24 channels": ((24, 56, 56), (24, 24, 3, 3), 1, 495, 123),
    "12 channels, 7 x 1": ((12, 128, 62), (12, 12, 7, 1), 1, 180, 370),
    "depthwise of 20": ((20, 28, 28), (20, 1, 3, 3), 20, 7.2, 36.4),
    "depthwise of 24": ((24, 28, 28), (24, 1, 3, 3), 24, 7, 23),
    "depthwise of 6": ((6, 40, 40), (6, 1, 3, 3), 6, 12, 61),
    "depthwise of 21": ((21, 40, 40), (21, 1, 3, 3), 21, 41, 60),
    "depthwise of 31": ((31, 40, 40), (31, 1, 3, 3), 31, 59, 90),
    "depthwise of 59": ((59, 40, 40), (59, 1, 3, 3), 59, 117, 89),
    "30 channels, 1 x 1": ((30, 28, 28), (30, 30, 1, 1), 1, 7.2, 10.2),
    "32 channels, 1 x 1": ((32, 28, 28), (32, 32, 1, 1), 1, 6.2, 3.2),
    "58 channels, 1 x 1": ((58, 28, 28), (58, 58, 1, 1), 1, 24.2, 18.2),
}


@pytest.mark.parametrize("name", TIMED)
def test_the_table_prefers_what_was_faster(name: str) -> None:
    """And by about as much: a row too few, or a formula that misses what is copied, was wrong by 2 to 5 times."""
    read, weight, group, *measured = TIMED[name]
    inputs, pads = ", ".join(map(str, (1, *read))), [size // 2 for size in weight[2:]] * 2
    made = ", ".join(map(str, (1, weight[0], *read[1:])))
    text = f"(float[{inputs}] x) => (float[{made}] y) {{ y = Conv<group = {group}, pads = {pads}> (x, w) }}"
    floats, integers = slower._node_times(loaded(f"g {text}", {"w": weight}).graph[0])
    assert (floats < integers) == (measured[0] < measured[1])
    assert 0.5 < (floats / integers) / (measured[0] / measured[1]) < 2


LOOP = "Loop <body = b (int64 i, bool g, float[1] s) => (bool o, float[1] t) { o = Identity(g) t = Relu(s) }>"
SCAN = "Scan <num_scan_inputs = 1"


@pytest.mark.parametrize(("node", "count", "expected"), [
    (f"{LOOP} (n, g, x)", 12, 12), (f"{LOOP} (n, g, x)", 10**9, 64), (f"{LOOP} (m, g, x)", 12, 64),
    (f"{SCAN}, body = b (float s) => (float t) {{ t = Relu(s) }}> (x)", 1, 7),
    (f"{SCAN}, scan_input_axes = [1], body = b (float[7] s) => (float[7] t) {{ t = Relu(s) }}> (z)", 1, 5),
    ("If <then_branch = b () => (float[7] t) { t = Relu(x) }, else_branch = b () => (float[7] t) { t = Neg(x) }> (g)",
     1, 1),
])  # fmt: skip
def test_how_often_a_body_runs(node: str, count: int, expected: int) -> None:
    model = models.model(
        f"g (float[7] x, float[7, 5] z, int64 m, bool g) => (float[n] y) {{ y = {node} }}", {"n": np.array(count)}
    )
    whole = load(model)
    [(made, _, body), *_] = graphs(whole)
    assert slower.runs_of(made) == expected == alone(body, whole)[0].meta[slower.RUNS]


def test_a_body_that_runs_often_is_left_in_float_for_less() -> None:
    """A step of a recurrent network is smaller than the smallest model: its integers ran at 0.43 of float."""
    text = """g (float[1, 64] h, float[steps, 1, 64] x) => (float[1, 64] n, float[steps, 1, 64] y) {
        n, y = Scan <num_scan_inputs = 1, body = b (float[1, 64] s, float[1, 64] z)
            => (float[1, 64] t, float[1, 64] u) {
            a = MatMul(s, w) c = MatMul(z, v) d = Add(a, c) t = Tanh(d) u = Relu(t) }> (h, x) }"""
    matrices = {"w": models.normal(64, 64), "v": models.normal(64, 64)}
    config = get_default_config("A8W8_CPU")
    config.extra_options["PrintSummary"] = False
    for steps, inside in ((20, False), (1, True)):
        model = models.model(text.replace("steps", str(steps)), matrices)
        made = ModelQuantizer(Config(global_quant_config=config)).run(model, None, [models.feeds(model)])
        assert any(node.quantized for name, node in made.plan.nodes.items() if "body/" in name) == inside


def test_a_transposed_convolution_has_no_integer_kernel() -> None:
    text = "g (float[1, 6, 4, 4] x) => (float[1, 5, 6, 6] y) { y = ConvTranspose (x, w) }"
    node = loaded(text, {"w": (6, 5, 3, 3)}).graph[0]
    whole = time("Conv", "float", 180, 96 * 45)  # products per input element: output channels times kernel
    apart = time("Sqrt", "integer", 180) - time("Sqrt", "float", 180)
    assert slower._node_times(node) == pytest.approx((whole, whole + apart))


@pytest.mark.parametrize(
    "text",
    [
        "(int64[3] x) => (float[3] y) { y = Cast<to = 1> (x) }",
        "(float[3] x) => (float y) { y = Relu (x) }",
        "() => (float[8, 5] y) { y = Relu (w) }",
    ],
)
def test_what_reads_no_activation_of_known_rank_takes_no_time(text: str) -> None:
    model = loaded(f"g {text}", {"w": (8, 5)} if "(w)" in text else {})
    if "float y" in text:
        model.graph[0].outputs[0].shape = None
    assert slower._node_times(model.graph[0]) == (0.0, 0.0)


def test_what_has_no_known_shape_counts_as_one() -> None:
    model = loaded("g (float[1, 6, 4, 4] x, float w) => (float[1, 5, 4, 4] y) { y = Conv (x, w) }")
    node = model.graph[0]
    node.inputs[1].shape = None
    assert slower._kind(node) == ("Conv image", 80.0)
    node.outputs[0].shape = None
    assert slower._kind(node) == ("Conv image", 0.0)
    rows = loaded("g (float[4, 8] x) => (float[4, 5] y) { y = MatMul (x, w) }", {"w": (8, 5)}).graph[0]
    rows.inputs[0].shape = None
    assert slower._kind(rows) == ("MatMul weight", 20.0)
    rows.outputs[0].shape = None
    assert slower._kind(rows) == ("MatMul row", 0.0)


# ---- kernels of several nodes ----------------------------------------------------------------------------------------

X, Y = f"({IMAGE} x", "=> (float[1, 8, 6, 6] y)"
CONV = tuple(time("Conv 1x1 narrow", form, 36, 36 * 16 * 8) for form in FORMS)
ADD, RELU, SIGMOID, TANH = (
    tuple(time(kind, form, 288) for form in FORMS) for kind in ("Add", "Relu", "Sigmoid", "Tanh")
)
#: Body, and per kernel: the operators, float time, integer time.
KERNELS = {
    "conv and relu": ("a = Conv (x, w) y = Relu (a)", [("Conv Relu", CONV[0], CONV[1])]),
    "conv and clip": ("a = Conv (x, w) y = Clip (a)", [("Conv Clip", CONV[0], CONV[1])]),
    "conv and tanh": ("a = Conv (x, w) y = Tanh (a)", [("Conv Tanh", CONV[0], CONV[1] + TANH[1])]),
    "add and relu": ("a = Add (x, x) y = Relu (a)", [("Add Relu", ADD[0] + RELU[0], ADD[1])]),
    "add and tanh": ("a = Add (x, x) y = Tanh (a)", [("Add", *ADD), ("Tanh", *TANH)]),
    "sigmoid and relu": ("a = Sigmoid (x) y = Relu (a)", [("Sigmoid", *SIGMOID), ("Relu", *RELU)]),
    "conv read twice": (
        "a = Conv (x, w) b = Relu (a) y = Add (a, b)",
        [("Conv", *CONV), ("Relu", *RELU), ("Add", *ADD)],
    ),
    "silu": ("a = Sigmoid (x) y = Mul (x, a)", [("Sigmoid Mul", *(time("SiLU", form, 288) for form in FORMS))]),
    "silu turned": ("a = Sigmoid (x) y = Mul (a, x)", [("Sigmoid Mul", *(time("SiLU", form, 288) for form in FORMS))]),
    "gate of another": (
        "b = Relu (x) a = Sigmoid (b) y = Mul (x, a)",
        [("Relu", *RELU), ("Sigmoid", *SIGMOID), ("Mul", *(time("Mul", form, 288) for form in FORMS))],
    ),
    "gate read twice": (
        "a = Sigmoid (x) b = Mul (x, a) y = Add (a, b)",
        [("Sigmoid", *SIGMOID), ("Mul", *(time("Mul", form, 288) for form in FORMS)), ("Add", *ADD)],
    ),
    "sum of a gate": ("a = Sigmoid (x) y = Add (x, a)", [("Sigmoid", *SIGMOID), ("Add", *ADD)]),
    "gate of a conv": (
        "c = Conv (x, w) a = Sigmoid (c) y = Mul (c, a)",
        [("Conv", *CONV), ("Sigmoid Mul", *(time("SiLU", form, 288) for form in FORMS))],
    ),
}


def told(units: Sequence[slower._Unit]) -> list[tuple[str, float, float]]:
    return [(" ".join(node.op_type for node in one.nodes), one.float_time, one.integer_time) for one in units]


def same(found: list[tuple[str, float, float]], expected: list[tuple[str, float, float]]) -> None:
    assert [one[0] for one in found] == [one[0] for one in expected]
    for (_, *times), (_, *others) in zip(found, expected, strict=True):
        assert times == pytest.approx(others)


@pytest.mark.parametrize("name", KERNELS)
def test_nodes_of_one_kernel_are_one_unit(name: str) -> None:
    body, expected = KERNELS[name]
    model = loaded(f"g {X}) {Y} {{ {body} }}", {"w": (8, 8, 1, 1)} if "w)" in body else {})
    nodes = list(model.graph)
    same(told(slower._units(nodes, set(nodes))), expected)


def test_a_node_that_is_not_quantized_joins_no_kernel() -> None:
    model = loaded(f"g {X}) {Y} {{ a = Conv (x, w) y = Relu (a) }}", {"w": (8, 8, 1, 1)})
    nodes = list(model.graph)
    same(told(slower._units(nodes, {nodes[1]})), [("Relu", *RELU)])
    same(told(slower._units(nodes, {nodes[0]})), [("Conv", *CONV)])


NORMS = {
    "rms, div": "p = Pow(x, two) m = ReduceMean<keepdims = 1>(p) e = Add(m, two) r = Sqrt(e) y = Div(x, r)",
    "rms, mul": "p = Mul(x, x) m = ReduceMean(p) e = Add(m, two) r = Sqrt(e) d = Div(two, r) y = Mul(x, d)",
    "rms, reciprocal": "p = Pow(x, two) m = ReduceMean(p) e = Add(m, two) r = Sqrt(e) d = Reciprocal(r) y = Mul(x, d)",
    "gain": "p = Pow(x, two) m = ReduceMean(p) e = Add(m, two) r = Sqrt(e) n = Div(x, r) y = Mul(n, two)",
    "gain and bias": "p = Pow(x, two) m = ReduceMean(p) e = Add(m, two) r = Sqrt(e) n = Div(x, r) "
    "s = Mul(n, two) y = Add(s, two)",
    "centred": "a = ReduceMean(x) c = Sub(x, a) p = Pow(c, two) m = ReduceMean(p) e = Add(m, two) "
    "r = Sqrt(e) n = Div(c, r) s = Mul(n, two) y = Add(s, two)",
}
#: What is no normalization, by one node.
NO_NORMS = {
    "of something else": "z = Relu(x) p = Pow(z, two) m = ReduceMean(p) e = Add(m, two) r = Sqrt(e) y = Div(x, r)",
    "no mean": "p = Pow(x, two) m = ReduceSum(p) e = Add(m, two) r = Sqrt(e) y = Div(x, r)",
    "read twice": "p = Pow(x, two) m = ReduceMean(p) e = Add(m, two) r = Sqrt(e) d = Div(x, r) y = Add(d, r)",
    "no square": "p = Exp(x) m = ReduceMean(p) e = Add(m, two) r = Sqrt(e) y = Div(x, r)",
}


def chained(body: str) -> tuple[list[ir.Node], list[ir.Node]]:
    nodes = list(loaded(f"g (float[2, 4, 8] x) => (float[2, 4, 8] y) {{ {body} }}", scalars=["two"]).graph)
    for node in nodes:
        node.outputs[0].shape = ir.Shape([2, 4, 8])
        node.outputs[0].dtype = ir.DataType.FLOAT
    # shapes of the statistics do not matter here
    return nodes, [node for node in nodes if slower._norm(node)]


@pytest.mark.parametrize("name", NORMS)
def test_a_normalization_is_one_kernel_in_float(name: str) -> None:
    nodes, found = chained(NORMS[name])
    assert len(found) == 1
    assert set(slower._norm(found[0])) == set(nodes)
    integer = sum(slower._node_times(node)[1] for node in nodes)
    units = slower._units(nodes, set(nodes))
    assert len(units) == 1 and set(units[0].nodes) == set(nodes)
    assert units[0].float_time == pytest.approx(time("LayerNormalization", "float", 64))
    assert units[0].integer_time == pytest.approx(integer)
    some = set(nodes[::2])
    part = slower._units(nodes, some)
    assert len(part) == 1 and set(part[0].nodes) == some
    apart = sum(slower._node_times(node)[node in some] for node in nodes)
    assert part[0].integer_time == pytest.approx(apart)
    assert part[0].float_time == pytest.approx(time("LayerNormalization", "float", 64))


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_only_resembles_one_is_none(name: str) -> None:
    assert chained(NO_NORMS[name])[1] == []


@pytest.mark.parametrize("behind", ["s = Sub(n, two)", "s = Mul(n, n)", "s = Mul(n, x)"])
def test_a_gain_is_a_constant_factor(behind: str) -> None:
    body = f"p = Pow(x, two) m = ReduceMean(p) e = Add(m, two) r = Sqrt(e) n = Div(x, r) {behind} y = Relu(s)"
    nodes, found = chained(body)
    assert set(slower._norm(found[0])) == set(nodes[:5])


# ---- conversions -----------------------------------------------------------------------------------------------------


def test_tensors_between_kernels_cost_their_conversions() -> None:
    text = """g (float[1, 8, 6, 6] x) => (float[1, 8, 6, 6] y, float[8, 36] f) {
        a = Tanh (x) b = Tanh (a) c = Erf (a) y = Add (b, c) f = Flatten<axis = 2> (y) s = Shape (b) }"""
    model = loaded(text)
    nodes = {node.outputs[0].name: node for node in model.graph if node.op_type != "Shape"}
    of_node = {nodes["a"]: 0, nodes["b"]: 1, nodes["y"]: 2, nodes["f"]: 3}
    for node in nodes.values():
        node.outputs[0].dtype = ir.DataType.FLOAT
        node.outputs[0].shape = ir.Shape([8, 36] if node is nodes["f"] else [1, 8, 6, 6])
    found = [(one.maker, one.readers, one.quantize, one.dequantize) for one in slower._tensors(model, of_node)]
    image = time("QuantizeLinear image", "integer", 288), time("DequantizeLinear image", "integer", 288)
    plain = time("QuantizeLinear", "integer", 288), time("DequantizeLinear", "integer", 288)
    assert found == [
        (None, frozenset([0]), *image),
        (0, frozenset([1, None]), *image),
        (1, frozenset([2]), *image),
        (None, frozenset([2]), *image),
        (2, frozenset([3, None]), *image),
        (3, frozenset([None]), *plain),
    ]


def dear(times: list[tuple[float, float]]) -> list[slower._Unit]:
    return [slower._Unit([], one, other) for one, other in times]


def by_hand(times: list[tuple[float, float]], tensors: Sequence[slower._Tensor], integer: Sequence[bool]) -> float:
    total = sum(time[here] for time, here in zip(times, integer, strict=True))
    forms = {None: False, **dict(enumerate(integer))}
    for one in tensors:
        read = [forms[reader] for reader in one.readers]
        if forms[one.maker] and not all(read):
            total += one.dequantize
        if not forms[one.maker] and any(read):
            total += one.quantize
    return total


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = 5
    times = [tuple(map(float, random.integers(0, 12, 2))) for _ in range(size)]
    ends = [None, *range(size)]
    tensors = []
    for maker in ends:
        readers = {ends[k] for k in random.integers(0, size + 1, 2)} - {maker}
        if readers:
            tensors.append(slower._Tensor(maker, frozenset(readers), *map(float, random.integers(0, 6, 2))))
    units = dear(times)
    found = slower._cut(units, tensors, set())
    every = {one: by_hand(times, tensors, one) for one in itertools.product((False, True), repeat=size)}
    assert every[tuple(found)] == pytest.approx(min(every.values()))
    for choice, price in every.items():
        assert slower._total(units, tensors, choice) == pytest.approx(price)


def test_what_is_fixed_computes_in_integers() -> None:
    model = loaded(f"g {X}) {Y} {{ y = Tanh (x) }}")
    unit = slower._Unit([model.graph[0]], 1.0, 100.0)
    assert slower._cut([unit], [], set()) == [False]
    assert slower._cut([unit], [], {model.graph[0]}) == [True]


def test_groups_are_what_tensors_join() -> None:
    tensors = [
        slower._Tensor(0, frozenset([1, None]), 0, 0),
        slower._Tensor(None, frozenset([2, 3]), 0, 0),
        slower._Tensor(5, frozenset([4]), 0, 0),
        slower._Tensor(4, frozenset([6, 1]), 0, 0),
    ]
    found = slower._groups([0, 1, 2, 3, 5, 6, 7], tensors)
    assert sorted(map(sorted, found)) == [[0, 1, 6], [2, 3], [5], [7]]


MEASURED = """g (float[1, 8, 6, 6] x) => (float[1, 8, 6, 6] y) { a = Tanh (x) b = Sqrt (a) y = Erf (b) }"""


@pytest.mark.parametrize(
    ("float_us", "left"),
    [
        ((500, 500, 500), {"n0", "n1", "n2"}),
        ((500, 1e5, 500), {"n0", "n2"}),
        ((970, 970, 970), {"n0", "n1", "n2"}),
        ((996, 996, 996), set()),
        ((1e5, 1e5, 1e5), set()),
    ],
)
def test_measured_times_take_the_place_of_the_table(float_us: tuple[float, ...], left: set[str]) -> None:
    model = loaded(MEASURED)
    seconds = [{f"n{k}": one * 1e-6 for k, one in enumerate(float_us)}, {f"n{k}": 1e-3 for k in range(3)}]
    assert {node.name for node in slower.faster_in_float(model, list(model.graph), set(), seconds)} == left


def conversions(model: ir.Model) -> dict[str, float]:
    """Seconds that Q and DQ take where one node alone is in integers."""
    of_node = {node: k for k, node in enumerate(model.graph)}
    found = dict.fromkeys(map(str, (node.name for node in model.graph)), 0.0)
    for one in slower._tensors(model, of_node):
        for k, name in enumerate(found):
            found[name] += 1e-6 * (one.dequantize * (one.maker == k) + one.quantize * (k in one.readers))
    return found


@pytest.mark.parametrize("base", [1e-3, 1e-2, 5e-4])
def test_a_group_that_saves_less_than_its_part_of_the_model_is_quantized_with_the_rest(base: float) -> None:
    """Three layers that have nothing to do with each other; the second saves a bit less or more, the others a lot."""
    text = """g (float[4] x, float[4] z, float[4] w) => (float[4] y, float[4] u, float[4] v) {
        y = Tanh (x) u = Tanh (z) v = Tanh (w) }"""
    limit = max(0.0002 * (3.2 * base + 12e-5), 0.2e-6)
    for saved, left in ((0.9 * limit, {"n0", "n2"}), (1.2 * limit, {"n0", "n1", "n2"})):
        model = loaded(text)
        slow = base * 1.1 + 6e-5
        integer = {"n0": slow, "n1": base + saved - conversions(model)["n1"], "n2": slow}
        seconds = [dict.fromkeys(integer, base), integer]
        assert {node.name for node in slower.faster_in_float(model, list(model.graph), set(), seconds)} == left


@pytest.mark.parametrize("base", [1e-3, 1e-2, 1e-1])
def test_the_whole_has_to_save_half_a_percent_and_fifteen_microseconds(base: float) -> None:
    text = "g (float[4] x) => (float[4] y) { y = Tanh (x) }"
    for saved, some in ((0.8, False), (1.2, True)):
        model = loaded(text)
        integer = {"n0": base + saved * max(0.005 * base, 15e-6) - conversions(model)["n0"]}
        found = slower.faster_in_float(model, list(model.graph), set(), [{"n0": base}, integer])
        assert bool(found) == some


@pytest.mark.parametrize("beside", [True, False])
def test_where_other_layers_are_quantized_a_part_of_the_time_is_enough(beside: bool) -> None:
    """Of 200 microseconds 12 are more than a twentieth, and less than 15.

    Also where the others are chosen here, and stay in integers whatever they cost.
    """
    model = loaded("g (float[4] x) => (float[4] y) { y = Tanh (x) }")
    integer = {"n0": 2e-4 + 12e-6 - conversions(model)["n0"]}
    found = slower.faster_in_float(model, list(model.graph), set(), [{"n0": 2e-4}, integer], beside)
    assert bool(found) == beside
    model = loaded("g (float[4] x, float[4] z) => (float[4] y, float[4] u) { y = Tanh (x) u = Tanh (z) }")
    integer = {"n0": 1e-4 + 12e-6 - conversions(model)["n0"], "n1": 1e-4 - conversions(model)["n1"]}
    found = slower.faster_in_float(model, list(model.graph), set(), [{"n0": 1e-4, "n1": 1e-4}, integer])
    assert {node.name for node in found} == {"n0"}
