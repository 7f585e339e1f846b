"""Graphs that exporters and people write and that few programs expect: values of no size or rank, shared and returned
constants, bodies in bodies, functions, recurrence in every direction, other float types, old and new versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper, parser

Built = tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]


def _random(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.5, shape).astype(dtype)


def _model(text: str, opset: int = 17, ir: int = 9, **weights: np.ndarray) -> onnx.ModelProto:
    imports = f'"" : {opset}, "own" : 1, "com.microsoft" : 1'
    made = parser.parse_model(f"<ir_version: {ir}, opset_import: [{imports}]>\n{text}")
    made.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return made


def _x(*shape: int, count: int = 1, **more: Any) -> list[dict[str, np.ndarray]]:
    return [{"x": _random(*shape, seed=7 + k, **more)} for k in range(count)]


def empty_middle() -> Built:
    """A Slice that leaves nothing, joined with something."""
    text = """g (float[N, 8] x) => (float[N, M] y) {
        a = MatMul(x, w)
        none = Slice(a, zero, zero, one)
        y = Concat <axis = 1> (none, a)
    }"""
    numbers = {"zero": np.array([0]), "one": np.array([1])}
    return _model(text, w=_random(8, 6), **numbers), _x(4, 8)


def empty_batch() -> Built:
    """The calibration has rows, a later run has none."""
    model = _model("g (float[N, 8] x) => (float[N, 6] y) { a = MatMul(x, w) y = Relu(a) }", w=_random(8, 6))
    return model, [*_x(4, 8), {"x": np.zeros((0, 8), np.float32)}]


def empty_weight() -> Built:
    """A layer of no outputs beside one that has some."""
    text = "g (float[N, 8] x) => (float[N, 6] y, float[N, 0] z) { y = MatMul(x, w)  z = MatMul(x, v) }"
    return _model(text, w=_random(8, 6), v=np.zeros((8, 0), np.float32)), _x(4, 8)


def scalars() -> Built:
    """Sums and factors of rank 0, one of them an input."""
    text = """g (float[N, 8] x, float s) => (float[N, 6] y, float t) {
        a = Mul(x, s)
        b = MatMul(a, w)
        y = Add(b, half)
        t = ReduceMax <keepdims = 0> (y)
    }"""
    feed = {**_x(4, 8)[0], "s": np.array(2.0, np.float32)}
    return _model(text, w=_random(8, 6), half=np.array(0.5, np.float32)), [feed]


def scalar_gemm() -> Built:
    """A bias of rank 0 and one of one row."""
    text = """g (float[N, 8] x) => (float[N, 6] y) {
        a = Gemm(x, w, c)
        b = Relu(a)
        y = Gemm <transB = 1> (b, v, d)
    }"""
    biases = {"c": np.array(0.3, np.float32), "d": _random(1, 6, seed=3)}
    return _model(text, w=_random(8, 5), v=_random(6, 5, seed=2), **biases), _x(4, 8)


def weight_returned() -> Built:
    """A weight that is an output of the graph too."""
    text = "g (float[N, 8] x) => (float[N, 6] y, float[8, 6] w) { y = MatMul(x, w) }"
    return _model(text, w=_random(8, 6)), _x(4, 8)


def input_returned() -> Built:
    """An input that is an output, by an Identity and by its layer."""
    text = "g (float[N, 8] x) => (float[N, 6] y, float[N, 8] z) { y = MatMul(x, w)  z = Identity(x) }"
    return _model(text, w=_random(8, 6)), _x(4, 8)


def shared_weight() -> Built:
    """One weight in two layers, transposed in one, and added to something."""
    text = """g (float[N, 8] x) => (float[N, 8] y) {
        a = MatMul(x, w)
        b = Gemm <transB = 1> (a, w)
        c = MatMul(b, w)
        d = Relu(c)
        y = Add(d, w)
    }"""
    return _model(text, w=_random(8, 8)), _x(8, 8)


def shared_convolution() -> Built:
    """One weight in a Conv and in a ConvTranspose: its channels lie along other axes."""
    text = """g (float[N, 4, H, W] x) => (float[N, 4, P, Q] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w)
        b = Relu(a)
        y = ConvTranspose <pads = [1, 1, 1, 1]> (b, w)
    }"""
    return _model(text, w=_random(4, 4, 3, 3)), _x(1, 4, 8, 8) + _x(2, 4, 5, 7)


def names_missing() -> Built:
    """Nodes without a name, and one that is called as a tensor."""
    model = _model(
        "g (float[N, 8] x) => (float[N, 8] y) { a = MatMul(x, w) b = Relu(a) c = MatMul(b, v) y = Relu(c) }",
        w=_random(8, 8),
        v=_random(8, 8, seed=2),
    )
    for node, name in zip(model.graph.node, ("y", "", "w", ""), strict=True):
        node.name = name
    return model, _x(4, 8)


def names_of_ours() -> Built:
    """Tensors that are called as a quantizer would call its own."""
    text = """g (float[N, 8] x) => (float[N, 8] x_DequantizeLinear_Output) {
        w_quantized = MatMul(x, w)
        x_QuantizeLinear_Output = Relu(w_quantized)
        x_scale = MatMul(x_QuantizeLinear_Output, w_scale)
        x_DequantizeLinear_Output = Relu(x_scale)
    }"""
    return _model(text, w=_random(8, 8), w_scale=_random(8, 8, seed=2)), _x(4, 8)


def constants_as_nodes() -> Built:
    """Weights out of Constant, Identity, Cast and Transpose nodes."""
    text = """g (float[N, 8] x) => (float[N, 8] y) {
        w1 = Identity(w)
        a = MatMul(x, w1)
        k = Cast <to = 1> (h)
        b = MatMul(a, k)
        t = Transpose <perm = [1, 0]> (w)
        c = MatMul(b, t)
        two = Constant <value_float = 2.0> ()
        y = Mul(c, two)
    }"""
    return _model(text, w=_random(8, 8), h=_random(8, 8, seed=2, dtype=np.float16)), _x(4, 8)


def optional_inputs() -> Built:
    """Empty names for inputs and outputs that are left out."""
    text = """g (float[N, 3, H, W] x) => (float[N, 4, P, Q] y) {
        a = Conv(x, w, "")
        b = Clip(a, "", six)
        y = Resize(b, "", scales)
    }"""
    scales = np.array([1, 1, 2, 2], np.float32)
    return _model(text.replace('""', ""), w=_random(4, 3, 3, 3), six=np.array(0.6, np.float32), scales=scales), [
        *_x(1, 3, 8, 8),
        *_x(2, 3, 9, 6),
    ]


def nested_bodies() -> Built:
    """A layer in an If in a Loop, that reads tensors of all three."""
    text = """g (float[N, 8] x, bool flag) => (float[N, 8] y) {
        outer = Relu(x)
        y = Loop (trips, go, x) <body = body (int64 i, bool more, float[N, 8] state) => (bool again, float[N, 8] next) {
            again = Identity(more)
            s = MatMul(state, w)
            next = If (flag) <
                then_branch = then () => (float[N, 8] p) { q = MatMul(s, v)  p = Add(q, outer) },
                else_branch = other () => (float[N, 8] r) { r = Relu(s) }
            >
        }>
    }"""
    weights = {"w": _random(8, 8), "v": _random(8, 8, seed=2)}
    feeds = [{**one, "flag": np.array(flag)} for one in _x(4, 8) for flag in (True, False)]
    return _model(text, trips=np.array(3), go=np.array(True), **weights), feeds


def collected() -> Built:
    """A Loop that puts what a layer makes into a sequence."""
    text = """g (float[N, 8] x) => (float[M, 8] y) {
        first = MatMul(x, v)
        none = SequenceEmpty <dtype = 1> ()
        last, all = Loop (trips, go, first, none) <body = body
            (int64 i, bool more, float[N, 8] state, seq(float[N, 8]) s) =>
            (bool again, float[N, 8] next, seq(float[N, 8]) longer) {
            again = Identity(more)
            a = MatMul(state, w)
            next = Relu(a)
            longer = SequenceInsert(s, next)
        }>
        y = ConcatFromSequence <axis = 0> (all)
    }"""
    weights = {"w": _random(8, 8), "v": _random(8, 8, seed=2)}
    return _model(text, trips=np.array(3), go=np.array(True), **weights), _x(4, 8)


def a_scan() -> Built:
    """A recurrent cell written as a Scan."""
    text = """g (float[T, 8] x, float[1, 8] h) => (float[1, 8] last, float[T, 1, 8] y) {
        last, y = Scan <num_scan_inputs = 1, body = body (float[1, 8] state, float[8] now) =>
            (float[1, 8] next, float[1, 8] out) {
            a = MatMul(state, w)
            b = MatMul(now, v)
            c = Add(a, b)
            next = Tanh(c)
            out = Identity(next)
        }> (h, x)
    }"""
    feeds = [{"x": _random(size, 8), "h": _random(1, 8, seed=1)} for size in (5, 3, 9)]
    return _model(text, w=_random(8, 8), v=_random(8, 8, seed=2)), feeds


def functions() -> Built:
    """A function of the model's own that is called twice and calls another."""
    text = """g (float[N, 8] x) => (float[N, 8] y) {
        a = own.block <alpha = 0.2> (x, w)
        y = own.block <alpha = 0.5> (a, v)
    }
    <domain: "own", opset_import: ["" : 17, "own" : 1]>
    block <alpha> (p, q) => (r) { s = own.layer(p, q)  r = LeakyRelu <alpha: float = @alpha> (s) }
    <domain: "own", opset_import: ["" : 17]>
    layer (p, q) => (r) { r = MatMul(p, q) }"""
    return _model(text, w=_random(8, 8), v=_random(8, 8, seed=2)), _x(4, 8)


