"""Graphs with operators of ONNX Runtime's own, as onnxruntime-genai writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from tests.onnx_flow import models
from tests.onnx_flow.genai_model import WIDE, WORDS, decoder, words

from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.coverage import coverage
from quark.onnx.first_run import NAME
from quark.onnx.graph import model as files
from quark.onnx.graph.lift import misfit
from quark.onnx.graph.shapes import prove_shapes

#: preset -> options, the least SQNR of the logits in dB, and whether it needs data.
PRESETS = {
    "MATMUL_NBITS": ({"MatMulNBitsParams": {"GroupSize": 32, "Bits": 8}}, 25, False),
    "UINT8_DYNAMIC_QUANT": ({}, 20, False),
    "A8W8": ({}, 15, True),
    "A8W8_CPU": ({}, 15, True),
    "XINT8": ({}, 10, True),
    "A16W8": ({}, 15, True),
    "BFP16": ({}, 15, True),
}


@pytest.mark.parametrize("opset", [14, 21])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_decoder_of_the_builder_is_quantized(preset: str, opset: int, tmp_path: Path) -> None:
    model, (options, least, data) = decoder(), PRESETS[preset]
    next(one for one in model.opset_import if not one.domain).version = opset
    config = QConfig.get_default_config(preset)
    config.global_quant_config.extra_options.update(PrintSummary=False, **options)
    samples = [words(5), words(12)] if data else None
    result = ModelQuantizer(config).run(model, tmp_path / "out.onnx", samples)
    assert next(one for one in result.passes if one.name == NAME).fired == 1
    made = onnx.load(tmp_path / "out.onnx")
    assert coverage(made).stored > (0.3 if preset == "BFP16" else 0.7)  # embeddings are no blocks
    assert {"SimplifiedLayerNormalization", "GroupQueryAttention"} <= {node.op_type for node in made.graph.node}
    reference, found = models.run(model, words(9))[0], models.run(made, words(9))[0]
    assert 10 * np.log10((reference**2).sum() / ((reference - found) ** 2).sum()) > least


def test_types_and_shapes_go_through_them() -> None:
    model = files.load(decoder())
    prove_shapes(model)
    values = {value.name: value for node in model.graph for value in node.outputs}
    for name in ("normed", "attended", "again", "stream", "logits"):
        assert values[name].shape is not None and values[name].dtype == files.ir.DataType.FLOAT
        assert values[name].shape[2] == (WORDS if name == "logits" else WIDE)


def test_no_opset_says_anything_about_operators_that_onnx_does_not_have() -> None:
    """ONNX Runtime registers some in ONNX's own domain: they stay what they are when a model is lifted or lowered."""
    theirs = {row.name for row in get_all_operator_schema() if row.domain == ""}
    own = theirs - {row.name for row in onnx.defs.get_all_schemas_with_history() if row.domain == ""}
    assert "SimplifiedLayerNormalization" in own
    for name in own:
        node = files.ir.Node("", name, [])
        assert misfit(node, 21, 13) is None and misfit(node, 13, 21) is None, name
    assert misfit(files.ir.Node("", "Sinh", []), 8, 13) == "opset 8 has no operator Sinh"


@pytest.mark.parametrize("opset", [11, 12, 16, 17])
@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "XINT8", "UINT8_DYNAMIC_QUANT", "MATMUL_NBITS"])
def test_an_operator_from_before_onnx_had_it_is_taken(preset: str, opset: int) -> None:
    """ONNX Runtime's optimizer writes LayerNormalization into models of older opsets than ONNX's first with it."""
    graph = """
    older (float[N, 5, 64] x) => (float[N, 5, 64] y) {
        a = MatMul (x, w) n = LayerNormalization <axis = -1> (a, scale, bias) y = MatMul (n, w)
    }"""
    weights = {"w": models.normal(64, 64, scale=0.1), "scale": models.normal(64), "bias": models.normal(64, seed=1)}
    model, config = models.model(graph, weights, opset), QConfig.get_default_config(preset)
    config.global_quant_config.extra_options.update(PrintSummary=False)
    feeds = [{"x": models.normal(2, 5, 64, seed=seed)} for seed in range(3)]
    made = ModelQuantizer(config).quantize_model(model, None, None if preset == "MATMUL_NBITS" else feeds)
    assert made is not None and coverage(made).stored > 0.9
    reference, found = models.run(model, feeds[0])[0], models.run(made, feeds[0])[0]
    assert 10 * np.log10((reference**2).sum() / ((reference - found) ** 2).sum()) > 12
