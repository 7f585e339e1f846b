"""Layers that are float for their speed: their large weights are codes in the file, and what is computed is float."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.onnx_flow import models

from quark.onnx import Config, ModelQuantizer, get_default_config

WIDE = 64
GRAPH = f"""g (float[1, 32, 8, 8] x, float[1, {WIDE}] r) => (float[1, 32, 8, 8] y, float[1, n] s) {{
    y = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, k)
    s = MatMul (r, w)
}}"""
Change = Callable[[np.ndarray], np.ndarray]


def quantized(
    change: Change, exclude: list[str] | None = None, graph: str = GRAPH
) -> tuple[onnx.ModelProto, onnx.ModelProto, ModelQuantizer]:
    """A convolution, which is faster in integers, beside a product with one row, which is not; its weight changed."""
    weights = {"k": models.normal(32, 32, 3, 3), "w": change(models.normal(WIDE, WIDE))}
    proto = models.model(graph, weights, 17)
    for node, name in zip(proto.graph.node, ("conv", "product", "other"), strict=False):
        node.name = name
    config = Config(get_default_config("A8W8_CPU"))
    config.global_quant_config.nodes_to_exclude = exclude or []
    config.global_quant_config.extra_options.update(PrintSummary=False)
    quantizer = ModelQuantizer(config)
    made = quantizer.quantize_model(proto, None, [models.feeds(proto)])
    assert made is not None
    return proto, made, quantizer


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}


def test_a_weight_is_stored_as_codes_and_read_as_float() -> None:
    """By hand: a scale of every column, the largest entry / 127, and entries rounded to the nearest."""
    proto, made, quantizer = quantized(lambda w: w)
    node = next(node for node in made.graph.node if node.name == "product")
    assert node.op_type == "MatMul" and node.input[0] == "r", "it computes in float"
    weight = constants(proto)["w"]
    step = np.abs(weight).max(0) / np.float32(127)
    np.testing.assert_array_equal(constants(made)["w_quantized"], np.rint(weight / step).astype(np.int8))
    row = models.feeds(proto)
    wanted = row["r"].astype(np.float64) @ (np.rint(weight / step) * step)
    np.testing.assert_allclose(models.run(made, row)[1], wanted, rtol=1e-4, atol=1e-5)
    assert quantizer.result.plan.tensors["w"].reason.startswith("weights alone")
    assert "FloatWhereFaster" in quantizer.result.plan.nodes["product"].reason


def outlier(weight: np.ndarray) -> np.ndarray:
    weight[0] *= 50  # of every column: 8 bits do not hold the other rows
    return weight


@pytest.mark.parametrize(
    ("change", "exclude"),
    [(outlier, []), (lambda w: np.where(w > 3, np.inf, w), []), (lambda w: w[:, :60], []), (lambda w: w, ["product"])],
    ids=["outliers", "infinite", "small", "excluded"],
)
def test_what_codes_do_not_hold_and_what_is_to_stay_float_stays(change: Change, exclude: list[str]) -> None:
    proto, made, _ = quantized(change, exclude)
    np.testing.assert_array_equal(constants(made)["w"], constants(proto)["w"])


@pytest.mark.parametrize("reader", ["o = Add (w, w)", "o = MatMul (r, w)"])
def test_a_weight_that_something_else_reads_stays(reader: str) -> None:
    graph = GRAPH.replace("n] s)", "n] s, float[m, n] o)").replace("MatMul (r, w)\n", f"MatMul (r, w)\n    {reader}\n")
    proto, made, quantizer = quantized(lambda w: w, graph=graph)
    np.testing.assert_array_equal(constants(made)["w"], constants(proto)["w"])
    assert "w" not in quantizer.result.plan.tensors