def _recurrent(kind: str, gates: int, directions: int, more: str = "", **attributes: str) -> Built:
    outputs = "y, h, c" if kind == "LSTM" else "y, h"
    returned = "float[T, D, B, 8] y, float[D, B, 8] h" + (", float[D, B, 8] c" if kind == "LSTM" else "")
    said = ", ".join(["hidden_size = 8", *(f"{key} = {value}" for key, value in attributes.items())])
    text = f"""g (float[T, B, 4] x) => ({returned}) {{ {outputs} = {kind} <{said}> (x, w, r, b{more}) }}"""
    weights = {"w": _random(directions, gates * 8, 4), "r": _random(directions, gates * 8, 8, seed=1)}
    model = _model(text, b=_random(directions, 2 * gates * 8, seed=2), **weights)
    return model, [{"x": _random(*size, 4, seed=3)} for size in ((5, 2), (7, 2), (1, 1))]


def lstm() -> Built:
    return _recurrent("LSTM", 4, 1)


def lstm_both_ways() -> Built:
    return _recurrent("LSTM", 4, 2, direction='"bidirectional"')


def lstm_backwards_clipped() -> Built:
    return _recurrent("LSTM", 4, 1, direction='"reverse"', clip="0.7", input_forget="0")


def gru() -> Built:
    return _recurrent("GRU", 3, 1, linear_before_reset="1")


