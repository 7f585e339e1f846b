"""Faults of ONNX Runtime that quantized networks of torch meet: its default session answers what the model does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional

from quark.torch import ModelQuantizer, export_onnx
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.quantization import Int8PerChannelSpec, Int8PerTensorSpec, Uint8PerTensorSpec
from quark.torch.quantization.config.type import QuantizationMode

KINDS = {"int8": Int8PerTensorSpec(), "uint8": Uint8PerTensorSpec()}


class Network(nn.Module):
    """A convolution, something between, and a last layer."""

    def __init__(self, first: nn.Conv2d, between: Callable[[torch.Tensor], torch.Tensor], last: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.last = first, between, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


def flat_attention(x: torch.Tensor) -> torch.Tensor:
    return (x * 0.001).flatten(2).softmax(-1).unflatten(2, (14, 14))


BETWEEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], nn.Module]]] = {
    "zeros around what a MaxPool reads": (
        lambda x: functional.max_pool2d(functional.pad(x - 9, (1, 1, 1, 1)), 3, 2),
        lambda: nn.Conv2d(8, 4, 1),
    ),
    "Softmax over one entry": (lambda x: x[:, :1].softmax(1), lambda: nn.Conv2d(1, 4, 1)),
    "Softmax of small results": (flat_attention, lambda: nn.Conv2d(8, 4, 1)),
    "means that are nearly 0": (
        lambda x: functional.adaptive_avg_pool2d(functional.instance_norm(x), 1).flatten(1),
        lambda: nn.Linear(8, 4),
    ),
    "Relu6 of tiny values": (lambda x: functional.relu6(x * 1e-10), lambda: nn.Conv2d(8, 4, 1)),
}


GRAPH, EAGER = QuantizationMode.fx_graph_mode, QuantizationMode.eager_mode
ROWS = [(name, kind, GRAPH) for name in BETWEEN for kind in KINDS]


@pytest.mark.parametrize(("between", "kind", "mode"), [*ROWS, (next(iter(BETWEEN)), "uint8", EAGER)])
def test_a_default_session_answers_what_the_model_does(
    between: str, kind: str, mode: QuantizationMode, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    function, last = BETWEEN[between]
    model = Network(nn.Conv2d(3, 8, 3), function, last()).eval()
    if between == "Relu6 of tiny values":
        with torch.no_grad():
            model.last.weight *= 1e10  # type: ignore[union-attr, operator]
    x = torch.randn(1, 3, 16, 16)
    values = KINDS[kind].to_quantization_spec()
    layer = QLayerConfig(values, values, Int8PerChannelSpec(0).to_quantization_spec())
    model = ModelQuantizer(QConfig(global_quant_config=layer, quant_mode=mode)).quantize_model(model, [x])
    export_onnx(model, tmp_path, (x,))
    session = onnxruntime.InferenceSession(tmp_path / "quark_model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        expected = model(x).numpy()
    assert np.linalg.norm(found - expected) < 5e-3 * np.linalg.norm(expected)
