"""Small ONNX models for tests, and the verbs that every test of the flow needs: feeds, a run, a comparison.

Models are written as text (``onnx.parser``), weights are random with a fixed seed. Every builder takes the opset it is
written in, so that "old exports" are a parameter and not another file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper, parser

SHARED = Path(__file__).parents[2] / ".." / "shared"
REAL_MODELS = SHARED / "data" / "models"


# ---- verbs -----------------------------------------------------------------------------------------------------------


def model(
    graph: str,
    weights: Mapping[str, np.ndarray] | None = None,
    opset: int = 13,
    ir_version: int = 8,
    domains: Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """A model from the text of its graph and its initializers."""
    proto = parser.parse_graph(graph)
    proto.initializer.extend(numpy_helper.from_array(array, name) for name, array in (weights or {}).items())
    imports = [helper.make_opsetid("", opset)]
    imports += [helper.make_opsetid(domain, version) for domain, version in (domains or {}).items()]
    return helper.make_model(proto, opset_imports=imports, ir_version=ir_version)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Normal float32 values."""
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


def batch_norm(name: str, channels: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Statistics of a trained BatchNormalization, under ``name.scale``, ``.bias``, ``.mean``, ``.var``."""
    rng = np.random.default_rng([seed, channels])
    return {
        f"{name}_scale": rng.uniform(0.5, 1.5, channels).astype(np.float32),
        f"{name}_bias": rng.normal(0, 0.3, channels).astype(np.float32),
        f"{name}_mean": rng.normal(0, 0.3, channels).astype(np.float32),
        f"{name}_var": rng.uniform(0.3, 2.0, channels).astype(np.float32),
    }


def real_inputs(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Graph inputs that are not initializers."""
    initializers = {tensor.name for tensor in proto.graph.initializer}
    return [value for value in proto.graph.input if value.name not in initializers]


def feeds(proto: onnx.ModelProto, seed: int = 0, unknown: int = 2, high: int = 4) -> dict[str, np.ndarray]:
    """Random feeds: normal floats, integers in 0..``high`` - 1; unknown dimensions become ``unknown``."""
    rng = np.random.default_rng(seed)
    made = {}
    for value in real_inputs(proto):
        kind = value.type.tensor_type
        shape = [dim.dim_value or unknown for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        random = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, high, shape)
        made[value.name] = np.asarray(random).astype(dtype)
    return made


def session(source: onnx.ModelProto | str | Path) -> onnxruntime.InferenceSession:
    """A default session, silent but for errors."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    content = source.SerializeToString() if isinstance(source, onnx.ModelProto) else str(source)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(source: onnx.ModelProto | str | Path, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs on ONNX Runtime."""
    return session(source).run(None, dict(inputs))


def assert_close(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float = 1e-5) -> None:
    """Equal shapes and types; largest difference at most ``tolerance`` times the largest expected value (or 1)."""
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if theirs.dtype.kind != "f":
            np.testing.assert_array_equal(ours, theirs)
            continue
        unit = max(1.0, float(np.max(np.abs(theirs), initial=0)))
        np.testing.assert_allclose(ours / unit, theirs / unit, rtol=0, atol=tolerance)


def op_types(proto: onnx.ModelProto) -> list[str]:
    """Operator types of the main graph in order."""
    return [node.op_type for node in proto.graph.node]


# ---- whole networks --------------------------------------------------------------------------------------------------


def cnn(opset: int = 13, ir_version: int = 8) -> onnx.ModelProto:
    """Conv, BatchNormalization, Relu, MaxPool, a residual Add, GlobalAveragePool, Flatten, Gemm."""
    graph = """
    cnn (float[N, 3, 16, 16] x) => (float[N, 10] y) {
        c1 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
        n1 = BatchNormalization <epsilon = 0.001> (c1, bn1_scale, bn1_bias, bn1_mean, bn1_var)
        r1 = Relu (n1)
        p1 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r1)
        c2 = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (p1, w2, b2)
        n2 = BatchNormalization (c2, bn2_scale, bn2_bias, bn2_mean, bn2_var)
        a2 = Add (n2, p1)
        r2 = Relu (a2)
        g = GlobalAveragePool (r2)
        f = Flatten (g)
        y = Gemm <transB = 1> (f, w3, b3)
    }"""
    weights = {
        "w1": normal(8, 3, 3, 3, scale=0.3),
        **batch_norm("bn1", 8, seed=1),
        "w2": normal(8, 8, 3, 3, scale=0.15),
        "b2": normal(8),
        **batch_norm("bn2", 8, seed=2),
        "w3": normal(10, 8),
        "b3": normal(10, seed=3),
    }
    return model(graph, weights, opset, ir_version)


def conv_chain(length: int, channels: int = 2, opset: int = 13) -> onnx.ModelProto:
    """``length`` times Conv, BatchNormalization, Relu, all of one size."""
    lines, weights, x = [], {}, "x"
    for k in range(length):
        lines += [
            f"c{k} = Conv <kernel_shape = [1, 1]> ({x}, w{k})",
            f"n{k} = BatchNormalization (c{k}, bn{k}_scale, bn{k}_bias, bn{k}_mean, bn{k}_var)",
            f"r{k} = Relu (n{k})" if k < length - 1 else f"y = Relu (n{k})",
        ]
        weights |= {f"w{k}": normal(channels, channels, 1, 1, seed=k), **batch_norm(f"bn{k}", channels, seed=k)}
        x = f"r{k}"
    body = "\n".join(lines)
    shape = f"float[1, {channels}, 4, 4]"
    return model(f"chain ({shape} x) => ({shape} y) {{ {body} }}", weights, opset)


def depthwise_cnn(opset: int = 13) -> onnx.ModelProto:
    """Depthwise and pointwise convolutions with Clip(0, 6) bounds as inputs (opset 11 or newer)."""
    graph = """
    mobile (float[N, 4, 12, 12] x) => (float[N, 6, 6, 6] y) {
        d = Conv <group = 4, kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (x, wd, bd)
        e = Clip (d, zero, six)
        y = Conv <kernel_shape = [1, 1]> (e, wp, bp)
    }"""
    weights = {
        "wd": normal(4, 1, 3, 3),
        "bd": normal(4),
        "zero": np.array(0, np.float32),
        "six": np.array(6, np.float32),
        "wp": normal(6, 4, 1, 1),
        "bp": normal(6),
    }
    return model(graph, weights, opset)


def attention(opset: int = 17) -> onnx.ModelProto:
    """One head of self-attention with LayerNormalization and an MLP; token ids in, logits out."""
    graph = """
    attention (int64[N, T] ids) => (float[N, T, 16] logits) {
        e = Gather (table, ids)
        n = LayerNormalization <axis = -1> (e, ln_w, ln_b)
        q = MatMul (n, wq)
        k = MatMul (n, wk)
        v = MatMul (n, wv)
        kt = Transpose <perm = [0, 2, 1]> (k)
        s = MatMul (q, kt)
        d = Mul (s, scale)
        p = Softmax <axis = -1> (d)
        h = MatMul (p, v)
        a = Add (e, h)
        u = MatMul (a, w1)
        ub = Add (u, b1)
        g = Sigmoid (ub)
        m = Mul (ub, g)
        logits = MatMul (m, w2)
    }"""
    weights = {"table": normal(16, 8), "ln_w": normal(8, seed=1) * 0.1 + 1, "ln_b": normal(8, seed=2, scale=0.1)}
    weights |= {f"w{name}": normal(8, 8, seed=ord(name), scale=0.35) for name in "qkv"}
    weights |= {"w1": normal(8, 12, scale=0.35), "b1": normal(12), "w2": normal(12, 16, scale=0.3)}
    weights["scale"] = np.array(8**-0.5, np.float32)
    return model(graph, weights, opset)


def shared_weights(opset: int = 13) -> onnx.ModelProto:
    """Two branches through one Conv weight and bias; one has a BatchNormalization, the other has not."""
    graph = """
    shared (float[N, 4, 8, 8] x) => (float[N, 4, 8, 8] y, float[N, 4, 8, 8] z) {
        a = Conv <kernel_shape = [1, 1]> (x, w, b)
        y = BatchNormalization (a, bn_scale, bn_bias, bn_mean, bn_var)
        h = Relu (x)
        z = Conv <kernel_shape = [1, 1]> (h, w, b)
    }"""
    weights = {"w": normal(4, 4, 1, 1), "b": normal(4), **batch_norm("bn", 4)}
    return model(graph, weights, opset)


def two_inputs(opset: int = 13) -> onnx.ModelProto:
    """A float image and an integer table index, joined."""
    graph = """
    pair (float[N, 3, 8, 8] image, int32[N] kind) => (float[N, 4] y) {
        c = Conv <kernel_shape = [3, 3]> (image, w, b)
        g = GlobalAveragePool (c)
        f = Flatten (g)
        e = Gather (table, kind)
        s = Add (f, e)
        y = Relu (s)
    }"""
    return model(graph, {"w": normal(4, 3, 3, 3), "b": normal(4), "table": normal(5, 4)}, opset)


def branching(opset: int = 13) -> onnx.ModelProto:
    """An If whose branches read the outer graph; each holds a weight in a Constant node."""
    graph = """
    branching (float[2, 4] x, bool flag) => (float[2, 3] y) {
        r = Relu (x)
        y = If (flag) <
            then_branch = then () => (float[2, 3] t) {
                wt = Constant <value = float[4, 3] {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}> ()
                t = MatMul (r, wt)
            },
            else_branch = other () => (float[2, 3] o) {
                we = Constant <value = float[4, 3] {3, 2, 1, 0, 1, 2, 3, 4, 5, 4, 3, 2}> ()
                m = MatMul (x, we)
                o = Relu (m)
            }
        >
    }"""
    return model(graph, None, opset)


# ---- habits of old exporters -----------------------------------------------------------------------------------------


def initializers_as_inputs(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model as IR version 3 wrote it: every initializer is a graph input too."""
    old = onnx.ModelProto()
    old.CopyFrom(proto)
    old.ir_version = 3
    for tensor in old.graph.initializer:
        old.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return old


def constant_weights(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The same model with every initializer in a Constant node."""
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in proto.graph.initializer]
    del changed.graph.initializer[:], changed.graph.node[:]
    changed.graph.node.extend([*nodes, *proto.graph.node])
    return changed


def nhwc(opset: int = 9) -> onnx.ModelProto:
    """A channels-last model as converters from TensorFlow write it: Transpose at both ends."""
    graph = """
    nhwc (float[N, 8, 8, 3] x) => (float[N, 6, 6, 4] y) {
        t = Transpose <perm = [0, 3, 1, 2]> (x)
        c = Conv <kernel_shape = [3, 3]> (t, w, b)
        r = Relu (c)
        y = Transpose <perm = [0, 2, 3, 1]> (r)
    }"""
    return model(graph, {"w": normal(4, 3, 3, 3), "b": normal(4)}, opset, ir_version=4)


def half_float_clip(opset: int = 7) -> onnx.ModelProto:
    """Clip on float16 with the bounds that exporters write for "no bound"."""
    bound = float(np.finfo(np.float32).max)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT16, [2, 3]) for name in "xy")
    node = helper.make_node("Clip", ["x"], ["y"], min=0.0, max=bound)
    graph = helper.make_graph([node], "half", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3)


# ---- real models -----------------------------------------------------------------------------------------------------


def real_feeds(name: str, proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Feeds in the ranges that a model of the shared set expects (its data are not needed to compare two graphs)."""
    made = feeds(proto, high=400)
    if name.startswith("silero"):
        made["sr"] = np.array(16000, np.int64)
        made["input"] = made["input"][:, :1].repeat(576, axis=1) * _tone(576)
    if name.startswith(("yolox", "squeezenet")):
        made = {key: np.abs(value) * 60 for key, value in made.items()}
    return made


def _tone(length: int) -> np.ndarray:
    """A decaying tone."""
    time = np.arange(length, dtype=np.float32)
    return (np.sin(time * 0.2) * np.exp(-time / length)).astype(np.float32)
