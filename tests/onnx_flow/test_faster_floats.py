"""Float kernels in their fast forms: what they compute at every number, and that ONNX Runtime fuses what is meant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models

from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.graph.model import load, to_proto
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes.registry import apply, passes

HERE = "float[8, 32, 16] x"
MIXED = np.linspace(-1.5, 2.5, 32, dtype=np.float32).reshape(32, 1)
SLOPES = {
    "inside": np.linspace(0.01, 1, 32, dtype=np.float32).reshape(32, 1),  # the larger of x and s · x
    "zero": np.linspace(0, 1, 32, dtype=np.float32).reshape(32, 1),  # 0 · infinity would be NaN there
    "steep": np.linspace(0.01, 2, 32, dtype=np.float32).reshape(32, 1),  # the smaller one, from 1 on
    "mixed": MIXED,
}


def rewritten(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str], int]:
    model = load(proto)
    infer_shapes(model)
    fired = apply(model, passes()["faster_floats"], {}).fired
    made = to_proto(model)
    onnx.checker.check_model(made, full_check=True)
    return made, [node.op_type for node in made.graph.node], fired


def wide(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x.astype(np.float64))


def mish(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) * np.tanh(wide(x))


def prelu(slopes: np.ndarray):  # type: ignore[no-untyped-def]
    return lambda x: np.where(x < 0, slopes * x.astype(np.float64), x)


def elu(alpha: float):  # type: ignore[no-untyped-def]
    return lambda x: np.where(x < 0, alpha * np.expm1(np.minimum(x, 0).astype(np.float64)), x)


#: The nodes, opset, constants, what NumPy computes, and the operator that is gone.
FUNCTIONS = {
    **{
        f"slopes: {kind}": ("y = PRelu (x, s)", 13, {"s": slopes}, prelu(slopes), "PRelu")
        for kind, slopes in SLOPES.items()
    },
    "elu": ("y = Elu (x)", 13, {}, elu(1), "Elu"),
    "a flatter elu": ("y = Elu <alpha = 0.3> (x)", 13, {}, elu(0.3), "Elu"),
    "softplus": ("y = Softplus (x)", 13, {}, wide, "Softplus"),
    "mish": ("y = Mish (x)", 18, {}, mish, "Mish"),
    "mish written out": ("s = Softplus (x) t = Tanh (s) y = Mul (t, x)", 13, {}, mish, "Tanh"),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_the_same_at_every_number(case: str) -> None:
    """Zeros, what is tiny, what overflows and what is infinite too; NaN stays one."""
    nodes, opset, constants, expected, gone = FUNCTIONS[case]
    proto = models.model(f"g ({HERE}) => (float[8, 32, 16] y) {{ {nodes} }}", constants, opset)
    made, found, fired = rewritten(proto)
    assert fired == 1 and gone not in found
    assert ("Max" in found) == (case in ("slopes: inside", "elu", "a flatter elu"))
    random = np.random.default_rng(0)
    x = (random.standard_normal((8, 32, 16)) * 10.0 ** random.integers(-6, 3, (8, 32, 16))).astype(np.float32)
    x[0, :, :8] = [0.0, -0.0, 1e-38, -1e-38, 3e38, -3e38, 20.0, -90.0]
    x[1, :, 0], x[1, :, 1] = np.inf, np.nan
    found_y = models.run(made, {"x": x})[0]
    with np.errstate(all="ignore"):
        y = np.asarray(expected(x)).astype(np.float32)
    assert np.array_equal(np.isnan(found_y), np.isnan(y))
    kept = np.isfinite(y)
    np.testing.assert_array_equal(found_y[~kept], y[~kept])
    np.testing.assert_allclose(found_y[kept], y[kept], rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize(
    ("shape", "nodes"),
    [
        ("4, 8, 8", "y = Softplus (x)"),  # few
        ("64, 64, 1", "y = Softplus (x)"),  # a scalar is slow over rows of one
        ("8, 32, 16", "y = Elu <alpha = 1.5> (x)"),  # the larger of both is not it
        ("8, 32, 16", "s = Softplus (x) t = Tanh (x) y = Mul (t, s)"),
        ("8, 32, 16", "q = ReduceSum <keepdims = 1> (x) e = Exp (q) r = Sqrt (e) i = Reciprocal (r) y = Mul (x, i)"),
        ("8, 32, 16", "n = Neg (x) a = Add (x, n) l = LayerNormalization (a, w) y = Add (a, l)"),
        ("8, 32, 16", "a = Add (x, w) y = LayerNormalization (a, w)"),
    ],
)
def test_what_stays(shape: str, nodes: str) -> None:
    text = f"g (float[{shape}] x) => (float[{shape}] y) {{ {nodes} }}"
    proto = models.model(text, {"w": np.linspace(0.5, 1, 16, dtype=np.float32)}, 17)
    _, found, fired = rewritten(proto)
    assert fired == ("t = Tanh (x)" in nodes) and ("Sum" not in found)


#: Nodes on a sum, how often the pass fires, and the kernels that run afterwards.
NORMS = {
    "y = LayerNormalization (a, w)": (1, ["Sum", "LayerNormalization"]),
    "p = Pow (a, two) m = ReduceMean <axes = [-1]> (p) v = Add (m, e) q = Sqrt (v) r = Reciprocal (q) n = Mul (a, r) "
    "y = Mul (w, n)": (1, ["Add", "SimplifiedLayerNormalization"]),
}


def runs(proto: onnx.ModelProto, folder: Path) -> list[str]:
    """The kernels of ONNX Runtime's default session."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node]


