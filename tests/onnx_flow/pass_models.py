"""Models that make every graph pass fire, and random ones made of the same pieces with shared weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
from tests.onnx_flow import fused_models, models


def _numbers(**values: float) -> dict[str, np.ndarray]:
    return {name: np.array(value, np.float32) for name, value in values.items()}


def gelu(opset: int = 20) -> onnx.ModelProto:
    """GELU by erf in two orders and by tanh, from one input; the tanh one is read by a Relu too."""
    graph = """
    gelu (float[2, 8] x) => (float[2, 8] y, float[2, 8] z, float[2, 8] t) {
        d = Div (x, root) e = Erf (d) p = Add (one, e) h = Mul (x, half) y = Mul (p, h)
        d2 = Mul (x, inverse) e2 = Erf (d2) p2 = Add (e2, one) m2 = Mul (x, p2) z = Mul (m2, half)
        c = Pow (x, three) k = Mul (c, cubic) s = Add (x, k) w = Mul (s, factor) u = Tanh (w) v = Add (u, one)
        q = Mul (half, x) g = Mul (q, v) t = Relu (g)
    }"""
    numbers = _numbers(
        root=2**0.5, inverse=0.5**0.5, one=1, half=0.5, three=3, cubic=0.044715, factor=(2 / np.pi) ** 0.5
    )
    return models.model(graph, numbers, opset)


def layer_norm(opset: int = 17) -> onnx.ModelProto:
    """Two layer normalizations that share scale and bias, one without either; Pow and Mul squares."""
    graph = """
    layer_norm (float[N, 5, 8] x) => (float[N, 5, 8] y, float[N, 5, 8] z, float[N, 5, 8] plain) {
        m = ReduceMean <axes = [-1]> (x) c = Sub (x, m) s = Pow (c, two) v = ReduceMean <axes = [-1]> (s)
        e = Add (v, eps) r = Sqrt (e) n = Div (c, r) g = Mul (n, scale) y = Add (g, bias)
        m2 = ReduceMean <axes = [2]> (y) c2 = Sub (y, m2) s2 = Mul (c2, c2) v2 = ReduceMean <axes = [-1]> (s2)
        e2 = Add (v2, eps) r2 = Sqrt (e2) n2 = Div (c2, r2) g2 = Mul (scale, n2) z = Add (bias, g2)
        m3 = ReduceMean <axes = [-2, -1]> (x) c3 = Sub (x, m3) s3 = Pow (c3, two)
        v3 = ReduceMean <axes = [-2, -1]> (s3) e3 = Add (eps, v3) r3 = Sqrt (e3) plain = Div (c3, r3)
    }"""
    weights = {"scale": models.normal(8, seed=1), "bias": models.normal(8, seed=2), **_numbers(two=2, eps=1e-5)}
    return models.model(graph, weights, opset)


def instance_norm(opset: int = 13) -> onnx.ModelProto:
    """The chain with Reciprocal, one with Div, one without scale and bias; scale and bias are shared."""
    graph = """
    instance_norm (float[2, 4, 6, 5] x) => (float[2, 4, 6, 5] y, float[2, 4, 6, 5] z, float[2, 4, 6, 5] p) {
        m = GlobalAveragePool (x) c = Sub (x, m) s = Mul (c, c) v = GlobalAveragePool (s) e = Add (v, eps)
        q = Sqrt (e) i = Reciprocal (q) r = Mul (i, scale) mr = Mul (m, r) b = Sub (bias, mr) xr = Mul (x, r)
        y = Add (xr, b)
        m2 = ReduceMean <axes = [2, 3]> (x) c2 = Sub (x, m2) s2 = Pow (c2, two) v2 = ReduceMean <axes = [-1, -2]> (s2)
        e2 = Add (v2, eps) q2 = Sqrt (e2) n2 = Div (c2, q2) g2 = Mul (n2, scale) z = Add (g2, bias)
        m3 = GlobalAveragePool (x) c3 = Sub (x, m3) s3 = Pow (c3, two) v3 = GlobalAveragePool (s3) e3 = Add (v3, eps)
        q3 = Sqrt (e3) p = Div (c3, q3)
    }"""
    weights = {"scale": models.normal(1, 4, 1, 1, seed=1), "bias": models.normal(4, 1, 1, seed=2)}
    return models.model(graph, {**weights, **_numbers(two=2, eps=1e-5)}, opset)


def l2_norm(opset: int = 13) -> onnx.ModelProto:
    """The three ways to write it; the last with an epsilon that is too large to lose."""
    graph = """
    l2_norm (float[3, 4, 6] x) => (float[3, 4, 6] y, float[3, 4, 6] z, float[3, 4, 6] big) {
        s = Mul (x, x) t = ReduceSum (s, last) m = Max (t, tiny) q = Sqrt (m) i = Reciprocal (q) y = Mul (x, i)
        l = ReduceL2 <axes = [1]> (x) c = Clip (l, small) sh = Shape (x) e = Expand (c, sh) z = Div (x, e)
        l2 = ReduceL2 <axes = [1]> (x) c2 = Clip (l2, large) big = Div (x, c2)
    }"""
    numbers = _numbers(tiny=1e-12, small=1e-12, large=0.5)
    return models.model(graph, {**numbers, "last": np.array([-1])}, opset)


def concat_norm(opset: int = 13) -> onnx.ModelProto:
    """BatchNormalization after a Concat of a Conv, a grouped ConvTranspose and a Conv with a shared weight."""
    graph = """
    concat_norm (float[N, 4, 6, 6] x) => (float[N, 12, 6, 6] y, float[N, 4, 6, 6] z) {
        a = Conv (x, w, b)
        t = ConvTranspose <group = 2> (x, wt)
        c = Conv (x, w)
        j = Concat <axis = 1> (a, t, c)
        y = BatchNormalization (j, bn_scale, bn_bias, bn_mean, bn_var)
        z = Conv (x, w, b)
    }"""
    weights = {"w": models.normal(4, 4, 1, 1), "b": models.normal(4), "wt": models.normal(4, 2, 1, 1)}
    return models.model(graph, {**weights, **models.batch_norm("bn", 12)}, opset)


def unlike_parts(opset: int = 13) -> onnx.ModelProto:
    """Concats of parts whose ranges differ, and what brings them to one range: a BatchNormalization; Div and Sub."""
    graph = """
    unlike_parts (float[N, 4, 6, 6] x) => (float[N, 8, 6, 6] y, float[N, 6, 8] z) {
        a = Conv (x, w)
        r = Relu (x)
        j = Concat <axis = 1> (r, a)
        y = BatchNormalization (j, bn_scale, bn_bias, bn_mean, bn_var)
        m = ReduceMax <axes = [3], keepdims = 0> (x)
        t = Transpose <perm = [0, 2, 1]> (m)
        p = MatMul (t, v)
        k = Concat <axis = -1> (p, t)
        d = Div (k, sizes)
        z = Sub (d, shift)
    }"""
    sizes = np.repeat(np.float32([300, 1]), 4)
    norm = {**models.batch_norm("bn", 8), "bn_var": sizes[::-1] ** 2}
    weights = {"w": 100 * models.normal(4, 4, 1, 1), "v": 100 * models.normal(4, 4), "sizes": sizes}
    return models.model(graph, {**weights, "shift": models.normal(8), **norm}, opset)


def pools_and_splits(opset: int = 13) -> onnx.ModelProto:
    """Splits with sizes, with equal parts and with an unread output; a pool over 24 x 40 pixels; a lone BN; Clips."""
    graph = """
    pools (float[1, 6, 24, 40] x) => (float[1, 6, 1, 1] y, float[1, 4, 24, 40] z, float[1, 6, 24, 40] w) {
        n = BatchNormalization (x, bn_scale, bn_bias, bn_mean, bn_var)
        a, b = Split <axis = 1> (n, sizes)
        c, unread, d = Split <axis = -3> (n)
        r = Clip (b, zero)
        h, i = Split <axis = 1> (r)
        k = Concat <axis = 1> (a, h, i)
        s = Clip (k, zero, six)
        y = GlobalAveragePool (s)
        j = Concat <axis = 1> (c, h)
        z = Relu (j)
        w = Mul (k, k)
    }"""
    weights = {"sizes": np.array([2, 4]), **_numbers(zero=0, six=6), **models.batch_norm("bn", 6)}
    return models.model(graph, weights, opset)


def focuses(opset: int = 13) -> onnx.ModelProto:
    """A focus in the order of YOLOX, one by SpaceToDepth, one that is none; averages with and without padding."""
    graph = """
    focuses (float[1, 3, 8, 12] x) => (float[1, 5, 4, 6] y, float[1, 5, 4, 6] z, float[1, 5, 4, 6] w,
                                       float[1, 3, 4, 6] p, float[1, 3, 8, 12] q, float[1, 3, 8, 12] r) {
        a = Slice (x, s0, end, rows, two) a0 = Slice (a, s0, end, columns, two) a1 = Slice (a, s1, end, columns, two)
        b = Slice (x, s1, end, rows, two) b0 = Slice (b, s0, end, columns, two) b1 = Slice (b, s1, end, columns, two)
        f = Concat <axis = 1> (a0, b0, a1, b1)
        y = Conv <pads = [1, 1, 1, 1]> (f, focus_weight, focus_bias)
        g = SpaceToDepth <blocksize = 2> (x)
        z = Conv <pads = [1, 1, 1, 1], kernel_shape = [3, 3]> (g, focus_weight)
        h = Concat <axis = 1> (a0, a0, b1, a1)
        w = Conv <pads = [1, 1, 1, 1]> (h, focus_weight)
        p = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x)
        q = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1], count_include_pad = 1> (x)
        r = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)
    }"""
    random = np.random.default_rng(5)
    weights = {
        "focus_weight": random.normal(size=(5, 12, 3, 3)).astype(np.float32),
        "focus_bias": random.normal(size=5).astype(np.float32),
        "s0": np.array([0]),
        "s1": np.array([1]),
        "two": np.array([2]),
        "end": np.array([2**40]),
        "rows": np.array([2]),
        "columns": np.array([-1]),
    }
    return models.model(graph, weights, opset)


def channels_last(opset: int = 13) -> onnx.ModelProto:
    """Convolutions as exporters of channels-last frameworks write them, with a normalization and a shortcut between."""
    graph = """
    channels_last (float[N, 6, 6, 3] x) => (float[N, 6, 6, 4] y) {
        a = Transpose <perm = [0, 3, 1, 2]> (x) b = Conv <kernel_shape = [1, 1]> (a, w)
        c = Transpose <perm = [0, 2, 3, 1]> (b) d = Mul (c, scale) e = Add (d, shift) f = Relu (e)
        g = Transpose <perm = [0, 3, 1, 2]> (f) h = Conv <kernel_shape = [1, 1]> (g, v)
        i = Transpose <perm = [0, 2, 3, 1]> (h) y = Add (i, f)
    }"""
    weights = {"w": models.normal(4, 3, 1, 1), "v": models.normal(4, 4, 1, 1)}
    weights |= {"scale": models.normal(4), "shift": models.normal(4, seed=2)}
    return models.model(graph, weights, opset)


def slow_forms(opset: int = 13) -> onnx.ModelProto:
    """Transposed convolutions of stride 1 and 2, an unfolded image, a block that is written, renamed axes."""
    graph = """
    slow_forms (float[1, 2, 6, 6] x) => (float[1, 3, 8, 8] y, float[1, 3, 13, 13] z, float[1, 5, 6, 4] u,
                                      float[1, 2, 6, 6] s, float[1, 12, 6] r) {
        y = ConvTranspose <kernel_shape = [3, 3]> (x, weight)
        z = ConvTranspose <kernel_shape = [3, 3], strides = [2, 2]> (x, weight)
        a = Gather <axis = 2> (x, rows) b = Gather <axis = 4> (a, columns)
        c = Transpose <perm = [0, 1, 2, 4, 3, 5]> (b) d = Reshape (c, joined) u = Conv (d, point)
        s = ScatterND (x, places, block)
        e = Unsqueeze (x, first) r = Reshape (e, flat)
    }"""
    weights = {
        "weight": models.normal(2, 3, 3, 3),
        "point": models.normal(5, 6, 1, 1),
        "rows": np.arange(6)[None],
        "columns": np.arange(3)[:, None] + np.arange(4),
        "joined": np.array([1, 6, 6, 4]),
        "places": np.stack(np.meshgrid([0], [0, 1], [2, 3], indexing="ij"), -1),
        "block": models.normal(1, 2, 2, 6),
        "first": np.array([0]),
        "flat": np.array([1, 12, 6]),
    }
    return models.model(graph, weights, opset)


def lstm_cell(opset: int = 13) -> onnx.ModelProto:
    """A step of an LSTM, and one whose gates are read elsewhere."""
    step = """
        p{0} = MatMul (x, w{0}) q{0} = MatMul (h, r{0}) s{0} = Add (p{0}, q{0}) z{0} = Add (s{0}, b{0})
        i{0}, f{0}, g{0}, o{0} = Split <axis = 1> (z{0})
        ia{0} = Sigmoid (i{0}) fa{0} = Sigmoid (f{0}) ga{0} = Tanh (g{0}) oa{0} = Sigmoid (o{0})
        fc{0} = Mul (fa{0}, c) ig{0} = Mul (ia{0}, ga{0}) c{0} = Add (fc{0}, ig{0})
        t{0} = Tanh (c{0}) h{0} = Mul (oa{0}, t{0})"""
    ends = "float[2, 4] h1, float[2, 4] c1, float[2, 4] h2, float[2, 4] oa2"
    graph = f"lstm_cell (float[2, 3] x, float[2, 4] h, float[2, 4] c) => ({ends}) {{{step.format(1)}{step.format(2)}}}"
    sizes = {"w": (3, 16), "r": (4, 16), "b": (16,)}
    weights = {f"{name}{k}": models.normal(*size, seed=k) for name, size in sizes.items() for k in (1, 2)}
    return models.model(graph, weights, opset)


def slow_floats(opset: int = 13) -> onnx.ModelProto:
    """Activation functions whose kernels are slow, and an RMS normalization with a Reciprocal behind a sum."""
    graph = """
    slow_floats (float[2, 8, 16, 16] x) => (float[2, 8, 16, 16] y, float[2, 8, 16, 16] z, float[2, 8, 16, 16] m) {
        p = PRelu (x, slope) e = Elu (p) y = Softplus (e) n = Neg (x) n2 = Exp (n) s = Add (x, n2)
        t = Softplus (x) u = Tanh (t) m = Mul (x, u)
        q = Pow (s, two) v = ReduceMean <axes = [-1]> (q) w = Add (v, small) r = Sqrt (w) i = Reciprocal (r)
        z = Mul (s, i)
    }"""
    slope = models.normal(8, 1, 1, scale=0.5)
    return models.model(graph, {"slope": slope, **_numbers(two=2.0, small=1e-6)}, opset)


def attention_scale(opset: int = 13) -> onnx.ModelProto:
    """Scores divided by a constant, and a projection with a shared weight that is divided too."""
    graph = """
    attention_scale (float[2, 5, 8] x) => (float[2, 5, 5] y, float[2, 5, 8] z) {
        q = MatMul (x, wq) qb = Add (q, bq) k = MatMul (x, wk) kt = Transpose <perm = [0, 2, 1]> (k)
        s = MatMul (qb, kt) d = Div (s, root) y = Softmax <axis = -1> (d)
        v = MatMul (x, wk) z = Mul (v, root)
    }"""
    weights = {name: models.normal(8, 8, seed=k, scale=0.3) for k, name in enumerate(("wq", "wk"))}
    return models.model(graph, {**weights, "bq": models.normal(8), **_numbers(root=8**0.5)}, opset)


def quantized_clips(opset: int = 13) -> onnx.ModelProto:
    """Clip(0, 6) and Relu before uint8 codes that end at 6, before ones that end at 12, and before int8 codes.

    Clip(-6, 6) before codes of which the smallest is half a step beyond it.
    """
    pair = "{0} = QuantizeLinear ({1}, {2}, {3}) {4} = DequantizeLinear ({0}, {2}, {3})"
    graph = f"""
    clips (float[2, 4] x) => (float[2, 4] y, float[2, 4] z, float[2, 4] t, float[2, 4] u, float[2, 4] v) {{
        m = MatMul (x, w) c = Clip (m, zero, six) {pair.format("qa", "c", "fits", "zu", "y")}
        n = MatMul (x, w) d = Clip (n, zero, six) {pair.format("qb", "d", "wide", "zu", "z")}
        o = MatMul (x, w) r = Relu (o) {pair.format("qc", "r", "fits", "zu", "t")}
        p = MatMul (x, w) s = Relu (p) {pair.format("qd", "s", "signed", "zs", "u")}
        g = MatMul (x, w) h = Clip (g, less, six) {pair.format("qe", "h", "wide", "zm", "v")}
    }}"""
    weights = {"w": models.normal(4, 4, scale=3), "zu": np.uint8(0), "zm": np.uint8(128), "zs": np.int8(0)}
    numbers = _numbers(zero=0, less=-6, six=6, fits=6 / 255, wide=12 / 255, signed=6 / 127)
    return models.model(graph, {**weights, **numbers}, opset)


def image_model(opset: int = 13) -> onnx.ModelProto:
    """An image in, an image and a vector out."""
    graph = """
    image (float[N, 3, 8, 6] x, float[N, 4] other) => (float[N, 4, 8, 6] y, float[N, 4] v) {
        y = Conv <pads = [1, 1, 1, 1]> (x, w) p = GlobalAveragePool (y) f = Flatten (p) v = Add (f, other)
    }"""
    return models.model(graph, {"w": models.normal(4, 3, 3, 3)}, opset)


def half_model(opset: int = 15) -> onnx.ModelProto:
    """A float16 model."""
    weights = {"w": models.normal(4, 3).astype(np.float16)}
    return models.model(
        "half (float16[2, 4] x) => (float16[2, 3] y) { m = MatMul (x, w) y = Relu (m) }", weights, opset
    )


def _mixed(opset: int = 13) -> onnx.ModelProto:
    """Conv, Mul, Add, Concat, Resize, MatMul, Sigmoid."""
    graph = """
    mixed (float[2, 4, 6, 6] x) => (float[2, 8, 12, 12] y, float[2, 4, 6, 5] z) {
        c = Conv (x, w, b) m = Mul (c, x) a = Add (m, c) s = Sigmoid (a) j = Concat <axis = 1> (s, a)
        r = Resize <mode = "nearest"> (j, , sizes) y = Relu (r)
        n = MatMul (a, v) z = Tanh (n)
    }"""
    weights = {"w": models.normal(4, 4, 1, 1), "b": models.normal(4), "v": models.normal(6, 5)}
    return models.model(graph, {**weights, "sizes": np.array([1, 1, 2, 2], np.float32)}, opset)


@cache
def quantized(preset: str, float_model: Callable[[], onnx.ModelProto] = _mixed, **options: object) -> onnx.ModelProto:
    """A small model under a preset."""
    from quark.onnx import Config, ModelQuantizer, get_default_config

    config = get_default_config(preset)
    config.extra_options.update({"PrintSummary": False, **options})
    proto = float_model()
    result = ModelQuantizer(Config(config)).quantize_model(proto, None, [models.feeds(proto, seed=k) for k in range(3)])
    assert result is not None
    return result


def unaligned_bias() -> onnx.ModelProto:
    """A quantized Conv whose int32 bias has a scale of its own, and whose weight has one channel of almost 0."""
    proto = onnx.ModelProto()
    proto.CopyFrom(quantized("A8W8"))
    for tensor in proto.graph.initializer:
        if tensor.name in ("b_quantized_scale", "b_quantized"):
            array = onnx.numpy_helper.to_array(tensor)
            changed = array * np.float32(2) if tensor.name.endswith("scale") else array // 2
            tensor.CopyFrom(onnx.numpy_helper.from_array(changed.astype(array.dtype), tensor.name))
    return proto


def lstm(outputs: str = "y", no_bias: bool = False) -> onnx.ModelProto:
    """A quantized LSTM in both directions; ``outputs`` may name the last states too."""
    from quark.onnx import Config, ModelQuantizer, get_default_config

    ends = ", ".join(f"float[{'5, ' if name == 'y' else ''}2, 3, 4] {name}" for name in outputs.split(", "))
    graph = f"""
    lstm (float[5, 3, 6] x) => ({ends}) {{
        {outputs} = LSTM <hidden_size = 4, direction = "bidirectional"> (x, w, r{"" if no_bias else ", b"})
    }}"""
    weights = {"w": models.normal(2, 16, 6), "r": models.normal(2, 16, 4), "b": models.normal(2, 32)}
    proto = models.model(graph, weights if not no_bias else {k: weights[k] for k in "wr"}, 17)
    config = get_default_config("A8W8")
    config.extra_op_types_to_quantize = ["LSTM"]
    config.extra_options.update({"PrintSummary": False, "QuantizeAllOpTypes": True})
    result = ModelQuantizer(Config(config)).quantize_model(proto, None, [models.feeds(proto, seed=k) for k in range(3)])
    assert result is not None
    return result


def unequal(opset: int = 13) -> onnx.ModelProto:
    """Two pairs of convolutions whose channels differ widely; the third reads a tensor that is an output too."""
    graph = """
    unequal (float[2, 3, 6, 6] x) => (float[2, 4, 6, 6] y, float[2, 4, 6, 6] z) {
        a = Conv (x, wa, b) r = Relu (a) y = Conv (r, wb, b) s = Relu (y) z = Conv (s, wb)
    }"""
    weights = {"wa": models.normal(4, 3, 1, 1), "wb": models.normal(4, 4, 1, 1), "b": models.normal(4)}
    weights["wa"][0] *= 100
    return models.model(graph, weights, opset)


def out_of_reach(preset: str = "XINT8") -> onnx.ModelProto:
    """A power-of-two model quantized without the limits of the NPU, some of whose positions are beyond them."""

    def far() -> onnx.ModelProto:
        graph = """
        far (float[2, 4, 6, 6] x) => (float[2, 8, 6, 6] z) {
            a = Conv (x, w, b) l = LeakyRelu <alpha = 0.3> (a) s = Sigmoid (l) m = Mul (l, s)
            p = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (m)
            z = Concat <axis = 1> (p, s)
        }"""
        weights = {"w": models.normal(4, 4, 1, 1, scale=1e-5), "b": models.normal(4)}
        return models.model(graph, weights)

    return quantized(preset, far, NPULimitationCheck=False, SimulateDPU=False)


def channels_far_apart() -> onnx.ModelProto:
    """A quantized Conv of which one channel is almost 0."""

    def small() -> onnx.ModelProto:
        weight = models.normal(4, 4, 1, 1)
        weight[1] *= 1e-9
        graph = "far (float[2, 4, 6, 6] x) => (float[2, 4, 6, 6] y) { c = Conv (x, w) r = Relu (c) y = Neg (r) }"
        return models.model(graph, {"w": weight})

    return quantized("A8W8_CPU", small)


def extended() -> onnx.ModelProto:
    """An 8-bit model whose Q and DQ are those of com.amd.quark."""
    from quark.operators import add_functions

    proto = onnx.ModelProto()
    proto.CopyFrom(quantized("A8W8"))
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.op_type, node.domain = f"Extended{node.op_type}", "com.amd.quark"
    add_functions(proto)
    return proto


def infinite() -> onnx.ModelProto:
    """A mask of -inf."""
    mask = np.triu(np.full((5, 5), -np.inf, np.float32), 1)
    return models.model("inf (float[2, 5, 5] x) => (float[2, 5, 5] y) { a = Add (x, m) y = Softmax (a) }", {"m": mask})


def other_types(opset: int = 13) -> onnx.ModelProto:
    """An instance normalization, a mean and a BatchNormalization of float64, a mean of integers."""
    graph = """
    other_types (double[2, 4, 6, 5] x) => (double[2, 4, 6, 5] y, double[2, 4, 1, 1] z, double[2, 4, 6, 5] n,
                                           int32[2, 4, 1, 1] k) {
        m = ReduceMean <axes = [2, 3]> (x) c = Sub (x, m) s = Mul (c, c) v = ReduceMean <axes = [2, 3]> (s)
        e = Add (v, eps) q = Sqrt (e) y = Div (c, q)
        z = ReduceMean <axes = [2, 3]> (y)
        n = BatchNormalization (x, bn_scale, bn_bias, bn_mean, bn_var)
        i = Cast <to = 6> (x) k = ReduceMean <axes = [2, 3]> (i)
    }"""
    weights = {name: array.astype(np.float64) for name, array in models.batch_norm("bn", 4).items()}
    return models.model(graph, {**weights, "eps": np.array(1e-5)}, opset)


def old_split() -> onnx.ModelProto:
    """A Split of opset 9, whose Slice has its bounds as attributes."""
    graph = """
    old_split (float[2, 4, 6] x) => (float[2, 3, 6] y, float[2, 1, 6] z) {
        y, z = Split <axis = 1, split = [3, 1]> (x)
    }"""
    return models.model(graph, {}, 9, ir_version=4)


def unknown_outside(opset: int = 13) -> onnx.ModelProto:
    """Bodies of an If that read a tensor whose shape only a run tells."""
    graph = """
    unknown_outside (float[2, 4] x) => (float[a, b] y) {
        s = Shape (x) f = Cast <to = 1> (s) g = Mul (f, one) t = Cast <to = 7> (g) r = Reshape (x, t)
        c = ReduceMean <keepdims = 0> (x) p = Greater (c, zero)
        y = If (p) <
            then_branch = then () => (float[a, b] u) { e = Exp (r) u = Relu (e) },
            else_branch = otherwise () => (float[a, b] v) { d = Tanh (r) v = Neg (d) }>
    }"""
    return models.model(graph, _numbers(one=1, zero=0), opset)


def equal_constants() -> onnx.ModelProto:
    """A constant that is stored twice."""
    text = "g (float[2, 6] x) => (float[2, 6] y) { u = Mul (x, a) y = Mul (u, b) }"
    return models.model(text, {name: np.full(6, 1.5, np.float32) for name in "ab"}, 17)


def einsums() -> onnx.ModelProto:
    """A projection, and a product of two activations that are moved and put together."""
    text = """g (float[2, 6, 8] x) => (float[2, 6, 4] y, float[2, 6, 6] s) {
        q = Einsum <equation = "bnd,dhk->bnhk"> (x, w)
        s = Einsum <equation = "bnhk,bmhk->bnm"> (q, q)
        y = Einsum <equation = "bnhk,hkd->bnd"> (q, v) }"""
    return models.model(text, {"w": models.normal(8, 2, 3), "v": models.normal(2, 3, 4)}, 20)


TRIGGERS: dict[str, Callable[[], onnx.ModelProto]] = {
    "einsums": einsums,
    "equal_constants": equal_constants,
    "gelu": gelu,
    "gelu below opset 20": lambda: gelu(13),
    "layer_norm": layer_norm,
    "instance_norm": instance_norm,
    "l2_norm": l2_norm,
    "concat_norm": concat_norm,
    "unlike_parts": unlike_parts,
    "pools_and_splits": pools_and_splits,
    "focuses": focuses,
    "attention_scale": attention_scale,
    "lstm_cell": lstm_cell,
    "slow_forms": slow_forms,
    "slow_floats": slow_floats,
    "channels_last": channels_last,
    "quantized_clips": quantized_clips,
    "image_model": image_model,
    "half_model": half_model,
    "a8w8": lambda: quantized("A8W8"),
    "u8s8 cpu": lambda: quantized("A8W8_CPU"),
    "xint8": lambda: quantized("XINT8"),
    "bf16": lambda: quantized("BF16"),
    "bf16 casts": lambda: quantized("BF16", BF16QDQToCast=True),
    "bfp16": lambda: quantized("BFP16"),
    "unaligned_bias": unaligned_bias,
    "channels_far_apart": channels_far_apart,
    "infinite": infinite,
    "lstm": lstm,
    "unequal": unequal,
    "out_of_reach": out_of_reach,
    "extended": extended,
    "other_types": other_types,
    "old_split": old_split,
    "unknown_outside": unknown_outside,
    **fused_models.FUSED,
}


# ---- random graphs ---------------------------------------------------------------------------------------------------


class _Writer:
    """Collects nodes and weights; a weight of a shape that is there already is shared every other time."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.lines: list[str] = []
        self.weights: dict[str, np.ndarray] = {}
        self.count = 0

    def add(self, operator: str, *operands: str) -> str:
        """A node; ``operator`` may have attributes behind it. Returns what it makes."""
        self.count += 1
        self.lines.append(f"v{self.count} = {operator} ({', '.join(operands)})")
        return f"v{self.count}"

    def weight(self, *shape: int, positive: bool = False) -> str:
        alike = [name for name, array in self.weights.items() if array.shape == shape and (array.min() > 0) == positive]
        if alike and self.rng.random() < 0.5:
            return str(self.rng.choice(alike))
        values = self.rng.uniform(0.5, 1.5, shape) if positive else self.rng.normal(0, 0.4, shape)
        self.count += 1
        self.weights[f"w{self.count}"] = values.astype(np.float32)
        return f"w{self.count}"

    def number(self, value: float) -> str:
        self.count += 1
        self.weights[f"k{self.count}"] = np.array(value, np.float32)
        return f"k{self.count}"


