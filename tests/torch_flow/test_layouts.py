"""What a layout of weights cannot be exported to is told at quantization, and what is told is so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.torch_flow.export.networks import llama, logits
from torch import nn

from quark.errors import ConfigError
from quark.torch import (
    ModelQuantizer,
    export_compressed_tensors,
    export_safetensors,
    import_model_from_safetensors,
)
from quark.torch.quantization.config.config import (
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    Uint4PerGroupSpec,
)
from quark.torch.quantization.config.type import QuantizationMode

ACROSS = {
    "uint4": lambda axis: Uint4PerGroupSpec(ch_axis=axis, group_size=32),
    "int4": lambda axis: Int4PerGroupSpec(ch_axis=axis, group_size=16),
    "mxfp4": lambda axis: OCP_MXFP4Spec(ch_axis=axis, is_dynamic=False),
}
SENTENCE = "weights in groups along ch_axis=0"


def config_of(kind: str, axis: int) -> QConfig:
    return QConfig(QLayerConfig(weight=ACROSS[kind](axis).to_quantization_spec()), exclude=["lm_head"])


@torch.no_grad()
@pytest.mark.parametrize("kind", ACROSS)
def test_groups_of_output_channels_are_told(kind: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        model = ModelQuantizer(config_of(kind, 0)).quantize_model(llama(num_hidden_layers=1))
    told = [record.getMessage() for record in caplog.records if SENTENCE in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("7 linear layers")
    export_safetensors(model, tmp_path / "quark")  # what is told to be written is written, bit for bit
    again = import_model_from_safetensors(None, tmp_path / "quark")
    assert torch.equal(logits(again), logits(model))
    for refused in others(tmp_path):  # and what is told not to, is not
        with pytest.raises(ConfigError):
            refused(model)


def others(folder: Path) -> list[Callable[[nn.Module], None]]:
    return [
        lambda model: export_compressed_tensors(model, folder / "ct"),
        lambda model: export_safetensors(model, folder / "awq", custom_mode="awq"),
    ]


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("kind", ACROSS)
def test_groups_along_the_sum_are_not(kind: str, axis: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ModelQuantizer(config_of(kind, axis)).quantize_model(llama(num_hidden_layers=1))
    assert SENTENCE not in caplog.text


def test_a_scale_per_output_channel_is_not(caplog: pytest.LogCaptureFixture) -> None:
    config = QConfig(QLayerConfig(weight=Int8PerChannelSpec(0, symmetric=True).to_quantization_spec()))
    with caplog.at_level(logging.WARNING):
        ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(32, 32)))
    assert SENTENCE not in caplog.text


def test_graph_mode_and_files_tell_it_too(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    config = QConfig(
        QLayerConfig(weight=Int4PerGroupSpec(0, 16).to_quantization_spec()), quant_mode=QuantizationMode.fx_graph_mode
    )
    with caplog.at_level(logging.WARNING):
        ModelQuantizer(config).quantize_model(nn.Sequential(nn.Linear(32, 32)).eval(), [torch.rand(2, 32)])
    assert SENTENCE in caplog.text
    caplog.clear()
    model = llama(num_hidden_layers=1)
    model.save_pretrained(tmp_path / "float")
    with caplog.at_level(logging.WARNING):
        ModelQuantizer(config_of("uint4", 0)).direct_quantize_checkpoint(tmp_path / "float", tmp_path / "quantized")
    assert SENTENCE in caplog.text