@pytest.mark.parametrize("nodes", NORMS)
def test_a_norm_is_one_kernel_of_its_own(nodes: str, tmp_path: Path) -> None:
    """SkipLayerNormalization takes eight times as long as Add and LayerNormalization."""
    text = f"g (float[1, 32, 16] x, float[1, 32, 16] b) => (float[1, 32, 16] y) {{ a = Add (x, b) {nodes} }}"
    numbers = {"w": np.linspace(0.5, 1, 16, dtype=np.float32), "two": np.float32(2), "e": np.float32(1e-6)}
    proto = models.model(text, numbers, 17)
    made, _, fired = rewritten(proto)
    feeds = models.feeds(proto)
    models.assert_close(models.run(made, feeds), models.run(proto, feeds), 1e-5)
    assert runs(proto, tmp_path) not in (expected := [NORMS[nodes][1]])
    assert [runs(made, tmp_path)] == expected and fired == NORMS[nodes][0]


def test_models_for_the_cpu_are_written_so(tmp_path: Path) -> None:
    text = f"g ({HERE}) => (float[8, 32, 16] y) {{ m = MatMul (x, w) a = PRelu (m, s) b = Mul (a, one) y = Elu (b) }}"
    weights = {"w": models.normal(16, 16), "s": np.full(1, 0.25, np.float32), "one": MIXED}
    proto = models.model(text, weights, 17)
    for asked in (None, False):
        config = QConfig.get_default_config("A8W8_CPU")
        config.global_quant_config.extra_options.update(FasterForms=asked, FloatWhereFaster=False, PrintSummary=False)
        made = ModelQuantizer(config).quantize_model(proto, None, [models.feeds(proto)])
        found = [node.op_type for node in made.graph.node]
        assert ("LeakyRelu" in found, "Elu" in found) == ((True, False) if asked is None else (False, True))


def test_codes_that_several_float_kernels_read_are_dequantized_once(tmp_path: Path) -> None:
    """Else the runtime writes a DequantizeLinear for each reader, and finds no Gelu in x · sigmoid(x) any more."""
    text = """g (float[8, 32, 16] x) => (float[8, 32, 16] y, float[8, 32, 16] z) {
        q = QuantizeLinear (x, s, o) d = DequantizeLinear (q, s, o) a = Sigmoid (d) m = Mul (d, a)
        n = MatMul (d, w) y = Add (m, n) b = Add (d, d) c = QuantizeLinear (b, s, o) z = DequantizeLinear (c, s, o) }"""
    given = {"s": np.float32(0.02), "o": np.uint8(120), "w": models.normal(16, 16)}
    proto = models.model(text, given, 17)
    made, found, fired = rewritten(proto)
    assert fired == 1 and found.count("Sum") == 1
    readers = {node.op_type for node in made.graph.node if any("shared" in name for name in node.input)}
    assert readers == {"Sigmoid", "Mul"}, "a MatMul and an Add in integers read codes"
    feeds = models.feeds(proto)
    models.assert_close(models.run(made, feeds), models.run(proto, feeds), 1e-6)
    assert "QuickGelu" in runs(made, tmp_path) and "QuickGelu" not in runs(proto, tmp_path)


@pytest.mark.parametrize(("channels", "kernel"), [(4, "FusedMatMul"), (512, "MatMulIntegerToFloat")])
def test_scores_that_are_faster_in_float_stay_so(channels: int, kernel: str, tmp_path: Path) -> None:
    """The runtime makes a MatMul in integers of codes that it finds behind Squeeze and Transpose, whatever it costs."""
    text = f"""g (uint8[1, 96, 2, {channels}] q) => (float[2, 96, 96] y) {{
        d = DequantizeLinear (q, s, o) t = Transpose <perm = [0, 2, 1, 3]> (d) a = Squeeze (t, first)
        u = DequantizeLinear (q, s, o) b = Transpose <perm = [0, 2, 3, 1]> (u) c = Squeeze (b, first)
        m = MatMul (a, c) y = Mul (m, f) }}"""
    given = {"s": np.float32(0.02), "o": np.uint8(120), "first": np.zeros(1, np.int64), "f": np.float32(0.25)}
    proto = models.model(text, given, 17)
    made, _, fired = rewritten(proto)
    assert fired == (kernel == "FusedMatMul")
    assert kernel in runs(made, tmp_path) and "MatMulIntegerToFloat" in runs(proto, tmp_path)
    feed = {"q": np.random.default_rng(1).integers(0, 256, (1, 96, 2, channels)).astype(np.uint8)}
    models.assert_close(models.run(made, feed), models.run(proto, feed), 1e-4)


