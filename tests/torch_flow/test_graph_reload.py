"""What graph mode has quantized and ``export_safetensors`` has written becomes the same graph again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quark.errors import ModelError
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import Dtype, QSchemeType, QuantizationMode
from quark.torch.quantization import (
    FP8E4M3PerTensorSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    Uint8PerTensorSpec,
)
from quark.torch.quantization.observer.observer import LSQObserver

INT8, UINT8, FP8 = (
    spec.to_quantization_spec() for spec in (Int8PerTensorSpec(), Uint8PerTensorSpec(), FP8E4M3PerTensorSpec())
)
ROWS = Int8PerChannelSpec(0).to_quantization_spec()
INT32 = QTensorConfig(Dtype.int32, qscheme=QSchemeType.per_tensor)
DYNAMIC = QTensorConfig(Dtype.int8, qscheme=QSchemeType.per_tensor, is_dynamic=True)
LEARNED = (
    QTensorConfig(Dtype.uint4, observer_cls=LSQObserver, qscheme=QSchemeType.per_tensor),
    QTensorConfig(Dtype.int4, observer_cls=LSQObserver, qscheme=QSchemeType.per_channel, ch_axis=0),
)
CONFIGS = {
    "int8": QLayerConfig(INT8, INT8, ROWS),
    "uint8, biases of 32 bits": QLayerConfig(UINT8, UINT8, ROWS, INT32),
    "fp8": QLayerConfig(FP8, FP8, FP8),
    "dynamic": QLayerConfig(DYNAMIC, weight=ROWS),
    "weights": QLayerConfig(weight=ROWS),
    "learned": QLayerConfig(LEARNED[0], weight=LEARNED[1]),
}


class Twice(nn.Module):
    """A layer that is called twice, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x) + x)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
    "twice": Twice,
    "attention": lambda: nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 2, 32, batch_first=True)),
}


def quantized(network: str, config: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The graph of the float model, that of the quantized one, and a sample."""
    torch.manual_seed(0)
    model, x = NETWORKS[network]().eval(), torch.randn(2, 3, 8, 8)
    choice = QConfig(CONFIGS[config], quant_mode=QuantizationMode.fx_graph_mode)
    return exported(model, x), ModelQuantizer(choice).quantize_model(copy.deepcopy(model), [x]), x


def exported(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.export.export(model, (x,)).module()


@pytest.mark.parametrize("weights", ["real_quantized", "fake_quantized"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_graph_comes_back(config: str, network: str, weights: str, tmp_path: Path) -> None:
    given, graph, x = quantized(network, config)
    export_safetensors(graph, tmp_path, weight_format=weights)
    before = {name: value.clone() for name, value in given.state_dict().items()}
    loaded = import_model_from_safetensors(given, tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(x), graph(x))
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())


def test_its_scales_are_those_of_the_file(tmp_path: Path) -> None:
    given, graph, x = quantized("batch norm", "int8")
    export_safetensors(graph, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    scale = next(name for name in tensors if name.startswith("quantizers.") and name.endswith(".scale"))
    save_file({**tensors, scale: 3 * tensors[scale]}, file, {"format": "pt"})
    with torch.no_grad():
        assert not torch.equal(import_model_from_safetensors(given, tmp_path)(x), graph(x))
    save_file({name: value for name, value in tensors.items() if name != scale}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors of the model; the first is 'quantizers\."):
        import_model_from_safetensors(given, tmp_path)


@pytest.mark.parametrize("model", [NETWORKS["batch norm"](), None])
def test_it_goes_into_a_graph_alone(model: nn.Module | None, tmp_path: Path) -> None:
    export_safetensors(quantized("batch norm", "int8")[1], tmp_path)
    given = "" if model is None else ", not of Sequential"
    with pytest.raises(ModelError, match=rf"those of a graph{given}: import_model_from_safetensors takes"):
        import_model_from_safetensors(model, tmp_path)
