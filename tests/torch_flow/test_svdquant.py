"""SVDQuant on models with outlier channels; the decomposition against a full one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quark.algorithms.svdquant import split
from quark.errors import ConfigError, DataError, ModelError
from quark.torch import ModelQuantizer
from quark.torch.corrected import ErrorCorrected
from quark.torch.quantization.config.config import GPTQConfig, Int4PerGroupSpec, QConfig, QLayerConfig, SVDQuantConfig

W4A4 = QLayerConfig(
    weight=Int4PerGroupSpec(ch_axis=-1, group_size=32).to_quantization_spec(),
    input_tensors=Int4PerGroupSpec(ch_axis=-1, group_size=32, is_dynamic=True).to_quantization_spec(),
)
SMALL: dict[str, Any] = {"min_layer_size": 32, "svd_rank": 8, "alpha_candidates": [0.4, 0.6, 0.8]}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of diffusers, about itself


def plant(model: nn.Module) -> nn.Module:
    """Norms of every block with channels a hundred times as large, undone in what reads them: the same function."""
    with torch.no_grad():
        for module in model.modules():
            for norm, layers in planted(module):
                channels = torch.arange(3, norm.weight.shape[0], 29)
                norm.weight[channels] *= 100
                norm.bias[channels] *= 100
                for layer in layers:
                    layer.weight[:, channels] /= 100
    return model


def planted(module: nn.Module) -> list[tuple[nn.Module, tuple[nn.Module, ...]]]:
    """Norms and their readers in a transformer block of diffusers."""
    if type(module).__name__ != "BasicTransformerBlock":
        return []
    pairs = [(module.norm1, (module.attn1.to_q, module.attn1.to_k, module.attn1.to_v))]
    if getattr(module, "attn2", None) is not None and module.norm2 is not None:
        pairs.append((module.norm2, (module.attn2.to_q,)))
    return [*pairs, (module.norm3, (module.ff.net[0].proj,))]


def unet() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    samples = [
        {"sample": torch.randn(2, 4, 8, 8), "timestep": torch.tensor(t), "encoder_hidden_states": torch.randn(2, 5, 32)}
        for t in (900, 500, 100)
    ]
    return plant(model.eval()), samples


def dit() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.Transformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4,
        cross_attention_dim=32,
    )  # fmt: skip
    samples = [
        {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 5, 32)} for _ in range(3)
    ]
    return plant(model.eval()), samples


def quantize(model: nn.Module, samples: Any, *algorithms: Any) -> nn.Module:
    return quantize_in_place(copy.deepcopy(model), samples, *algorithms)


def quantize_in_place(model: nn.Module, samples: Any, *algorithms: Any) -> nn.Module:
    config = QConfig(QLayerConfig(), layer_type_quant_config={nn.Linear: W4A4}, algo_config=list(algorithms))
    return ModelQuantizer(config).quantize_model(model, samples)


@torch.no_grad()
def error(model: nn.Module, float_model: nn.Module, samples: Any) -> float:
    pairs = ((model(**x).sample, float_model(**x).sample) for x in samples)
    return sum(float((a - b).norm() / b.norm()) for a, b in pairs) / len(samples)


@pytest.mark.parametrize("build", [pytest.param(unet, marks=pytest.mark.slow), dit])
def test_w4a4_with_outliers_loses_half_of_its_error(build: Any) -> None:
    model, samples = build()
    plain = error(quantize(model, samples), model, samples)
    corrected = quantize(model, samples, SVDQuantConfig(**SMALL))
    assert error(corrected, model, samples) < 0.5 * plain
    assert any(isinstance(module, ErrorCorrected) for module in corrected.modules())


def test_gptq_composes_and_the_model_can_be_copied() -> None:
    model, samples = dit()
    corrected = quantize(model, samples, SVDQuantConfig(**SMALL), GPTQConfig())
    twin = copy.deepcopy(corrected)
    with torch.no_grad():
        assert torch.equal(twin(**samples[0]).sample, corrected(**samples[0]).sample)


def test_the_split_is_nearly_the_best() -> None:
    rng = np.random.default_rng(0)
    weight = (
        rng.standard_normal((96, 12)) @ rng.standard_normal((12, 64)) + 0.5 * rng.standard_normal((96, 64))
    ).astype(np.float32)
    parts = split(weight, 12)
    best = np.sqrt((np.linalg.svd(weight, compute_uv=False)[12:] ** 2).sum())
    assert np.linalg.norm(parts.residual) < 1.01 * best
    assert np.allclose(parts.up @ parts.down + parts.residual, weight, atol=1e-5)
    again = split(torch.tensor(weight), 12)
    assert np.linalg.norm(again.residual.numpy()) == pytest.approx(np.linalg.norm(parts.residual), rel=1e-3)


def test_what_is_excluded_or_small_has_no_branch() -> None:
    model, samples = dit()
    for settings in ({"min_layer_size": 4096}, {**SMALL, "exclude_patterns": ["attn", "ff", "proj"]}):
        found = quantize(model, samples, SVDQuantConfig(**settings))
        assert not any(isinstance(module, ErrorCorrected) for module in found.modules())


def test_what_cannot_work_is_refused() -> None:
    model, _ = dit()
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(DataError, match="svdquant needs samples"):
        quantize_in_place(model, None, SVDQuantConfig())
    assert [name for name, _ in model.named_modules()] == names
    for settings in ({"svd_rank": 0}, {"smooth_alpha": 2.0}, {"alpha_candidates": []}, {"use_gptq": True}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            SVDQuantConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("build", [pytest.param(unet, marks=pytest.mark.slow), dit])
def test_export_and_reload_give_the_same_answers(build: Any, tmp_path: Any) -> None:
    from quark.torch import import_model_from_safetensors
    from quark.torch.export.huggingface import export_safetensors

    model, samples = build()
    corrected = quantize(model, samples, SVDQuantConfig(**SMALL), GPTQConfig())
    export_safetensors(corrected, tmp_path / "out")
    again = import_model_from_safetensors(build()[0], tmp_path / "out")
    assert sum(isinstance(module, ErrorCorrected) for module in again.modules()) > 0
    with torch.no_grad():
        for sample in samples:
            assert torch.equal(again(**sample).sample, corrected(**sample).sample)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_format", ["real_quantized", "fake_quantized"])
@pytest.mark.parametrize("build", [pytest.param(unet, marks=pytest.mark.slow), dit])
def test_from_pretrained_of_diffusers_gives_the_same_answers(
    build: Any, weight_format: str, dtype: torch.dtype, tmp_path: Any
) -> None:
    import quark.integrations.diffusers  # noqa: F401
    from quark.torch.export.huggingface import export_safetensors

    model, samples = build()
    model = model.to(dtype)
    samples = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in sample.items()} for sample in samples]
    corrected = quantize(model, samples, SVDQuantConfig(**SMALL))
    export_safetensors(corrected, tmp_path / "out", weight_format=weight_format)
    again = type(model).from_pretrained(tmp_path / "out", torch_dtype=dtype)
    count = sum(isinstance(module, ErrorCorrected) for module in corrected.modules())
    assert sum(isinstance(module, ErrorCorrected) for module in again.modules()) == count > 0
    with torch.no_grad():
        for sample in samples:
            assert torch.equal(again(**sample).sample, corrected(**sample).sample)


def test_a_format_that_would_lose_the_branch_is_refused(tmp_path: Any) -> None:
    from quark.torch.export.huggingface import export_safetensors

    model, samples = dit()
    with pytest.raises(ModelError, match="svdquant"):
        export_safetensors(quantize(model, samples, SVDQuantConfig(**SMALL)), tmp_path / "out", custom_mode="awq")
    assert not (tmp_path / "out").exists()
