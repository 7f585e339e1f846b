"""The CPU target: what kernels are slower in integers stays float, by one table; other forms of the same sums."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models, pass_models

from quark.onnx import ModelQuantizer, get_default_config
from quark.onnx.graph.model import load
from quark.onnx.graph.shapes import prove_shapes
from quark.onnx.qdq import slower
from quark.onnx.qdq.slower import REASON, table
from quark.onnx.quantization.config.config import Config
from quark.search.min_cut import FOREVER, labels


def quantized(proto: onnx.ModelProto, feed: dict[str, np.ndarray], preset: str = "A8W8_CPU", **options: object):
    legacy = get_default_config(preset)
    legacy.extra_options.update({"PrintSummary": False, **options})
    quantizer = ModelQuantizer(Config(legacy))
    return quantizer.quantize_model(proto, None, [feed]), quantizer.result.plan


# ---- minimum cut -----------------------------------------------------------------------------------------------------


def cost(chosen: tuple[bool, ...], yes: list[int], no: list[int], pairs: list[tuple[int, int, int]]) -> int:
    alone = sum(yes[k] if here else no[k] for k, here in enumerate(chosen))
    return alone + sum(price for u, v, price in pairs if chosen[u] and not chosen[v])


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_costs_what_the_best_of_all_labellings_costs(seed: int) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 9))
    yes, no = random.integers(0, 20, size).tolist(), random.integers(0, 20, size).tolist()
    ends = [tuple(random.integers(0, size, 2).tolist()) for _ in range(2 * size)]
    pairs = [(u, v, int(random.integers(0, 15))) for u, v in ends if u != v]
    found = tuple(labels(yes, no, pairs))
    every = {one: cost(one, yes, no, pairs) for one in itertools.product((False, True), repeat=size)}
    least = min(every.values())
    assert every[found] == least
    assert sum(found) == max(sum(one) for one, price in every.items() if price == least)


def test_a_label_that_costs_forever_is_not_given() -> None:
    assert labels([FOREVER, 1], [0, 9], [(1, 0, 5)]) == [False, True]


# ---- the table -------------------------------------------------------------------------------------------------------


def test_every_kind_has_both_forms_and_no_negative_time() -> None:
    kinds = {kind for kind, _ in table() if "Linear" not in kind}
    assert all({(kind, "float"), (kind, "integer")} <= set(table()) for kind in kinds)
    assert all(part >= 0 for row in table().values() for part in row)


# ---- what stays float ------------------------------------------------------------------------------------------------


def heavy_tail() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A large convolution, which integers make faster, and a Softmax over channels, which they make slower."""
    graph = """
    tail (float[1, 128, 28, 28] x) => (float[1, 128, 28, 28] z) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w)
        b = Softmax <axis = 1> (a)
        c = Conv <pads = [1, 1, 1, 1]> (b, v)
        z = Relu (c)
    }"""
    weights = {name: models.normal(128, 128, 3, 3) * np.float32(0.05) for name in "wv"}
    return models.model(graph, weights, 17), {"x": models.normal(1, 128, 28, 28)}


def test_a_softmax_stays_float_between_integer_convolutions_and_the_same_model_gives_the_same_bytes() -> None:
    proto, feed = heavy_tail()
    made, plan = quantized(proto, feed)
    nodes = {node.op_type: node for node in plan.nodes.values()}
    assert nodes["Conv"].quantized
    assert (nodes["Softmax"].quantized, nodes["Softmax"].reason) == (False, REASON)
    assert quantized(proto, feed)[0].SerializeToString() == made.SerializeToString()


@pytest.mark.parametrize(
    ("preset", "options"),
    [("A8W8", {}), ("A8W8_CPU", {"FloatWhereFaster": False}), ("A8W8_CPU", {"ExtraOpTypesToQuantize": ["Softmax"]})],
)
def test_what_the_user_asks_for_and_other_targets_are_quantized(preset: str, options: dict[str, object]) -> None:
    proto, feed = heavy_tail()
    _, plan = quantized(proto, feed, preset, **options)
    assert all(node.quantized for node in plan.nodes.values() if node.op_type == "Softmax")


