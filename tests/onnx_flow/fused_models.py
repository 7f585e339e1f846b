"""Models with every fused operator of ONNX Runtime that stands for layers, in every form that can be written out."""

from __future__ import annotations

import numpy as np
import onnx
from tests.onnx_flow import models

DOMAINS = {"com.microsoft": 1}


def convolutions(opset: int = 17) -> onnx.ModelProto:
    """Every activation function; one with a sum before it; one without a bias."""
    graph = """
    convolutions (float[1, 4, 6, 5] x) => (float[1, 4, 6, 5] y, float[1, 4] g, float[1, 4, 6, 5] s, float[1, 4] k) {
        a = com.microsoft.FusedConv <activation = "Relu", pads = [1, 1, 1, 1]> (x, w, b)
        c = com.microsoft.FusedConv <activation = "LeakyRelu", activation_params = [0.2], pads = [1, 1, 1, 1]> (a, w)
        d = com.microsoft.FusedConv
            <activation = "Clip", activation_params = [-0.5, 1.5], kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c, w, b)
        e = com.microsoft.FusedConv
            <activation = "HardSigmoid", activation_params = [0.3, 0.4], pads = [2, 2, 2, 2], dilations = [2, 2]> (d, w)
        s = com.microsoft.FusedConv <activation = "Relu", pads = [1, 1, 1, 1]> (e, w, b, c)
        h = com.microsoft.FusedConv <activation = "Tanh", pads = [1, 1, 1, 1]> (s, w, b)
        y = com.microsoft.FusedConv <activation = "Sigmoid", pads = [1, 1, 1, 1], group = 4> (h, depthwise, b)
        p = GlobalAveragePool (y) f = Flatten (p)
        g = com.microsoft.FusedGemm <activation = "LeakyRelu", activation_alpha = 0.3, transB = 1> (f, m, b)
        k = com.microsoft.FusedGemm <activation = "Relu", alpha = 0.5, beta = 2.0> (f, m, b)
    }"""
    weights = {
        "w": models.normal(4, 4, 3, 3, scale=0.3),
        "depthwise": models.normal(4, 1, 3, 3, scale=0.3),
        "b": models.normal(4, seed=1),
        "m": models.normal(4, 4, seed=2),
    }
    return models.model(graph, weights, opset, domains=DOMAINS)


def products(opset: int = 17) -> onnx.ModelProto:
    """Constants and activations, turned and scaled; a constant that two nodes read."""
    graph = """
    products (float[2, 3, 4] x, float[2, 3, 4] q) => (float[2, 3, 3] y, float[2, 4, 4] z, float[2, 3, 5] k,
                                                      float[2, 3, 5] n, float[2, 3, 3] t, float[2, 3, 4] o) {
        y = com.microsoft.FusedMatMul <alpha = 0.5, transB = 1> (x, q)
        z = com.microsoft.FusedMatMul <transA = 1> (x, q)
        k = com.microsoft.FusedMatMul <alpha = 3.0, transB = 1> (x, w)
        n = com.microsoft.FusedMatMul <transB = 1> (q, w)
        t = com.microsoft.TransposeMatMul <transB = 1> (q, x)
        o = com.microsoft.FusedMatMul <alpha = 2.0> (x, v)
    }"""
    weights = {"w": models.normal(5, 4), "v": models.normal(4, 4, seed=1)}
    return models.model(graph, weights, opset, domains=DOMAINS)


def functions(opset: int = 17) -> onnx.ModelProto:
    """GELU in its forms, with and without a bias."""
    graph = """
    functions (float[2, 3, 8] x) => (float[2, 3, 8] y, float[2, 3, 8] z) {
        a = com.microsoft.BiasGelu (x, b) c = com.microsoft.FastGelu (a, b) d = com.microsoft.FastGelu (c)
        y = com.microsoft.QuickGelu <alpha = 1.0> (d) z = com.microsoft.QuickGelu (y)
    }"""
    return models.model(graph, {"b": models.normal(8)}, opset, domains=DOMAINS)


def transformer(opset: int = 17) -> onnx.ModelProto:
    """An embedding with all outputs, and attention with counted, written and no masks, and values of another width."""
    graph = """
    transformer (int32[2, 5] ids, int32[2, 5] kinds, int32[2, 5] mask, int32[2, 5] places) =>
            (float[2, 5, 8] y, float[2, 5, 8] z, float[2, 5, 4] v, float[2, 5, 8] t, int32[2] count, float[2, 5, 8] s) {
        e, count, s = com.microsoft.EmbedLayerNormalization <epsilon = 1e-5>
            (ids, kinds, words, positions, segments, scale, bias, mask)
        f, none = com.microsoft.EmbedLayerNormalization (ids, , words, positions, , scale, bias, , places)
        y = com.microsoft.Attention <num_heads = 2> (e, w, b, count)
        z = com.microsoft.Attention <num_heads = 4, mask_filter_value = -1000.0> (f, w, b, mask)
        v = com.microsoft.Attention <num_heads = 2, qkv_hidden_sizes = [8, 8, 4]> (z, narrow, short)
        t = com.microsoft.Attention <num_heads = 2, unidirectional = 1, scale = 0.3> (z, w, b)
    }"""
    weights = {
        "words": models.normal(7, 8),
        "positions": models.normal(6, 8, seed=1),
        "segments": models.normal(4, 8, seed=2),
        "scale": models.normal(8, seed=3),
        "bias": models.normal(8, seed=4),
        "w": models.normal(8, 24, seed=5),
        "b": models.normal(24, seed=6),
        "narrow": models.normal(8, 20, seed=7),
        "short": models.normal(20, seed=8),
    }
    return models.model(graph, weights, opset, domains=DOMAINS)


FUSED = {
    "fused convolutions": convolutions,
    "fused products": products,
    "fused functions": functions,
    "fused transformer": transformer,
}


def operators(proto: onnx.ModelProto) -> set[str]:
    """The operators of ONNX Runtime's own domain that a model holds."""
    return {node.op_type for node in proto.graph.node if node.domain == "com.microsoft"}


def optimized(proto: onnx.ModelProto, path: str) -> onnx.ModelProto:
    """What ONNX Runtime's own optimizer makes of a model, with operators that any processor knows."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = path
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(path)


def sizes(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Samples whose masks end somewhere."""
    made = models.feeds(proto)
    if "mask" in made:
        made["mask"] = np.array([[1] * 5, [1, 1, 1, 0, 0]], np.int32)
    return made
