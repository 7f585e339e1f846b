"""Exports: which types of caches, tensors and programs are taken, type by type."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark.cli import main
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


@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
@pytest.mark.parametrize(
    ("scheme", "format", "said"),
    [
        ("int4_wo_32", "compressed-tensors", "c_attn': it is a Conv1D"),
        ("int4_wo_32", "awq", "c_attn': it is a Conv1D"),
        ("uint4_wo_32", "gptq", "c_attn': it is a Conv1D"),
        ("nvfp4", "modelopt", "c_attn': it is a Conv1D"),
        ("mxfp8", "modelopt", "c_attn': it is a Conv1D"),
        ("fp8_block", "fp8", "c_attn': it is a Conv1D"),
        ("int4_wo_32", "awq", "narrow.weight' has 4 outputs of 4 bits"),
        ("uint4_wo_32", "gptq", "narrow.weight' has 4 outputs of 4 bits"),
        ("mxfp4", "compressed-tensors", "it has rows of 48 numbers, which blocks of 32 do not divide"),
        ("mxfp8", "compressed-tensors", "it has rows of 48 numbers, which blocks of 32 do not divide"),
        ("mxfp8", "modelopt", "it has rows of 48 numbers, which blocks of 32 do not divide"),
    ],
)
def test_layers_that_a_format_does_not_hold_are_refused_before_any_work(
    scheme: str, format: str, said: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    if "Conv1D" in said:
        sizes = {"n_embd": 128, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 32}
        model, narrow = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)), "*nothing*"
    else:
        width = 48 if "48" in said else 64
        sizes = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        model, narrow = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=4)), "lm_head"
        said = said.replace("narrow", narrow)
    model.save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", np.ones((2, 8), np.int64))
    before = sorted(tmp_path.rglob("*"))
    words = ["torch", command, str(tmp_path / "model"), "-o", str(tmp_path / "out"), "-s", scheme, "--format", format]
    if (scheme, format) == ("mxfp8", "compressed-tensors"):
        words += ["--for", "vllm"]  # transformers reads none of this scheme
    only = ["--exclude-only", "*down_proj" if narrow == "lm_head" else "lm_head"]
    assert main([*words, *only, "--data", str(tmp_path / "ids.npy"), "--seq-len", "8"]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.rglob("*")) == before