def gru_both_ways() -> Built:
    return _recurrent("GRU", 3, 2, direction='"bidirectional"')


def rnn_relu() -> Built:
    return _recurrent("RNN", 1, 1, activations='["Relu"]')


def double() -> Built:
    """Layers of double precision between ones of single precision."""
    text = """g (float[N, 8] x) => (float[N, 8] y) {
        a = MatMul(x, w)
        wide = Cast <to = 11> (a)
        b = MatMul(wide, v)
        back = Cast <to = 1> (b)
        y = MatMul(back, w)
    }"""
    return _model(text, w=_random(8, 8), v=_random(8, 8, seed=2, dtype=np.float64)), _x(4, 8)


#: How a mask is cut out of a constant while the model runs; k is what it is cut by.
MOVED_MASKS = {
    "Gather": ("Gather (m, k)", np.array([2, 0, 1, 3, 5, 4])),
    "Slice": ("Slice (m, zero, k, zero)", np.array([6])),
    "Expand": ("Expand (m, k)", np.array([6, 4])),
    "Tile": ("Tile (m, k)", np.array([1, 4])),
    "Reshape": ("Reshape (m, k)", np.array([6, 1])),
}


def moved_mask(move: str) -> Built:
    """Scores that get a bias of infinity and small numbers, as graph transformers take it out of a table."""
    made, by = MOVED_MASKS[move]
    text = f"""g (float[N, 8] x, int64[K] k) => (float[N, 5] y) {{
        a = MatMul(x, w)
        u = {made}
        t = Transpose(u)
        s = Add(a, t)
        p = Softmax(s)
        y = MatMul(p, v)
    }}"""
    mask = np.array([[0.3], [-np.inf], [0.1], [-0.2], [-np.inf], [0]], np.float32)
    model = _model(text, w=_random(8, 6), v=_random(6, 5), m=mask, zero=np.array([0]))
    return model, [{**feed, "k": by} for feed in _x(4, 8, count=2)]


