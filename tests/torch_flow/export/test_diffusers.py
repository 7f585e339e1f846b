"""Models of diffusers: what is exported loads through diffusers' own ``from_pretrained``, with the same outputs."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.torch_flow.export.programs import loaded_by
from tests.torch_flow.export.test_reload import LLM, layer
from torch import nn

from quark.errors import ConfigError, ModelError
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.quantization.config.config import (
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
    SVDQuantConfig,
)

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("accelerate")  # diffusers loads no quantized model without it
pytestmark = pytest.mark.filterwarnings("ignore")

from quark.integrations.diffusers import QuarkQuantizationConfig  # noqa: E402

SIZE = 16
LINEAR = {nn.Conv2d: QLayerConfig()}  # convolutions stay float
SCHEMES = {
    "fp8 static": QConfig(layer(FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec())),
    "int8 dynamic": QConfig(layer(Int8PerChannelSpec(0, symmetric=True), Int8PerTensorSpec(is_dynamic=True))),
    "int4 groups": QConfig(LLM["int4"], layer_type_quant_config=LINEAR),
    "mxfp4": QConfig(LLM["mxfp4"], layer_type_quant_config=LINEAR),
    "int4_fp8": QConfig(LLM["int4_fp8"]),
}
WEIGHTS = QConfig(QLayerConfig(weight=Int8PerChannelSpec(0, symmetric=True).to_quantization_spec()))


def with_values(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter[0].numel() if parameter.dim() > 1 else 4
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / size**0.5)
            parameter.data = parameter.to(dtype)  # and no buffers: so does from_pretrained
    return model.eval()


def unet(dtype: torch.dtype = torch.float32) -> nn.Module:
    made = diffusers.UNet2DModel(
        sample_size=SIZE, in_channels=1, out_channels=1, block_out_channels=(32, 32), norm_num_groups=8,
        layers_per_block=1, attention_head_dim=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return with_values(made, dtype)


def transformer(dtype: torch.dtype = torch.float32) -> nn.Module:
    made = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=1, out_channels=1, num_layers=2, sample_size=SIZE,
        patch_size=4, norm_num_groups=8, num_embeds_ada_norm=10,
    )  # fmt: skip
    return with_values(made, dtype)


def call(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.linspace(-2, 2, 2 * SIZE * SIZE).reshape(2, 1, SIZE, SIZE).sin().to(dtype)
    arguments = {} if isinstance(model, diffusers.UNet2DModel) else {"class_labels": torch.tensor([1, 2])}
    with torch.no_grad():
        return model(x, timestep=torch.tensor([3, 7]), **arguments).sample


def quantized(model: nn.Module, config: QConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    given = {"sample" if isinstance(model, diffusers.UNet2DModel) else "hidden_states": torch.ones(1, 1, SIZE, SIZE)}
    sample = {name: value.to(dtype) for name, value in given.items()} | {"timestep": torch.tensor([3])}
    sample |= {} if "sample" in given else {"class_labels": torch.tensor([1])}
    return ModelQuantizer(copy.deepcopy(config)).quantize_model(model, [sample])


def load(folder: Path, like: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    model, found = type(like).from_pretrained(folder, torch_dtype=dtype, output_loading_info=True)
    assert not any(found.values())
    assert model.dtype == dtype
    return model


@pytest.mark.parametrize(
    ("make", "name", "weight_format"),
    [
        *((unet, name, "real_quantized") for name in SCHEMES),
        *((unet, name, "fake_quantized") for name in ("fp8 static", "int4_fp8")),
        *((transformer, name, "real_quantized") for name in ("fp8 static", "int4 groups")),
        (transformer, "mxfp4", "fake_quantized"),
    ],
)
def test_outputs_are_those_of_the_quantized_model(
    make: Callable[[torch.dtype], nn.Module], name: str, weight_format: str, tmp_path: Path
) -> None:
    dtype = torch.float32 if weight_format == "fake_quantized" else torch.bfloat16
    model = quantized(make(dtype), SCHEMES[name], dtype)
    expected = call(model, dtype)
    assert not torch.equal(expected, call(make(dtype), dtype))
    export_safetensors(model, tmp_path / "m", weight_format=weight_format, max_shard_size=60_000)
    theirs = load(tmp_path / "m", model, dtype)
    assert torch.equal(call(theirs, dtype), expected)
    loaded_by(f"quark, {weight_format}", f"{name} ({type(model).__name__})", "diffusers")
    assert torch.equal(call(import_model_from_safetensors(make(dtype), tmp_path / "m"), dtype), expected)
    theirs.save_pretrained(tmp_path / "again")
    assert torch.equal(call(load(tmp_path / "again", model, dtype), dtype), expected)


def test_codes_are_stored_by_the_name_of_diffusers(tmp_path: Path) -> None:
    model = quantized(unet(), SCHEMES["int8 dynamic"])
    export_safetensors(model, tmp_path / "m", weight_format="real_quantized")
    tensors = load_file(tmp_path / "m" / "diffusion_pytorch_model.safetensors")
    assert tensors["conv_in.weight"].dtype == torch.int8
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (config["_class_name"], config["quantization_config"]["quant_method"]) == ("UNet2DModel", "quark")


def test_a_pipeline_is_quantized_when_it_is_loaded(tmp_path: Path) -> None:
    pipeline = diffusers.DDIMPipeline(unet(), diffusers.DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(tmp_path / "float")
    asked = diffusers.PipelineQuantizationConfig(quant_mapping={"unet": QuarkQuantizationConfig(WEIGHTS)})
    loaded = diffusers.DDIMPipeline.from_pretrained(tmp_path / "float", quantization_config=asked)
    expected = call(quantized(unet(), WEIGHTS))
    assert torch.equal(call(loaded.unet), expected)
    loaded.save_pretrained(tmp_path / "int8")
    again = diffusers.DDIMPipeline.from_pretrained(tmp_path / "int8")
    assert torch.equal(call(again.unet), expected)
    size = (tmp_path / "int8" / "unet" / "diffusion_pytorch_model.safetensors").stat().st_size
    assert size < (tmp_path / "float" / "unet" / "diffusion_pytorch_model.safetensors").stat().st_size / 2


@torch.no_grad()
def test_a_pipeline_has_the_part_that_was_exported_into_its_folder(tmp_path: Path) -> None:
    """SVDQuant with 4-bit weights and inputs: the pictures of the whole pipeline, bit for bit."""
    pipeline = diffusers.DDIMPipeline(unet(), diffusers.DDIMScheduler())
    pipeline.save_pretrained(tmp_path)
    branch = SVDQuantConfig(min_layer_size=16, svd_rank=2, alpha_candidates=[0.5])
    groups = Int4PerGroupSpec(-1, 16), Int4PerGroupSpec(-1, 16, is_dynamic=True)
    scheme = QConfig(layer(*groups), layer_type_quant_config=LINEAR, algo_config=[branch])
    pictures = []
    for part in (unet(), quantized(unet(), scheme)):
        pipeline = diffusers.DDIMPipeline(part, diffusers.DDIMScheduler())
        pictures.append(pictures_of(pipeline))
    with pytest.raises(ConfigError, match="in a way that diffusers cannot load: write it with export_safetensors"):
        pipeline.save_pretrained(tmp_path / "wrong")
    shutil.rmtree(tmp_path / "unet")
    export_safetensors(pipeline.unet, tmp_path / "unet")
    loaded = diffusers.DDIMPipeline.from_pretrained(tmp_path)
    assert np.array_equal(pictures_of(loaded), pictures[1]) and not np.array_equal(*pictures)


def pictures_of(pipeline: Any) -> np.ndarray:
    """Two steps from the same noise."""
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline(generator=torch.Generator().manual_seed(1), num_inference_steps=2, output_type="np")
    found: np.ndarray = drawn.images
    return found


@pytest.mark.slow
def test_a_process_that_imports_the_integration_loads(tmp_path: Path) -> None:
    model = quantized(transformer(), SCHEMES["int4 groups"])
    export_safetensors(model, tmp_path / "m", weight_format="real_quantized")
    torch.save(call(model), tmp_path / "expected.pt")
    script = (
        "import sys, torch, diffusers\n"
        "import quark.integrations.diffusers\n"
        "model = diffusers.DiTTransformer2DModel.from_pretrained(sys.argv[1] + '/m')\n"
        "x = torch.linspace(-2, 2, 512).reshape(2, 1, 16, 16).sin()\n"
        "with torch.no_grad():\n"
        "    y = model(x, timestep=torch.tensor([3, 7]), class_labels=torch.tensor([1, 2])).sample\n"
        "assert torch.equal(y, torch.load(sys.argv[1] + '/expected.pt', weights_only=True))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    unet().save_pretrained(tmp_path / "float")
    with pytest.raises(ConfigError, match="static activations need samples"):
        diffusers.UNet2DModel.from_pretrained(
            tmp_path / "float", quantization_config=QuarkQuantizationConfig(SCHEMES["fp8 static"])
        )
    caches = {"*to_k": QLayerConfig(output_tensors=Int8PerTensorSpec().to_quantization_spec())}
    with pytest.raises(ConfigError, match="no attention caches"):
        QuarkQuantizationConfig(QConfig(LLM["int4"], kv_cache_quant_config=caches))
    export_safetensors(quantized(unet(), WEIGHTS), tmp_path / "m")
    with pytest.raises(ModelError, match="UNet2DModel, a model of diffusers; pass the float model"):
        import_model_from_safetensors(None, tmp_path / "m")
    with pytest.raises(ConfigError, match="safe_serialization"):
        load(tmp_path / "m", unet()).save_pretrained(tmp_path / "pickled", safe_serialization=False)
    path = tmp_path / "m" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    save_file({name: value for name, value in tensors.items() if name != "conv_in.weight_scale"}, path)
    with pytest.raises(ModelError, match=r"lack 1 tensors of the model, the first is 'conv_in.weight_quantizer.scale'"):
        load(tmp_path / "m", unet())
    save_file({**tensors, "conv_in.weight_scale": torch.ones(3)}, path)
    with pytest.raises(ModelError, match=r"'conv_in.weight_quantizer.scale' has the shape \[3\]"):
        load(tmp_path / "m", unet())
