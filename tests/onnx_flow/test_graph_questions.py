"""Questions that placement asks of a graph, as tables: a few nodes, and those that are the answer.

Nodes are called by what they make. Each condition of the walks stands here on either side.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models

from quark.config.options import Options
from quark.config.tensor import TensorSpec
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.graph.model import load
from quark.onnx.qdq import biases, divisors, index_paths, isolated

X = "g (float[2, 4, 8] x) => (float[2, 4, 8] y)"
F32 = np.float32
CONSTANTS = {
    "two": np.array(2, F32),
    "eps": np.array(1e-5, F32),
    "minus": np.array(-0.5, F32),
    "w": models.normal(8, 8),
    "axes": np.array([1]),
    "one": np.array([1]),
    "shape": np.array([2, 4, 8]),
}


def model_of(body: str, head: str = X) -> ir.Model:
    words = set(body.replace("(", " ").replace(")", " ").replace(",", " ").split())
    used = {name: value for name, value in CONSTANTS.items() if name in words}
    return load(onnx.shape_inference.infer_shapes(models.model(f"{head} {{ {body} }}", used, 17)))


def made_by(nodes: Any) -> set[str]:
    return {str(node.outputs[0].name) for node in nodes}


# ---- what is divided by ----------------------------------------------------------------------------------------------

DIVIDED = {
    "a root of a mean": ("p = Mul (x, x) m = ReduceMean (p) e = Add (m, eps) r = Sqrt (e) y = Div (x, r)", "p m e r"),
    "the dividend": ("p = Sqrt (x) y = Div (p, two)", ""),
    "a reciprocal": ("p = Sqrt (x) y = Reciprocal (p)", "p"),
    "a product of two": ("a = Sqrt (x) b = Abs (x) p = Mul (a, b) y = Div (x, p)", ""),
    "a negative power": ("p = Mul (x, x) m = ReduceMean (p) e = Add (m, eps) y = Pow (e, minus)", "p m e"),
    "a positive power": ("p = Mul (x, x) m = ReduceMean (p) e = Add (m, eps) y = Pow (e, two)", ""),
    "a factor": ("a = Sqrt (x) p = Mul (a, two) y = Div (x, p)", "a p"),
    "moved": ("a = Sqrt (x) b = Reshape (a, shape) y = Div (x, b)", "a b"),
    "a layer": ("a = MatMul (x, w) b = Sqrt (a) y = Div (x, b)", "b"),
    "a logarithm of a Softmax": ("a = Softmax (x) y = Log (a)", "a"),
    "a division by a Softmax": ("a = Softmax (x) y = Div (x, a)", ""),
    "a logarithm of a layer behind an activation": ("r = Relu (x) a = MatMul (r, w) y = Log (a)", ""),
    "a front end": ("a = MatMul (x, w) p = Abs (a) y = Log (p)", "a p"),
    "a front end behind moves": ("t = Reshape (x, shape) a = MatMul (t, w) p = Abs (a) y = Log (p)", "t a p"),
    "a front end with a floor": ("a = MatMul (x, w) p = Clip (a, eps) y = Log (p)", "a p"),
    "a front end with a ceiling": ("c = Clip (x, eps, two) a = MatMul (c, w) p = Abs (a) y = Log (p)", "p"),
    "odds": ("p = Sigmoid (x) q = Sub (two, p) o = Div (p, q) y = Log (o)", "p q o"),
    "odds within bounds": (
        "p = Sigmoid (x) a = Clip (p, eps) q = Sub (two, p) b = Clip (q, eps) o = Div (a, b) y = Log (o)",
        "p a q b o",
    ),
    "a difference that something is divided by": ("p = Sqrt (x) q = Sub (two, p) y = Div (x, q)", ""),
    "a Softmax written out": ("e = Exp (x) t = ReduceSum (e, one) y = Div (e, t)", "t y"),
    "exponentials, moved": ("e = Exp (x) m = Reshape (e, shape) y = Div (m, two)", "y"),
    "nothing": ("y = MatMul (x, w)", ""),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_what_makes_a_divisor(name: str) -> None:
    body, expected = DIVIDED[name]
    assert made_by(divisors.makes_divisors(model_of(body))) == set(expected.split())


# ---- isolated ----------------------------------------------------------------------------------------------

ISLANDS = {
    "between float nodes": ("a = Exp (x) b = Relu (a) y = Exp (b)", "b", "b"),
    "two together": ("a = Exp (x) b = Relu (a) c = Tanh (b) y = Exp (c)", "b c", "b c"),
    "one that reads an input": ("b = Relu (x) y = Exp (b)", "b", ""),
    "one that reads an input too": ("a = Exp (x) b = Add (a, x) y = Exp (b)", "b", ""),
    "one that makes an output": ("a = Exp (x) y = Relu (a)", "y", ""),
    "a layer among them": ("a = Exp (x) b = Relu (a) c = MatMul (b, w) y = Exp (c)", "b c", ""),
    "a layer apart": ("a = Exp (x) b = Relu (a) d = Exp (b) c = MatMul (d, w) y = Exp (c)", "b c", "b"),
    "constants do not count": ("a = Exp (x) b = Add (a, two) y = Exp (b)", "b", "b"),
    "only constants": ("b = Add (two, eps) y = Add (x, b)", "b", ""),
    "an operator without a row": ("a = Exp (x) b = Sin (a) y = Exp (b)", "b", ""),
    "one end at an output": ("a = Exp (x) b = Relu (a) y = Tanh (b)", "b y", ""),
}


@pytest.mark.parametrize("name", ISLANDS)
def test_islands_between_float_nodes(name: str) -> None:
    body, chosen, expected = ISLANDS[name]
    model = model_of(body)
    nodes = [node for node in model.graph if node.outputs[0].name in chosen.split()]
    assert made_by(isolated.isolated_nodes(nodes)) == set(expected.split())


def test_a_result_that_nobody_reads_is_no_island() -> None:
    model = model_of("a = Exp (x) b = Relu (a) y = Exp (a)")
    nodes = [node for node in model.graph if node.outputs[0].name == "b"]
    assert isolated.isolated_nodes(nodes) == set()


# ---- shapes and indices ----------------------------------------------------------------------------------------------

SHAPED = {
    "a shape": ("s = Shape (x) t = Gather (s, one) u = Concat <axis = 0> (t, one, one) y = Reshape (x, u)", "t u"),
    "in floats": (
        "s = Shape (x) f = Cast <to = 1> (s) h = Mul (f, two) i = Cast <to = 7> (h) y = Expand (x, i)",
        "f h i",
    ),
    "data that is moved": ("r = Reshape (x, shape) y = Relu (r)", ""),
    "the second input alone": ("r = Relu (x) s = Shape (r) y = Reshape (r, s)", ""),
    "a place": ("a = ArgMax <keepdims = 0> (x) y = Gather (x, a)", ""),
    "computed places": ("a = ArgMax <keepdims = 0> (x) b = Add (a, a) y = Gather (x, b)", "b"),
    "a layer": ("m = MatMul (x, w) i = Cast <to = 7> (m) y = GatherElements (x, i)", "i"),
    "pads": ("s = Shape (x) p = Concat <axis = 0> (s, s) y = Pad (x, p)", "p"),
}


@pytest.mark.parametrize("name", SHAPED)
def test_what_computes_a_shape_or_an_index(name: str) -> None:
    body, expected = SHAPED[name]
    assert made_by(index_paths.computes_shapes(model_of(body))) == set(expected.split())


# ---- biases ----------------------------------------------------------------------------------------------------------


def conv(bias: tuple[int, ...] = (6,), kernel: tuple[int, ...] = (6, 4, 1, 1)) -> ir.Node:
    text = "g (float[1, 4, 5, 5] x) => (float[1, 6, 5, 5] y) { y = Conv (x, w, b) }"
    return load(models.model(text, {"w": models.normal(*kernel), "b": models.normal(*bias)}, 17)).graph[0]


CHANNELS = Channel(0)
PRODUCTS = {
    "integers": ("int8", Tensor(), "int8", Tensor(), True),
    "channels": ("uint8", Tensor(), "int8", CHANNELS, True),
    "16 bits": ("int16", Tensor(), "int16", Tensor(), True),
    "32 bits of inputs": ("int32", Tensor(), "int8", Tensor(), False),
    "32 bits of weights": ("int8", Tensor(), "int32", Tensor(), False),
    "floats of inputs": ("fp8_e4m3", Tensor(), "int8", Tensor(), False),
    "floats of weights": ("int8", Tensor(), "bfloat16", Tensor(), False),
    "groups": ("int8", Tensor(), "int4", Group(1, 2), False),
    "inputs with several scales": ("int8", Channel(1), "int8", Tensor(), False),
    "channels that are summed": ("int8", Tensor(), "int8", Channel(1), False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_which_scales_make_one_for_a_bias(name: str) -> None:
    data, along, weight, across, fits = PRODUCTS[name]
    node = conv()
    specs = TensorSpec(data, granularity=along), TensorSpec(weight, granularity=across)
    assert (biases.why_no_product(node, node.inputs[2], *specs) is None) == fits


def test_a_bias_that_broadcasts_has_no_channels() -> None:
    text = "g (float[2, 4] x) => (float[2, 6] y) { y = Gemm (x, w, b) }"
    for size, granularity, fits in ((6, Channel(1), True), (1, Channel(1), False), (1, Tensor(), True)):
        node = load(models.model(text, {"w": models.normal(4, 6), "b": models.normal(size)}, 17)).graph[0]
        specs = TensorSpec("int8"), TensorSpec("int8", granularity=granularity)
        assert (biases.why_no_product(node, node.inputs[2], *specs) is None) == fits


@pytest.mark.parametrize(
    ("format", "npu", "options", "expected"),
    [
        ("int8", False, {}, False),
        ("int8", True, {}, True),
        ("bfloat16", False, {}, True),
        ("mxfp4", True, {}, False),
        ("int8", True, {"Int32Bias": True}, False),
        ("int8", False, {"Int32Bias": False}, True),
        ("int8", True, {"Int16Bias": True}, False),
        ("bfloat16", False, {"Int16Bias": True, "Int32Bias": False}, False),
        ("mxfp4", False, {"Int32Bias": False}, True),
    ],
)
def test_which_biases_have_the_type_of_their_weight(
    format: str, npu: bool, options: dict[str, Any], expected: bool
) -> None:
    job: Any = SimpleNamespace(npu=npu, options=Options(**options))
    assert biases.like_weight(TensorSpec(format), job) == expected


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("preset", ["XINT8", "A8W8", "VINT8", "A16W8", "U8U8_AAWA", "A8W8_CPU", "FP8E4M3"])
def test_small_values_reach_divisions_and_logarithms_unrounded(preset: str, everything: bool) -> None:
    """Also where every operator type is quantized: a code for 0 in front of a logarithm is minus infinity."""
    graph = """g (float[N, 8] x) => (float[N, 8] y) {
        s = Mul(x, x) m = ReduceMean<axes = [1]>(s) e = Add(m, eps) r = Sqrt(e) d = Div(x, r) a = MatMul(d, w)
        b = Relu(a) t = Exp(b) k = Log(t) i = Sigmoid(k) q = Sqrt(i) j = Reciprocal(q)
        f = Clip(j, lo) l = Log(f) y = MatMul(l, v)
    }"""
    weights = {"w": models.normal(8, 8), "v": models.normal(8, 8, seed=2)}
    numbers = {name: np.float32(value).reshape(()) for name, value in (("eps", 1e-5), ("lo", 1e-9))}
    proto = models.model(graph, {**weights, **numbers})
    config = get_default_config(preset)
    config.extra_options.update({"PrintSummary": False, "QuantizeAllOpTypes": everything})
    result = ModelQuantizer(Config(config)).quantize_model(proto, None, [models.feeds(proto, k) for k in range(3)])
    makers = {name: node.op_type for node in result.graph.node for name in node.output}
    small = [
        node.input[{"Div": 1}.get(node.op_type, 0)]
        for node in result.graph.node
        if node.op_type in ("Div", "Log", "Reciprocal")
    ]
    assert sorted(makers[name] for name in small) == ["Clip", "Exp", "Sqrt", "Sqrt"]
