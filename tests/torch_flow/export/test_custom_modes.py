"""``custom_mode`` "fp8" and "awq", loaded by transformers as those methods, without our package's part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.torch_flow.export.networks import llama, logits
from tests.torch_flow.export.programs import loaded_by
from tests.torch_flow.export.test_reload import LLM, layer, quantized
from torch import nn

from quark.errors import ConfigError
from quark.torch.export.api import export_safetensors, import_model_from_safetensors
from quark.torch.quantization.config.config import FP8E4M3PerGroupSpec, FP8E4M3PerTensorSpec, QConfig, QLayerConfig
from quark.torch.quantization.config.config import QTensorConfig as Tensor
from quark.torch.quantization.config.type import Dtype, QSchemeType

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # transformers loads no FP8 without it
pytestmark = pytest.mark.filterwarnings("ignore")
BLOCKS = Tensor(
    Dtype.fp8_e4m3, qscheme=QSchemeType.per_block, block_size=(32, 32), symmetric=True, is_dynamic=False
)  # fmt: skip
GROUPS = FP8E4M3PerGroupSpec(-1, 32, is_dynamic=True).to_quantization_spec()
NAMES_OF_TRANSFORMERS = {r"weight_scale$": "weight_scale_inv", r"input_scale$": "activation_scale"}


def load(folder: Path, mapping: dict[str, str] | None = None, **more: object) -> nn.Module:
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True, key_mapping=mapping, **more
    )
    assert not any(found.values())
    return model


def weights_only(weight: Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Logits of the model that transformers makes on a CPU: weights decoded, activations float."""
    return logits(quantized(llama(dtype), QConfig(QLayerConfig(weight=weight), exclude=["lm_head"])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_fp8_in_blocks(dtype: torch.dtype, tmp_path: Path) -> None:
    config = QConfig(QLayerConfig(weight=BLOCKS, input_tensors=GROUPS), exclude=["*lm_head"])
    model = quantized(llama(dtype), config)
    export_safetensors(model, tmp_path / "m", custom_mode="fp8")
    described = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    wanted = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    assert {key: described[key] for key in wanted} == wanted
    assert described["ignored_layers"] == ["lm_head"]
    assert torch.equal(logits(load(tmp_path / "m")), weights_only(BLOCKS, dtype))
    loaded_by("fp8", "weights in blocks", "transformers")
    assert torch.equal(logits(import_model_from_safetensors(llama(dtype), tmp_path / "m")), logits(model))


def test_transformers_loads_fp8_under_one_scale_with_its_own_names(tmp_path: Path) -> None:
    model = quantized(llama(), QConfig(LLM["fp8"], exclude=["lm_head"]))
    export_safetensors(model, tmp_path / "m", custom_mode="fp8")
    expected = weights_only(FP8E4M3PerTensorSpec().to_quantization_spec(), torch.float32)
    assert torch.equal(logits(load(tmp_path / "m", NAMES_OF_TRANSFORMERS)), expected)
    loaded_by("fp8", "per tensor, with key_mapping", "transformers")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_gptqmodel_loads_awq(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    model = quantized(llama(hidden_size=128, intermediate_size=256), QConfig(LLM[name], exclude=["lm_head"]))
    export_safetensors(model, tmp_path / "m", custom_mode="awq")
    asked = transformers.AwqConfig(bits=4, group_size=32, backend="torch_awq")
    theirs, ours = logits(load(tmp_path / "m", quantization_config=asked)), logits(model)
    assert (theirs - ours).abs().max() < 0.02 * ours.abs().max()  # it computes in float16
    loaded_by("awq", f"{name} groups", "transformers", "gptqmodel")


def test_fp8_in_blocks_says_what_it_needs(tmp_path: Path) -> None:
    wrong = FP8E4M3PerGroupSpec(-1, 16, is_dynamic=True).to_quantization_spec()
    for inputs in (None, wrong):
        model = quantized(llama(), QConfig(QLayerConfig(weight=BLOCKS, input_tensors=inputs), exclude=["lm_head"]))
        with pytest.raises(ConfigError, match=r"input must be FP8E4M3PerGroupSpec\(-1, 32, is_dynamic=True\)"):
            export_safetensors(model, tmp_path / "m", custom_mode="fp8")
    model = quantized(llama(), QConfig(layer(FP8E4M3PerGroupSpec(-1, 32, is_dynamic=False)), exclude=["lm_head"]))
    with pytest.raises(ConfigError, match="or weights per_block"):
        export_safetensors(model, tmp_path / "m", custom_mode="fp8")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight_block_size": [32]}, "two positive integers"),
        ({"weight_block_size": [32, "x"]}, "two positive integers"),
        ({"activation_scheme": "static"}, "'dynamic'"),
    ],
)
def test_fp8_that_is_not_understood_is_refused(change: dict[str, object], match: str, tmp_path: Path) -> None:
    config = QConfig(QLayerConfig(weight=BLOCKS, input_tensors=GROUPS), exclude=["lm_head"])
    export_safetensors(quantized(llama(), config), tmp_path / "m", custom_mode="fp8")
    path = tmp_path / "m" / "config.json"
    data = json.loads(path.read_text())
    data["quantization_config"].update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=match):
        import_model_from_safetensors(llama(), tmp_path / "m")