def test_a_small_model_is_quantized_as_configured() -> None:
    graph = "g (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) { a = Conv (x, w) y = Softmax <axis = 1> (a) }"
    proto = models.model(graph, {"w": models.normal(4, 4, 1, 1)}, 17)
    _, plan = quantized(proto, {"x": models.normal(1, 4, 8, 8)})
    assert all(node.quantized for node in plan.nodes.values())


def test_a_model_that_integers_only_slow_down_stays_float_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    graph = "g (float[1, 64, 56, 56] x) => (float[1, 64, 56, 56] y) { a = Softmax <axis = 1> (x) y = Sigmoid (a) }"
    proto, feed = models.model(graph, {}, 17), {"x": models.normal(1, 64, 56, 56)}
    made, plan = quantized(proto, feed)
    assert not plan.tensors and "stays float" in caplog.text
    models.assert_close(models.run(made, feed), models.run(proto, feed), 1e-6)


# ---- forms -----------------------------------------------------------------------------------------------------------


def test_the_cpu_target_gets_the_forms_and_others_do_not() -> None:
    proto = pass_models.focuses()
    feed = models.feeds(proto)
    for preset, averages in (("A8W8_CPU", 1), ("A8W8", 3)):
        made, _ = quantized(proto, feed, preset)
        assert sum(node.op_type == "AveragePool" for node in made.graph.node) == averages
    made, _ = quantized(proto, feed, FasterForms=False)
    assert sum(node.op_type == "AveragePool" for node in made.graph.node) == 3


def test_a_float16_model_computes_in_float32_inside_and_keeps_its_interface() -> None:
    proto = pass_models.half_model()
    feed = models.feeds(proto)
    made, _ = quantized(proto, feed)
    ends = [*made.graph.input, *made.graph.output]
    assert [one.type.tensor_type.elem_type for one in ends] == [
        one.type.tensor_type.elem_type for one in (*proto.graph.input, *proto.graph.output)
    ]
    halves = [one.name for one in made.graph.initializer if one.data_type == onnx.TensorProto.FLOAT16]
    assert not halves
    assert sum(node.op_type == "Cast" for node in made.graph.node) <= len(ends) + sum(
        node.op_type == "Cast" for node in proto.graph.node
    )
    models.run(made, feed)


RMS = """p = Pow(x, two) m = ReduceMean<axes = [-1], keepdims = 1>(p) e = Add(m, epsilon) r = Sqrt(e)
    d = Div(one, r) n = Mul(x, d) s = Mul(n, gain)"""
LAYER = """m = ReduceMean<axes = [-1], keepdims = 1>(x) c = Sub(x, m) p = Pow(c, two)
    v = ReduceMean<axes = [-1], keepdims = 1>(p) e = Add(v, epsilon) r = Sqrt(e)
    n = Div(c, r) t = Mul(n, gain) s = Add(t, bias)"""