def _net(dtype: str, opset: int = 17, ir: int = 9) -> Built:
    numpy = {"float": np.float32, "float16": np.float16}[dtype]
    text = f"""g ({dtype}[N, 3, H, W] x) => ({dtype}[N, 5] y) {{
        a = Conv <pads = [1, 1, 1, 1], kernel_shape = [3, 3]> (x, w)
        b = Relu(a)
        c = Conv <kernel_shape = [1, 1]> (b, v)
        d = Sigmoid(c)
        e = GlobalAveragePool(d)
        f = Flatten(e)
        y = Gemm(f, u, z)
    }}"""
    shapes = {"w": (8, 3, 3, 3), "v": (8, 8, 1, 1), "u": (8, 5), "z": (5,)}
    weights = {name: _random(*shape, seed=k, dtype=numpy) for k, (name, shape) in enumerate(shapes.items())}
    model = _model(text, opset, ir, **weights)
    if ir < 4:  # initializers had to be inputs
        kinds = [onnx.helper.make_tensor_value_info(k, TensorProto.FLOAT, v.shape) for k, v in weights.items()]
        model.graph.input.extend(kinds)
    return model, [{"x": _random(*size, seed=5, dtype=numpy)} for size in ((1, 3, 8, 8), (2, 3, 8, 8), (1, 3, 5, 11))]


ODD: dict[str, Callable[[], Built]] = {
    one.__name__: one
    for one in (
        empty_middle, empty_batch, empty_weight, scalars, scalar_gemm, weight_returned, input_returned, shared_weight,
        shared_convolution, names_missing, names_of_ours, constants_as_nodes, optional_inputs, nested_bodies,
        collected, a_scan, functions, lstm, lstm_both_ways, lstm_backwards_clipped, gru, gru_both_ways, rnn_relu,
        double,
    )
} | {
    **{f"mask by {move}": lambda move=move: moved_mask(move) for move in MOVED_MASKS},  # type: ignore[misc]
    "float16": lambda: _net("float16"),
    **{f"opset {opset}": lambda opset=opset: _net("float", opset, 4) for opset in (7, 8, 9, 11, 13, 15)},  # type: ignore[misc]
    **{f"opset {opset}": lambda opset=opset: _net("float", opset, 10) for opset in (19, 21, 23, 24)},  # type: ignore[misc]
    "ir 3": lambda: _net("float", 9, 3),
    "ir 11": lambda: _net("float", 21, 11),
}  # fmt: skip
