"""Exports: which types of caches, tensors and programs are taken, type by type."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import ConfigError, ModelError
from quark.numerics.elements import ELEMENTS
from quark.numerics.granularity import Tensor
from quark.torch.export import compressed_caches, skeleton, verify, vllm_reads
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, QConfig, QLayerConfig


@pytest.mark.parametrize("name", ELEMENTS)
def test_caches_of_compressed_tensors_are_int8_or_e4m3(name: str) -> None:
    stage = SimpleNamespace(format=ELEMENTS[name], spec=SimpleNamespace(symmetric=True))
    part: Any = SimpleNamespace(stage=stage, granularity=Tensor(), scale=torch.ones(()))
    good = name in ("int8", "uint8", "fp8_e4m3")
    with nullcontext() if good else pytest.raises(ConfigError, match="fp8_e4m3 or int8"):
        compressed_caches.check("layers.0.k_proj", part, False)


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        (torch.tensor([300], dtype=torch.int16), torch.tensor([44], dtype=torch.uint8), False),
        (torch.tensor([1.5], dtype=torch.float16), torch.tensor([1.5]), True),
        (torch.tensor([1.5]), torch.tensor([1.5], dtype=torch.bfloat16), True),
        (torch.tensor([1.5]), torch.tensor([1.25]), False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), True),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), True),
        (torch.tensor([torch.nan]), torch.tensor([1.0]), False),
        (torch.tensor([[1.0]]), torch.tensor([1.0]), False),
        (torch.ones(9, dtype=torch.uint8), torch.ones(9, dtype=torch.uint8), True),
        (torch.ones(8), torch.tensor([1.0] * 7 + [2.0]), False),
    ],
)
def test_what_a_tensor_may_read_back_as(found: torch.Tensor, wanted: torch.Tensor, same: bool) -> None:
    with nullcontext() if same else pytest.raises(ModelError, match="does not read back"):
        verify.check("w", found, wanted)


@pytest.mark.parametrize(("slot", "constant"), [("weight", True), ("bias", True), ("input_tensors", False)])
def test_weights_and_biases_are_constants(slot: str, constant: bool) -> None:
    stages = QLayerConfig(weight=FP8E4M3PerTensorSpec().to_quantization_spec()).stages("weight")
    item: Any = SimpleNamespace(layer=SimpleNamespace(name="l"), stages={slot: stages})
    assert skeleton.fresh(item, slot).constant is constant


@pytest.mark.parametrize(("format", "refused"), [("quark", True), ("compressed-tensors", False)])
def test_caches_across_encoder_and_decoder_have_no_place_in_one_format(format: str, refused: bool) -> None:
    model = nn.ModuleDict({"self_attn": nn.ModuleDict({"k_proj": nn.Linear(8, 8)})})
    model.config = SimpleNamespace(is_encoder_decoder=True)  # type: ignore[assignment]
    cache = QLayerConfig(output_tensors=FP8E4M3PerTensorSpec().to_quantization_spec())
    config = QConfig(QLayerConfig(), kv_cache_quant_config={"*k_proj": cache})
    with pytest.raises(ConfigError, match="encoder and decoder") if refused else nullcontext():
        vllm_reads.check_cache_scales(model, config, format)