@pytest.mark.parametrize(("low", "high", "left"), [(-1, 1, 0), (-0.3, 2, 0), (0, 1, 1), (0.25, 1, 1)])
def test_codes_clip(low: float, high: float, left: int, tmp_path: Path) -> None:
    """A convolution and the Clip behind it are one kernel, of which the codes reach from bound to bound."""
    text = """g (float[1, 16, 9, 9] x) => (float[1, 16, 9, 9] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w) d = Clip (c, low, high) y = Conv <pads = [1, 1, 1, 1]> (d, v) }"""
    weights = {name: models.normal(16, 16, 3, 3, scale=0.3) for name in ("w", "v")}
    proto = models.model(text, {**weights, "low": np.float32(low), "high": np.float32(high)}, 17)
    config = QConfig.get_default_config("A8W8_CPU")
    config.global_quant_config.extra_options.update(FloatWhereFaster=False, PrintSummary=False)
    random = np.random.default_rng(3)
    samples = [{"x": random.normal(size=(1, 16, 9, 9)).astype(np.float32)} for _ in range(4)]
    made = ModelQuantizer(config).quantize_model(proto, None, samples)
    assert [node.op_type for node in made.graph.node].count("Clip") == left
    device = QConfig.get_default_config("U8U8_AAWA")
    device.global_quant_config.extra_options.update(RemoveQDQConvClip=True, PrintSummary=False)
    assert "Clip" in models.op_types(ModelQuantizer(device).quantize_model(proto, None, samples))
    kernels = runs(made, tmp_path)
    assert kernels.count("QLinearConv") == 2 and ("Clip" in kernels) == (low > 0)
    [x], [y] = models.run(proto, samples[0]), models.run(made, samples[0])
    assert 10 * np.log10(np.square(x).sum() / np.square(x - y).sum()) > 30


REACH = """g (uint8[1, 8, 6, 6] q) => (uint8[1, 8, 6, 6] y) {
    x = DequantizeLinear (q, s, z) v = DequantizeLinear (w, s, n) c = Conv <pads = [1, 1, 1, 1]> (x, v) """


@pytest.mark.parametrize(
    ("behind", "done"),
    [
        ("d = Clip (c, zero, six) y = QuantizeLinear (d, s, z)", "rounded"),  # z: codes from -2 to 13.9
        ("d = Clip (c, minus, six) y = QuantizeLinear (d, s, z)", "rounded"),
        ("d = Clip (c, minus) y = QuantizeLinear (d, s, z)", "rounded"),
        ("d = Clip (c, step) y = QuantizeLinear (d, s, z)", "rounded"),
        ("d = Relu (c) y = QuantizeLinear (d, s, z)", "rounded"),
        ("d = Relu (c) y = QuantizeLinear (d, s, o)", "left"),  # the runtime drops it
        ("d = Clip (c, near) y = QuantizeLinear (d, s, z)", "folded"),
        ("d = Clip (c, far) y = QuantizeLinear (d, s, z)", "folded"),
        ("d = Clip (c, minus) e = Relu (d) y = QuantizeLinear (e, s, o)", "folded"),
        ("d = Clip (c, far) e = Clip (d, near) y = QuantizeLinear (e, s, z)", "folded"),
        ("d = Clip (c, minus) e = QuantizeLinear (d, s, o) y = QuantizeLinear (d, s, z)", "left"),
        ("a = Sigmoid (c) d = Clip (a, zero, six) y = QuantizeLinear (d, s, z)", "left"),
        ("a = Sigmoid (x) b = Add (a, x) d = Clip (b, zero, six) y = QuantizeLinear (d, s, z)", "left"),
        ("d = Clip (c, zero, six) e = Relu (c) y = QuantizeLinear (d, s, z)", "left"),
        ("d = Clip (c, zero, six) e = Add (d, c) y = QuantizeLinear (e, s, z)", "left"),
        ("d = Clip (c, zero, six) e = Relu (d) y = QuantizeLinear (e, s, z)", "left"),
        (
            "d = Relu (c) e = QuantizeLinear (d, s, l) f = DequantizeLinear (e, s, l) y = QuantizeLinear (f, s, z)",
            "left",
        ),
    ],
)
def test_codes_that_reach_beyond_a_bound_leave_the_convolution_in_integers(
    behind: str, done: str, tmp_path: Path
) -> None:
    """What is rounded to the same codes before as behind is the same number."""
    rng = np.random.default_rng(1)
    given = {"s": np.float32(0.0625), "w": rng.integers(-9, 9, (8, 8, 3, 3)).astype(np.int8), "n": np.int8(0)}
    given |= {"z": np.uint8(32), "o": np.uint8(0), "l": np.uint16(32)}
    given |= {name: np.float32(x) for name, x in (("zero", 0), ("six", 6), ("minus", -1.03), ("far", -3))}
    given |= {"step": np.float32(-1.95), "near": np.float32(-1.975)}
    proto = models.model(
        REACH + behind + " }", {k: v for k, v in given.items() if f"{k}" in f"{REACH}{behind}"}, 21, 10
    )
    model = load(proto)
    infer_shapes(model)
    assert (apply(model, passes()["fold_relu"], {"below": True}).fired > 0) == (done != "left")
    made = to_proto(model)
    assert ("Clip" in models.op_types(made) or "Relu" in models.op_types(made)) == (done != "folded")
    feed = {"q": rng.integers(0, 256, (1, 8, 6, 6)).astype(np.uint8)}
    [expected], [found] = models.run(proto, feed), models.run(made, feed)
    assert np.abs(expected.astype(int) - found).max() <= 1 and (expected == found).mean() > 0.99
    assert done == "left" or "QLinearConv" in runs(made, tmp_path)