def _norm(w: _Writer, x: str, channels: int = 4) -> str:
    """BatchNormalization."""
    some, more = w.weight(channels, positive=True), w.weight(channels, positive=True)
    return w.add("BatchNormalization", x, some, w.weight(channels), w.weight(channels), more)


def _conv(w: _Writer, x: str) -> str:
    kind = w.rng.choice(["Conv", "ConvTranspose"])
    group = int(w.rng.choice([1, 2, 4]))
    made = w.add(f"{kind} <group = {group}>", x, w.weight(4, 4 // group, 1, 1), w.weight(4))
    return _norm(w, made) if w.rng.random() < 0.6 else made


def _joined(w: _Writer, x: str) -> str:
    made = w.add("Concat <axis = 1>", _conv(w, x), w.add("Conv", x, w.weight(4, 4, 1, 1)))
    if w.rng.random() < 0.7:
        made = _norm(w, made, 8)
    w.lines.append(f"l{w.count}, r{w.count} = Split <axis = 1> ({made})")
    return w.add("Add", f"l{w.count}", f"r{w.count}")


def _normalized(w: _Writer, x: str, mean: str) -> str:
    """(x - mean) / sqrt(variance + epsilon)."""
    centered = w.add("Sub", x, w.add(mean, x))
    square = w.add("Mul", centered, centered) if w.rng.random() < 0.5 else w.add("Pow", centered, w.number(2))
    return w.add("Div", centered, w.add("Sqrt", w.add("Add", w.add(mean, square), w.number(1e-5))))


def _instance(w: _Writer, x: str) -> str:
    made = _normalized(w, x, "ReduceMean <axes = [2, 3]>")
    return w.add("Mul", made, w.weight(1, 4, 1, 1)) if w.rng.random() < 0.5 else made


def _layer(w: _Writer, x: str) -> str:
    made = _normalized(w, x, "ReduceMean <axes = [-1]>")
    return w.add("Add", w.add("Mul", made, w.weight(6)), w.weight(6))


def _gelu(w: _Writer, x: str) -> str:
    erf = w.add("Erf", w.add("Div", x, w.number(2**0.5)))
    return w.add("Mul", w.add("Mul", x, w.add("Add", erf, w.number(1))), w.number(0.5))


def _clip(w: _Writer, x: str) -> str:
    return w.add("Clip", x, w.number(0), w.number(6)) if w.rng.random() < 0.5 else w.add("Clip", x, w.number(0))


def _spatial(w: _Writer, x: str) -> str:
    return w.add("Mul", x, w.add("ReduceMean <axes = [2, 3]>", x))


PIECES = (_conv, _conv, _joined, _instance, _layer, _gelu, _clip, _spatial)


def random_graph(seed: int, opset: int = 20) -> onnx.ModelProto:
    """Eight random pieces in a row with skips between them; [2, 4, 24, 6] in and out."""
    w = _Writer(seed)
    made = ["x"]
    for _ in range(8):
        piece = PIECES[w.rng.integers(len(PIECES))]
        last = piece(w, made[-1])
        if w.rng.random() < 0.3:
            last = w.add("Add", last, made[w.rng.integers(len(made))])
        made.append(last)
    w.lines.append(f"y = Tanh ({made[-1]})")
    shape = "float[2, 4, 24, 6]"
    body = "\n".join(w.lines).replace("ReduceMean <axes", "ReduceMean <axes")
    proto = models.model(
        f"random ({shape} x) => ({shape} y, {shape} inner) {{ {body} inner = Identity ({made[4]}) }}", w.weights, 13
    )
    return proto if opset == 13 else lifted(proto, opset)


def lifted(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model in a newer opset."""
    from quark.onnx.graph.lift import lift
    from quark.onnx.graph.model import load, to_proto

    return to_proto(lift(load(proto), opset))
