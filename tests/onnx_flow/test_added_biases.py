"""A constant added to the product of a MatMul is its bias: 32 bits, and nothing is rounded between the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.onnx_flow import models

from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.quantized_plan import plan_of
from quark.onnx.result import Result

IN, OUT = 16, 24
#: What the product of x is, how the bias is added, and what reads the sum.
SHAPES = {"matrix": "4, 16", "tokens": "1, 6, 16", "free": "N, T, 16", "pictures": "1, 2, 3, 16"}
ADDED = {"behind": "Add (m, b)", "in front": "Add (b, m)"}
READ = {"a layer": "y = MatMul (s, v)", "a Relu": "r = Relu (s)\n y = MatMul (r, v)", "nobody": "y = Identity (s)"}


def net(shape: str, added: str, read: str, head: str = "m = MatMul (x, w)", **weights: np.ndarray) -> onnx.ModelProto:
    """A layer whose bias is small beside what one of its columns sums up."""
    graph = f"net (float[{SHAPES[shape]}] x) => (float y) {{ {head} s = {ADDED[added]} {READ[read]} }}"
    w = models.normal(IN, OUT) * np.geomspace(1, 4, OUT).astype(np.float32)
    known = {"w": w, "b": models.normal(OUT, scale=0.3), "v": models.normal(OUT, 8), **weights}
    return models.model(graph, {name: one for name, one in known.items() if name in graph.replace("MatMul", "")})


def feeds(shape: str) -> list[dict[str, np.ndarray]]:
    sizes = [2 if size in "NT" else int(size) for size in SHAPES[shape].split(", ")]
    return [{"x": models.normal(*sizes, seed=seed)} for seed in range(8)]


def made(proto: onnx.ModelProto, shape: str, preset: str = "A8W8_CPU", **options: Any) -> Result:
    config = get_default_config(preset)
    config.extra_options |= {"PrintSummary": False, "FloatWhereFaster": False, **options}
    return ModelQuantizer(Config(global_quant_config=config)).run(proto, None, feeds(shape)[:4])


def noise(proto: onnx.ModelProto, quantized: onnx.ModelProto, shape: str) -> float:
    pairs = [(models.run(proto, feed)[0], models.run(quantized, feed)[0]) for feed in feeds(shape)[4:]]
    return float(sum(((x - y) ** 2).sum() for x, y in pairs))


def biases(result: Result) -> list[str]:
    return [tensor.name for tensor in result.plan.of_role("bias")]


@pytest.mark.parametrize("preset", ["A8W8_CPU", "A8W8"])
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bias_has_the_scale_of_the_product(shape: str, added: str, read: str, preset: str) -> None:
    proto = net(shape, added, read)
    joined, apart = (made(proto, shape, preset, BiasBehindMatMul=wanted) for wanted in (True, False))
    assert joined.proto is not None and apart.proto is not None
    assert biases(joined) == ["b"] and not biases(apart) and "m" not in joined.plan.tensors
    product = np.asarray(joined.plan.tensors["x"].scale * joined.plan.tensors["w"].scale, np.float32)
    held = {one.name: numpy_helper.to_array(one) for one in joined.proto.graph.initializer}
    [codes] = [one for one in held.values() if one.dtype == np.int32 and one.shape == (OUT,) and one.any()]
    np.testing.assert_array_equal(codes, np.rint(models.normal(OUT, scale=0.3) / product))
    add = next(node for node in joined.proto.graph.node if node.op_type == "Add")
    makers = {output: node.op_type for node in joined.proto.graph.node for output in node.output}
    assert {makers[name] for name in add.input} == {"MatMul", "DequantizeLinear"}
    if read == "nobody":  # what is rounded behind hides it
        assert noise(proto, joined.proto, shape) < noise(proto, apart.proto, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_runtime_computes_in_integers(shape: str) -> None:
    """A Gemm in float, which a bias of another kind makes of it, is slower than the float model."""
    result = made(net(shape, "behind", "a layer"), shape)
    assert result.coverage is not None and result.coverage.integer == 1.0


HEADS = {
    "read twice": ("m = MatMul (x, w)\n other = Relu (m)", {}),
    "a computed weight": ("t = Transpose <perm = [0, 2, 1]> (x)\n m = MatMul (t, x)", {"b": models.normal(IN)}),
    "a matrix as bias": ("m = MatMul (x, w)", {"b": models.normal(6, OUT)}),
    "one number": ("m = MatMul (x, w)", {"b": np.float32([0.5])}),
    "a computed bias": ("m = MatMul (x, w)\n b = ReduceMax <keepdims = 0> (x)", {}),
}


@pytest.mark.parametrize("head", HEADS)
def test_what_is_no_bias(head: str) -> None:
    text, weights = HEADS[head]
    proto = net("tokens", "behind", "nobody", text, **weights)
    if head == "a computed bias":
        proto.graph.initializer.remove(next(one for one in proto.graph.initializer if one.name == "b"))
    if head == "read twice":
        proto.graph.output.append(onnx.helper.make_tensor_value_info("other", 1, [1, 6, OUT]))
    assert not biases(made(proto, "tokens"))


@pytest.mark.parametrize(
    "options", [{"Int32Bias": False}, {"Int16Bias": True}, {"QuantizeBias": False}, {"WeightsOnly": True}], ids=str
)
def test_options_that_say_otherwise(options: dict[str, Any]) -> None:
    assert not biases(made(net("tokens", "behind", "a layer"), "tokens", **options))


def test_16_bit_activations_keep_their_pair() -> None:
    assert not biases(made(net("tokens", "behind", "a layer"), "tokens", "A16W8", BiasBehindMatMul=True))


def test_an_excluded_add_stays_float() -> None:
    proto = net("tokens", "behind", "a layer")
    proto.graph.node[1].name = "added"
    config = get_default_config("A8W8_CPU")
    config.extra_options |= {"PrintSummary": False, "FloatWhereFaster": False}
    config.nodes_to_exclude = ["added"]
    result = ModelQuantizer(Config(global_quant_config=config)).run(proto, None, feeds("tokens"))
    assert not biases(result) and "m" in result.plan.tensors


def test_a_constant_that_two_add_is_copied() -> None:
    head = "m = MatMul (x, w)\n k = MatMul (x, u)\n o = Add (k, b)"
    proto = net("tokens", "behind", "a layer", head, u=models.normal(IN, OUT, scale=7))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("o", 1, [1, 6, OUT]))
    result = made(proto, "tokens")
    assert len(biases(result)) == 2 and result.proto is not None
    for want, got in zip(
        models.run(proto, feeds("tokens")[5]), models.run(result.proto, feeds("tokens")[5]), strict=True
    ):
        assert 10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()) > 20


def test_the_plan_is_read_off_the_file(tmp_path: Path) -> None:
    proto = net("tokens", "behind", "a layer")
    result = made(proto, "tokens")
    assert result.proto is not None
    onnx.save(result.proto, tmp_path / "q.onnx")
    found = plan_of(tmp_path / "q.onnx").tensors["b"]
    assert (found.role, found.bias_of) == ("bias", ("x", "w"))