@pytest.mark.parametrize(("norm", "kernel"), [(RMS, "SimplifiedLayerNormalization"), (LAYER, "LayerNormalization")])
def test_a_normalization_stays_one_kernel(norm: str, kernel: str, tmp_path: Path) -> None:
    """ONNX Runtime finds it by its nodes, which integers or another form of the mean would take apart."""
    width = 512
    proto = models.model(
        f"g (float[1,256,{width}] x) => (float[1,256,{width}] y) {{ {norm} h = MatMul(s, w) y = Add(h, x) }}",
        {
            "two": np.float32(2),
            "one": np.float32(1),
            "epsilon": np.float32(1e-5),
            "gain": models.normal(width, seed=2) + 1,
            "bias": models.normal(width, seed=3),
            "w": models.normal(width, width, seed=1) / 20,
        },
    )
    made, _ = quantized(proto, models.feeds(proto))
    assert made is not None
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(made.SerializeToString(), options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count(kernel) == 1 and {"QLinearMatMul", "QGemm"} & set(kinds), kinds


def attention(sizes: str) -> onnx.ModelProto:
    """Scores of 8 entries a head, whose Reshapes read sizes off the graph where they are free."""
    graph = f"""
    attention (float[{sizes}, 256] x) => (float[{sizes}, 256] y) {{
        s = Shape (x) two = Slice (s, zero, cut)
        apart = Concat <axis = 0> (two, heads, rest) back = Concat <axis = 0> (two, wide)
        q = MatMul (x, wq) qr = Reshape (q, apart) qt = Transpose <perm = [0, 2, 1, 3]> (qr)
        k = MatMul (x, wk) kr = Reshape (k, apart) kt = Transpose <perm = [0, 2, 3, 1]> (kr)
        a = MatMul (qt, kt) p = Softmax <axis = -1> (a)
        v = MatMul (x, wv) vr = Reshape (v, apart) vt = Transpose <perm = [0, 2, 1, 3]> (vr)
        o = MatMul (p, vt) ot = Transpose <perm = [0, 2, 1, 3]> (o) or = Reshape (ot, back)
        y = MatMul (or, wo)
    }}"""
    weights = {
        name: models.normal(256, 256, seed=k) * np.float32(0.1) for k, name in enumerate(("wq", "wk", "wv", "wo"))
    }
    numbers = {"zero": [0], "cut": [2], "heads": [32], "rest": [-1], "wide": [256]}
    return models.model(graph, {**weights, **{name: np.array(one) for name, one in numbers.items()}}, 17)


def test_sizes_that_follow_from_others_are_not_unknown() -> None:
    """Sizes counted as 64 that are 8 and 1 made an attention's scores integers, at 1.6 times their time in float."""
    free, fixed = (load(attention(sizes)) for sizes in ("batch, steps", "1, 64"))
    for model in (free, fixed):
        prove_shapes(model)
    sized = slower._sized(free)
    times = [[slower._node_times(node) for node in model.graph if node.op_type == "MatMul"] for model in (free, sized)]
    assert times[0] != times[1] == [slower._node_times(node) for node in fixed.graph if node.op_type == "MatMul"]
    assert slower._sized(fixed) is fixed


@pytest.mark.parametrize(("sizes", "fixed"), [
    ("batch, 3, high, wide", "1, 3, 256, 256"), ("batch, high, wide, 3", "1, 256, 256, 3"),
    ("batch, 3, 640, 640", "1, 3, 640, 640"), ("batch, 8, past, 16", "1, 8, 64, 16"),
    ("batch, a, b, c", "1, 64, 64, 64"), ("batch, steps, 16", "1, 64, 16"),
])  # fmt: skip
def test_pictures_of_free_sizes_count_as_pictures(sizes: str, fixed: str) -> None:
    """A detector's last layers saw 2 x 2 places of an input of 64 x 64, and stayed float: 9 % of its time at 640."""
    model = load(models.model(f"g (float[{sizes}] x) => (float[{sizes}] y) {{ y = Relu (x) }}", {}, 17))
    wanted = load(models.model(f"g (float[{fixed}] x) => (float[{fixed}] y) {{ y = Relu (x) }}", {}, 17))
    found, expected = (slower._node_times(slower._sized(one).graph[0]) for one in (model, wanted))
    assert found == expected


def test_a_free_size_that_leaves_nothing_of_the_model_is_not_taken() -> None:
    """64 samples of a sound behind a kernel of 256 are none; what follows would cost nothing in float."""
    graph = "g (float[1, 1, samples] x) => (float[1, 32, frames] y) { y = Conv <strides = [128]> (x, w) }"
    model = load(models.model(graph, {"w": models.normal(32, 1, 256)}, 17))
    assert slower._sized(model) is model
