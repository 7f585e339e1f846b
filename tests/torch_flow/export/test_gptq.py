"""``custom_mode`` "gptq", "gptq_v2" and "modelopt": decoded by the rules of those formats, with plain arithmetic."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.torch_flow.export.networks import llama
from tests.torch_flow.export.test_reload import layer, quantized

from quark.errors import ConfigError
from quark.torch import LLMTemplate
from quark.torch.export.api import export_safetensors
from quark.torch.export.reader_scales import with_scales_in
from quark.torch.quantization.config.config import QConfig, QLayerConfig
from quark.torch.quantization.config.config import QTensorConfig as Tensor
from quark.torch.quantization.config.type import Dtype, QSchemeType

pytest.importorskip("transformers")
SCHEMES = {
    f"{dtype.name} {name} {'sym' if symmetric else 'asym'}": Tensor(dtype, symmetric=symmetric, **fields)
    for dtype in (Dtype.int2, Dtype.uint2, Dtype.int3, Dtype.int4, Dtype.uint4, Dtype.int8, Dtype.uint8)
    for symmetric in (True, False)
    for name, fields in {
        "groups": {"qscheme": QSchemeType.per_group, "ch_axis": -1, "group_size": 32},
        "channels": {"qscheme": QSchemeType.per_channel, "ch_axis": 0},
    }.items()
    if symmetric or not dtype.name.startswith("int")  # integers with a sign and zero points: no GPTQ kernel
}
LAYER = "model.layers.1.mlp.down_proj"


def stream(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, n] of the bits of int32 words [rows, w], lowest first."""
    flags = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    return (flags.reshape(len(words), -1, bits) << np.arange(bits)).sum(-1)


def decoded(tensors: dict[str, torch.Tensor], bits: int, lowered: int, name: str = LAYER) -> np.ndarray:
    """Weight [out, in] as a reader of GPTQ computes it."""
    part = {key: tensors[f"{name}.{key}"].numpy() for key in ("qweight", "qzeros", "scales", "g_idx")}
    codes = stream(np.ascontiguousarray(part["qweight"].T), bits)
    zeros = stream(part["qzeros"], bits) + lowered
    return (codes - zeros.T[:, part["g_idx"]]).astype(np.float32) * part["scales"].astype(np.float32).T[
        :, part["g_idx"]
    ]


def export(config: QConfig, folder: Path, mode: str):
    model = quantized(llama(), config)
    export_safetensors(model, folder, custom_mode=mode)
    described = json.loads((folder / "config.json").read_text())["quantization_config"]
    return model, load_file(folder / "model.safetensors"), described


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gptq_decodes_to_the_values_that_were_evaluated(scheme: str, tmp_path: Path) -> None:
    spec = SCHEMES[scheme]
    model, tensors, described = export(QConfig(QLayerConfig(weight=spec), exclude=["lm_head"]), tmp_path, "gptq_v2")
    bits = int(spec.dtype.name[-1])
    values = decoded(tensors, bits, 0)
    module = model.get_submodule(LAYER)
    assert np.array_equal(values, module.weight_quantizer(module.weight.detach()).numpy())
    grouped = spec.qscheme is QSchemeType.per_group
    wanted = {"bits": bits, "group_size": 32 if grouped else -1, "desc_act": False, "checkpoint_format": "gptq_v2"}
    assert {key: described[key] for key in wanted} == wanted
    assert described["sym"] is bool(spec.to_stage().spec.symmetric)


def test_version_1_lowers_zero_points_and_has_no_zero(tmp_path: Path) -> None:
    config = QConfig(QLayerConfig(weight=SCHEMES["int4 groups sym"]), exclude=["lm_head"])
    _, first, described = export(config, tmp_path / "1", "gptq")
    _, second, _ = export(config, tmp_path / "2", "gptq_v2")
    assert np.array_equal(decoded(first, 4, 1), decoded(second, 4, 0))
    assert set(stream(first[f"{LAYER}.qzeros"].numpy(), 4).flat) == {7}
    assert described["checkpoint_format"] == "gptq"
    positive = llama()
    with torch.no_grad():
        for parameter in positive.parameters():
            parameter.abs_()
    model = quantized(positive, QConfig(QLayerConfig(weight=SCHEMES["uint4 groups asym"]), exclude=["lm_head"]))
    with pytest.raises(ConfigError, match=r"zero point of 0, which version 1 .* 'gptq_v2' can"):
        export_safetensors(model, tmp_path / "m", custom_mode="gptq")
    export_safetensors(model, tmp_path / "m", custom_mode="gptq_v2")


