"""ONNX Runtime quantizes float weights and biases between quantized activations: not in files of ours.

Each network is run in a default session and in one that changes nothing of the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from quark.torch import ModelQuantizer, export_onnx
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import Dtype, QSchemeType
from quark.torch.quantization import (
    Bfloat16Spec,
    FP8E4M3PerTensorSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    Uint8PerTensorSpec,
)

LEVELS = onnxruntime.GraphOptimizationLevel
SPECS: dict[str, Any] = {
    "float": None,
    "fp8": FP8E4M3PerTensorSpec(),
    "bfloat16": Bfloat16Spec(),
    "int8": Int8PerChannelSpec(0),
    "int8 of inputs": Int8PerChannelSpec(1),
    "int8, bias int32": Int8PerChannelSpec(0),
}
INT32 = QTensorConfig(Dtype.int32, qscheme=QSchemeType.per_tensor)
INPUTS = {"int8": Int8PerTensorSpec(), "uint8": Uint8PerTensorSpec()}


class Turned(nn.Module):
    """Linear layers on sequences, and on what is transposed between them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 6, bias=bias), nn.Linear(6, 6, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).relu()).transpose(1, 2))


def network(kind: str, bias: bool, least: float = 1e-9) -> tuple[nn.Module, torch.Tensor]:
    """Layers behind each other, of which most have channels with weights that are nearly zero, and a sample."""
    torch.manual_seed(0)
    if kind == "matrices":
        model: nn.Module = nn.Sequential(
            nn.Linear(8, 8, bias=bias), nn.ReLU(), nn.Linear(8, 8, bias=bias), nn.Linear(8, 4)
        )
        x = torch.randn(4, 8)
    elif kind == "pictures":
        layers = (nn.Conv2d(2, 8, 3, bias=bias), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=bias))
        model = nn.Sequential(*layers, nn.ConvTranspose2d(8, 8, 2, bias=bias), nn.Conv2d(8, 8, 3, groups=8))
        x = torch.randn(1, 2, 8, 8)
    else:
        model, x = Turned(bias), torch.randn(2, 6, 8)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                layer.weight[::2] *= least
    return model.eval(), x


@pytest.mark.parametrize("weight", SPECS)
@pytest.mark.parametrize(
    ("kind", "bias"), [("matrices", True), ("pictures", False), ("pictures", True), ("turned", True)]
)
def test_nothing_is_quantized_that_the_model_computes_in_float(
    kind: str, bias: bool, weight: str, tmp_path: Path
) -> None:
    model, x = network(kind, bias, 0.1 if weight.endswith("int32") else 1e-9)
    inputs = INPUTS["uint8" if bias else "int8"].to_quantization_spec()
    spec = SPECS[weight] and SPECS[weight].to_quantization_spec()
    outputs, kept = inputs if kind == "matrices" else None, INT32 if weight.endswith("int32") else None
    layer = QLayerConfig(input_tensors=inputs, output_tensors=outputs, weight=spec, bias=kept)
    ModelQuantizer(QConfig(global_quant_config=layer)).quantize_model(model, [x])
    export_onnx(model, tmp_path, (x,))
    found = {}
    for level in (LEVELS.ORT_ENABLE_ALL, LEVELS.ORT_DISABLE_ALL):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        session = onnxruntime.InferenceSession(
            tmp_path / "quark_model.onnx", options, providers=["CPUExecutionProvider"]
        )
        (found[level],) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found[LEVELS.ORT_DISABLE_ALL], model(x).numpy(), rtol=1e-4, atol=1e-5)
    difference = np.linalg.norm(found[LEVELS.ORT_ENABLE_ALL] - found[LEVELS.ORT_DISABLE_ALL])
    assert difference < 1e-3 * np.linalg.norm(found[LEVELS.ORT_DISABLE_ALL])


@pytest.mark.parametrize("kind", ["matrices", "pictures", "turned"])
def test_layers_that_stay_as_they_are_are_left_to_the_integer_kernels(kind: str, tmp_path: Path) -> None:
    model, x = network(kind, True, 0.1)
    config = QLayerConfig(
        input_tensors=INPUTS["uint8"].to_quantization_spec(), weight=SPECS["int8"].to_quantization_spec()
    )
    if kind == "pictures":
        model = nn.Sequential(*list(model)[:3])  # of a transposed one each input has a scale here, and not each output
    ModelQuantizer(QConfig(global_quant_config=config)).quantize_model(model, [x])
    export_onnx(model, tmp_path, (x,))
    assert "Max" not in [node.op_type for node in onnx.load(tmp_path / "quark_model.onnx").graph.node]


@pytest.mark.parametrize(
    ("op_type", "attributes", "axis"),
    [
        ("Conv", {}, 0),
        ("ConvTranspose", {}, 1),
        ("Gemm", {"transB": 1}, 0),
        ("Gemm", {}, 1),
        ("Gemm", {"transB": 0}, 1),
    ],
)
def test_where_the_outputs_of_a_layer_lie_in_its_weight(op_type: str, attributes: dict[str, int], axis: int) -> None:
    from quark.torch.export.onnx_floats import axis_of

    assert axis_of(onnx.helper.make_node(op_type, ["x", "w"], ["y"], **attributes)) == axis


@pytest.mark.parametrize(
    ("body", "copied"),
    [
        ("h = MatMul (x, y) z = Add (h, mask)", False),  # scores of attention, and what masks them
        ("z = Gemm (x, y, mask)", False),
        ("z = Gemm (x, w, mask)", True),
        ("h = MatMul (x, w) z = Add (h, mask)", True),
        ("w2 = Cast <to = 1> (c) z = Gemm (x, w2)", True),
        ("z = Gemm (a, w, mask)", False),  # its input is not quantized
        ("h = MatMul (x, w) n = Neg (mask) z = Add (h, n)", True),  # a bias that is computed from constants
        ("n = QuantizeLinear (mask, s) m = DequantizeLinear (n, s) z = Gemm (x, w, m)", True),
        ("k = DequantizeLinear (c, s) h = MatMul (k, w) z = Add (h, a)", False),  # a layer of constants alone, no bias
        ("k = DequantizeLinear (c, s) h = MatMul (k, w) z = Add (h, mask)", True),
    ],
)
def test_which_layers_of_a_graph_get_a_copy(body: str, copied: bool) -> None:
    from quark.torch.export.onnx_floats import keep_floats

    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[4, 4] a, float[4, 4] b) => (float[4, 4] z)
        <float s = {{0.1}}, int8[4, 4] c = {{1,2,3,4,1,2,3,4,1,2,3,4,1,2,3,4}}, float[4] mask = {{0, 0, 0, -3e38}}>
        {{ p = QuantizeLinear (a, s) x = DequantizeLinear (p, s) q = QuantizeLinear (b, s) y = DequantizeLinear (q, s)
        w = DequantizeLinear (c, s) {body} }}"""
    graph = onnx.parser.parse_model(text).graph
    keep_floats(graph)
    assert ("Max" in [node.op_type for node in graph.node]) is copied
