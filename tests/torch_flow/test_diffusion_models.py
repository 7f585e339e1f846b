"""Denoisers of diffusers in a loop, 4-bit weights and activations: a conditional UNet and a Flux transformer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.torch_flow.test_svdquant import SMALL, W4A4
from torch import nn

from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.diffusion import record_inputs
from quark.torch.quantization.config.config import (
    Int4PerChannelSpec,
    Int4PerTensorSpec,
    QConfig,
    QLayerConfig,
    SVDQuantConfig,
)

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("accelerate")  # diffusers loads no quantized model without it
import quark.integrations.diffusers  # noqa: E402, F401

WEIGHT = Int4PerChannelSpec(0, symmetric=True).to_quantization_spec()
Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def config(dynamic: bool) -> QConfig:
    activation = Int4PerTensorSpec(symmetric=True, is_dynamic=dynamic).to_quantization_spec()
    return QConfig(QLayerConfig(input_tensors=activation, weight=WEIGHT))


def unet() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
        cross_attention_dim=24,
        attention_head_dim=8,
    )


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )


def words(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step_of_unet(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x, t, encoder_hidden_states=words(7, len(x), 5, 24)).sample
    return found


def step_of_flux(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(2).transpose(1, 2)
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0))
    found: torch.Tensor = model(
        hidden_states=rows,
        timestep=(t / 1000).expand(len(x)),
        encoder_hidden_states=words(7, len(x), 5, 24),
        pooled_projections=words(8, len(x), 16),
        img_ids=places,
        txt_ids=torch.zeros(5, 3),
    ).sample
    return found.transpose(1, 2).unflatten(2, x.shape[2:])


MODELS: dict[str, tuple[Callable[[], nn.Module], Step]] = {"unet": (unet, step_of_unet), "flux": (flux, step_of_flux)}


def made(name: str) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    make, step = MODELS[name]
    model = make().eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.02)  # nothing stays at its zero
    return model, step


@torch.no_grad()
def loop(model: nn.Module, step: Step, seed: int, steps: int = 4) -> torch.Tensor:
    scheduler = diffusers.DDIMScheduler()
    scheduler.set_timesteps(steps)
    x = words(seed, 2, 4, 8, 8)
    for t in scheduler.timesteps:
        x = scheduler.step(step(model, x, t), t, x).prev_sample
    return x


def layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]


def rounded(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Symmetric 4-bit codes -8 .. 7, times the step amax / 7.5."""
    step = amax / 7.5
    return (x / step).round().clamp(-8, 7) * step


def reference(model: nn.Module, ranges: dict[str, torch.Tensor] | None = None) -> nn.Module:
    """The float model with rounded weights, and inputs rounded by hooks: by their own range, or a given one."""
    twin = copy.deepcopy(model)
    for name, layer in layers(twin):
        value = layer.weight.detach()
        layer.weight = nn.Parameter(
            rounded(value, value.flatten(1).abs().amax(1).reshape(-1, *[1] * (value.dim() - 1)))
        )

        def hook(_: nn.Module, args: tuple[Any, ...], name: str = name) -> tuple[Any, ...]:
            amax = args[0].abs().max() if ranges is None else ranges[name]
            return (rounded(args[0], amax), *args[1:])

        layer.register_forward_pre_hook(hook)
    return twin


def ranges_of(model: nn.Module, run: Callable[[], Any]) -> dict[str, torch.Tensor]:
    """The largest absolute input of every layer."""
    found: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda _, args: found.__setitem__(
            name, torch.maximum(found.get(name, args[0].abs().max()), args[0].abs().max())
        )

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers(model)]
    run()
    for handle in handles:
        handle.remove()
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dynamic", [True, False])
def test_w4a4_in_a_loop(name: str, dynamic: bool) -> None:
    model, step = made(name)
    run = lambda: loop(model, step, 1)  # noqa: E731
    samples = None if dynamic else record_inputs(model, [run])
    assert samples is None or len(samples) == 4  # every step
    expected = reference(model, None if dynamic else ranges_of(model, run))
    quantized = ModelQuantizer(config(dynamic)).quantize_model(copy.deepcopy(model), samples)
    kinds = [type(part).__name__ for _, part in layers(quantized)]
    assert len(kinds) > 20
    assert all(kind.startswith("Quant") for kind in kinds)
    x = words(3, 2, 4, 8, 8)
    for t in (900, 10):
        found, wanted = step(quantized, x, torch.tensor(t)), step(expected, x, torch.tensor(t))
        # a value at the middle of two codes may take the other one: rare, and worth a step of its layer
        assert (found - wanted).norm() < 0.02 * wanted.norm()
    image = loop(quantized, step, 2)
    assert torch.isfinite(image).all()
    assert not torch.equal(image, loop(model, step, 2))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_w4a4_is_written_and_read(name: str, tmp_path: Path) -> None:
    model, step = made(name)
    quantized = ModelQuantizer(config(True)).quantize_model(copy.deepcopy(model))
    export_safetensors(quantized, tmp_path / "model", weight_format="real_quantized")
    again = import_model_from_safetensors(model, tmp_path / "model")
    assert torch.equal(loop(again, step, 2), loop(quantized, step, 2))
    stored = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert stored < sum(value.numel() for value in quantized.parameters()) * 2  # of 4 bytes


@torch.no_grad()
def test_branches_of_svdquant_come_back_with_the_numbers_that_were_evaluated(tmp_path: Path) -> None:
    """A branch that is mapped from a file at any place adds in another order, and codes of 4 bits behind it show it."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=32, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=64, pooled_projection_dim=32, axes_dims_rope=(8, 12, 12),
    ).eval()  # fmt: skip
    fresh = copy.deepcopy(model)
    calls: list[dict[str, Any]] = [
        {
            "hidden_states": torch.randn(1, 16, 32),
            "encoder_hidden_states": torch.randn(1, 6, 64),
            "pooled_projections": torch.randn(1, 32),
            "timestep": torch.tensor([t]),
            "img_ids": torch.randint(0, 4, (16, 3)).float(),
            "txt_ids": torch.zeros(6, 3),
        }
        for t in (0.9, 0.5, 0.1)
    ]
    found = ModelQuantizer(
        QConfig(W4A4, algo_config=[SVDQuantConfig(**{**SMALL, "alpha_candidates": [0.5]})])
    ).quantize_model(model, calls)
    export_safetensors(found, tmp_path / "m")
    folder = tmp_path / "m"
    for again in (type(model).from_pretrained(folder).eval(), import_model_from_safetensors(fresh, folder)):
        floats = [one for one in (*again.parameters(), *again.buffers()) if one.is_floating_point()]
        assert {one.data_ptr() % 64 for one in floats} == {0}
        for one in calls:
            assert torch.equal(again(**one).sample, found(**one).sample)
