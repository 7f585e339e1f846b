"""Diffusion models: recorded steps, static and dynamic activations, the helpers' names."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quark.errors import ConfigError, DataError, ModelError
from quark.torch.diffusion import record_inputs
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, QConfig, QLayerConfig
from quark.torch.utils.diffusers import (
    get_calib_dataloader,
    qconfig_needs_activation_calibration,
    quantize_diffusion_model_in_place,
)

pytest.importorskip("diffusers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import diffusion


def config(dynamic: bool) -> QConfig:
    activation = FP8E4M3PerTensorSpec(is_dynamic=dynamic).to_quantization_spec()
    return QConfig(QLayerConfig(input_tensors=activation, weight=FP8E4M3PerTensorSpec().to_quantization_spec()))


class Pipeline:
    """What a pipeline of diffusers looks like from outside."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.unet = model

    @torch.no_grad()
    def __call__(self, prompt: str, num_inference_steps: int) -> None:
        x = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(len(prompt)))
        for t in range(num_inference_steps, 0, -1):
            x = x - self.unet(x, torch.tensor(t * 40), return_dict=False)[0] / num_inference_steps


def test_samples_are_every_step_of_every_prompt() -> None:
    torch.manual_seed(0)
    pipeline = Pipeline(diffusion.unet().eval())
    samples = get_calib_dataloader(pipeline, None, ["a", "two"], n_steps=5)
    assert [int(sample["timestep"]) for sample in samples] == [200, 160, 120, 80, 40] * 2
    assert samples[0]["sample"].shape == (1, 1, 16, 16) and samples[0]["return_dict"] is False
    assert not pipeline.unet._forward_pre_hooks
    named = get_calib_dataloader(pipe=pipeline, target_module=pipeline.unet, prompts=["a"], n_steps=5)
    assert all(torch.equal(a["sample"], b["sample"]) for a, b in zip(named, samples, strict=False))
    with pytest.raises(DataError, match="no run called"):
        record_inputs(pipeline.unet, [])


@pytest.mark.parametrize("name", diffusion.MODELS)
@pytest.mark.parametrize("dynamic", [False, True])
@torch.no_grad()
def test_both_architectures_and_both_kinds_of_activations(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    make, predict = diffusion.MODELS[name]
    model = make().eval()
    for value in model.parameters():
        value.add_(torch.randn_like(value) * 0.02)  # nothing stays at its zero
    xs = [torch.randn(2, 1, 16, 16) * scale for scale in (1.0, 3.0)]
    samples = record_inputs(model, [lambda x=x: predict(model, x, torch.tensor(500)) for x in xs])
    assert qconfig_needs_activation_calibration(config(dynamic)) is not dynamic
    twin = copy.deepcopy(model)
    assert quantize_diffusion_model_in_place(twin, config(dynamic), None if dynamic else samples) is twin
    before, after = (predict(net, xs[0], torch.tensor(500)) for net in (model, twin))
    assert 0 < (after - before).norm() < 0.15 * before.norm()


class Noisy(Pipeline):
    """One that makes its noise with a generator it is given."""

    @torch.no_grad()
    def __call__(self, prompt: str, num_inference_steps: int, generator: torch.Generator | None = None) -> None:
        for _ in range(num_inference_steps):
            self.unet(torch.randn(1, 1, 16, 16, generator=generator), torch.tensor(4))


def test_a_seed_gives_the_same_noise_and_leaves_the_global_one() -> None:
    torch.manual_seed(0)
    pipeline = Noisy(diffusion.unet().eval())
    state = torch.get_rng_state()
    first, again, other = (get_calib_dataloader(pipeline, "unet", ["a"], 2, seed) for seed in (3, 3, 4))
    assert torch.equal(first[0]["sample"], again[0]["sample"])
    assert not torch.equal(first[0]["sample"], other[0]["sample"])
    assert torch.equal(torch.get_rng_state(), state)


def test_errors_say_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="get_calib_dataloader"):
        quantize_diffusion_model_in_place(Pipeline(diffusion.unet()), config(False))
    with pytest.raises(ModelError, match="'unet' or 'transformer'"):
        quantize_diffusion_model_in_place(SimpleNamespace(vae=None), config(True))


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path, capsys: Any) -> None:
    arguments = ["--models", "DiT", "--train", "2", "--steps", "4", "--json", str(tmp_path / "figures.json")]
    assert diffusion.main(arguments) == 0
    assert "| PSNR of the images, dB |" in capsys.readouterr().out