@pytest.mark.parametrize(
    ("rows", "second", "behind"),
    [
        (4, "DequantizeLinear (q, s, o)", "y = Relu (m)"),  # too small
        (96, "DequantizeLinear (q, s, o)", "c = QuantizeLinear (m, s, o) y = DequantizeLinear (c, s, o)"),  # integers
        (96, "DequantizeLinear (w, s, o)", "y = Relu (m)"),  # weights
        (96, "Relu (d)", "y = Tanh (m)"),  # numbers, not codes
    ],
)
def test_other_products_stay_as_they_are(rows: int, second: str, behind: str) -> None:
    text = f"""g (uint8[1, {rows}, 4] q) => (float[1, {rows}, {rows}] y) {{ d = DequantizeLinear (q, s, o)
        e = {second} t = Transpose <perm = [0, 2, 1]> (e) m = MatMul (d, t) {behind} }}"""
    given = {"s": np.float32(0.02), "o": np.uint8(120), "w": np.ones((1, rows, 4), np.uint8)}
    proto = models.model(text, {name: given[name] for name in given if name != "w" or "(w," in second}, 17)
    assert rewritten(proto)[1] == models.op_types(proto)


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ("a = Pad(c, around)", "MaxPool"),  # not in the layout of convolutions, and no zeros may be lost
        ("r = Relu(c) a = Pad(r, around)", "NhwcMaxPool"),  # 0 is nothing new: pads of the MaxPool
        ("a = LayerNormalization(c, one)", "MaxPool"),
        ("a = LeakyRelu(c)", "NhwcMaxPool"),
    ],
)
def test_maxima_are_taken_in_the_layout_of_what_is_before_them(before: str, kind: str, tmp_path: Path) -> None:
    """The kernel for codes in ONNX's layout takes 20 to 30 times as long as that for numbers."""
    text = f"""g (float[1,16,32,32] x) => (float[1,16,n,m] y) {{ c = Conv (x, w) {before}
        p = MaxPool<kernel_shape = [3,3], strides = [2,2]>(a) y = Conv(p, w) }}"""
    around, one = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64), np.ones(32, np.float32)
    proto = models.model(text, {"w": models.normal(16, 16, 1, 1), "around": around, "one": one}, 17)
    feeds, made = [models.feeds(proto, seed=seed) for seed in range(3)], []
    for faster in (True, False):
        config = QConfig.get_default_config("A8W8_CPU")
        config.global_quant_config.extra_options.update(
            FasterForms=faster, FloatWhereFaster=False, QuantizeAllOpTypes=True, PrintSummary=False
        )
        done = ModelQuantizer(config).quantize_model(proto, None, feeds)
        assert done is not None
        made.append(done)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    found = onnxruntime.InferenceSession(made[0].SerializeToString(), options).run(None, feeds[0])[0]
    optimized = onnx.load(tmp_path / "optimized.onnx").graph
    (pool,) = [node for node in optimized.node if "MaxPool" in node.op_type]
    codes = {name for node in optimized.node if "Quantize" in node.op_type for name in node.output[:1]}
    assert pool.op_type == kind and not (kind == "MaxPool" and pool.input[0] in codes - {"p"})
    np.testing.assert_array_equal(found, models.run(made[1], feeds[0])[0])