def test_layers_that_stay_float_are_named(tmp_path: Path) -> None:
    config = QConfig(QLayerConfig(weight=SCHEMES["int4 groups sym"]), exclude=["lm_head", "*.0.mlp.up_proj"])
    _, tensors, described = export(config, tmp_path, "gptq")
    assert described["dynamic"] == {r"-:^model\.layers\.0\.mlp\.up_proj$": {}}
    assert "model.layers.0.mlp.up_proj.weight" in tensors


def test_scales_are_in_the_type_that_readers_cast_them_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = LLMTemplate.get("llama").get_config("int4_wo_32")
    model = quantized(llama(torch.bfloat16), with_scales_in(config, torch.bfloat16))
    with caplog.at_level(logging.WARNING):
        export_safetensors(model, tmp_path / "a", custom_mode="gptq")
    assert not caplog.records
    assert load_file(tmp_path / "a" / "model.safetensors")[f"{LAYER}.scales"].dtype is torch.bfloat16
    with caplog.at_level(logging.WARNING):
        export_safetensors(quantized(llama(torch.bfloat16), config), tmp_path / "b", custom_mode="gptq")
    assert "cast them to bfloat16" in caplog.text


MODELOPT = {
    "fp8": ("FP8", {"weight", "weight_scale", "input_scale"}),
    "ptpc_fp8": ("FP8_PER_CHANNEL_PER_TOKEN", {"weight", "weight_scale"}),
    "nvfp4": ("NVFP4", {"weight", "weight_scale", "weight_scale_2", "input_scale"}),
    "mxfp8": ("MXFP8", {"weight", "weight_scale"}),
}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def value_of(tensors: dict[str, torch.Tensor], algorithm: str) -> np.ndarray:
    """Weight [out, in] as ModelOpt's documentation computes it."""
    weight, scale = (tensors[f"{LAYER}.{key}"] for key in ("weight", "weight_scale"))
    if algorithm == "NVFP4":
        codes = FP4[stream(weight.view(torch.int32).numpy(), 4)]
        steps = scale.float().numpy() * tensors[f"{LAYER}.weight_scale_2"].numpy()
        return codes * np.repeat(steps, 16, axis=1)
    if algorithm == "MXFP8":
        return weight.float().numpy() * np.repeat(2.0 ** (scale.numpy().astype(np.float32) - 127), 32, axis=1)
    return weight.float().numpy() * scale.float().numpy().reshape(-1, 1)


@pytest.mark.parametrize("scheme", MODELOPT)
def test_modelopt(scheme: str, tmp_path: Path) -> None:
    algorithm, names = MODELOPT[scheme]
    cache = "fp8" if scheme == "fp8" else None
    config = LLMTemplate.get("llama").get_config(scheme, kv_cache_scheme=cache)
    model, tensors, described = export(config, tmp_path, "modelopt")
    assert {key.removeprefix(f"{LAYER}.") for key in tensors if key.startswith(LAYER)} == names
    module = model.get_submodule(LAYER)
    evaluated = module.weight_quantizer(module.weight.detach()).numpy()
    assert np.allclose(value_of(tensors, algorithm), evaluated, rtol=1e-6, atol=0)
    assert (described["quant_method"], described["quant_algo"], described["ignore"]) == (
        "modelopt",
        algorithm,
        ["lm_head"],
    )
    beside = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert (beside["quant_algo"], beside["exclude_modules"]) == (algorithm, ["lm_head"])
    assert beside["kv_cache_quant_algo"] == ("FP8" if cache else None)
    assert ("model.layers.0.self_attn.k_proj.k_scale" in tensors) is bool(cache)


@pytest.mark.parametrize("mode", ["gptq", "modelopt"])
def test_what_a_mode_cannot_say_is_refused(mode: str, tmp_path: Path) -> None:
    config = LLMTemplate.get("llama").get_config("mxfp4")
    with pytest.raises(ConfigError, match=f"custom_mode '{mode}' does not fit"):
        export_safetensors(quantized(llama(), config), tmp_path / "m", custom_mode=mode)
    assert layer is not None
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("mode", "scheme"), [("gptq", "int8_wo_per_channel"), ("gptq", "int4_wo_32"), ("awq", "int4_wo_32")]
)
def test_weights_that_lie_the_other_way_are_refused(mode: str, scheme: str, tmp_path: Path) -> None:
    """Conv1D of GPT-2 has its weight [in, out]."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, n_inner=64, vocab_size=64, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    model = quantized(model, LLMTemplate.for_model(model).get_config(scheme))
    with pytest.raises(ConfigError, match="c_attn' is a Conv1D, and only linear layers are stored so"):
        export_safetensors(model, tmp_path / "m", custom_mode=mode)
    assert not (tmp_path / "m").exists()
