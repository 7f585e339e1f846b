"""Static against dynamic activations of diffusion models, at every step of the denoising loop.

    python -m benchmarks.diffusion                # a UNet and a DiT, trained for a minute on blobs, 20 steps
    python -m benchmarks.diffusion --train 0      # random weights

A denoiser sees noise at the first step and almost an image at the last. A static range is the union of all of them; a
dynamic one is that of each call. Both denoisers are built by diffusers from a small configuration and trained here for
a short time on images of blobs, since nothing is downloaded. Weights have a scale per channel, activations one per
tensor.

relative error     |eps_q(x_t, t) - eps(x_t, t)| / |eps(x_t, t)| on the float model's own x_t
PSNR               of the final images of the quantized loop against those of the float loop, from the same noise;
                   the peak is the range of the float images
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import measure, record
from quark.torch import ModelQuantizer
from quark.torch.diffusion import record_inputs
from quark.torch.quantization.config.config import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
)

SIZE, IMAGES, BATCH = 16, 8, 16
WEIGHTS = {"int8": Int8PerChannelSpec(0, True), "fp8": FP8E4M3PerChannelSpec(0)}
INPUTS: dict[str, Callable[[bool], Any]] = {
    "int8": lambda dynamic: Int8PerTensorSpec(is_dynamic=dynamic),
    "fp8": lambda dynamic: FP8E4M3PerTensorSpec(is_dynamic=dynamic),
}
Predict = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def unet() -> nn.Module:
    """A UNet with attention, about 0.5 million parameters."""
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    channels = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1, "attention_head_dim": 16}
    return UNet2DModel(sample_size=SIZE, in_channels=1, out_channels=1, **blocks, **channels)


def dit() -> nn.Module:
    """A diffusion transformer with adaptive norms, about 0.5 million parameters."""
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 4, "patch_size": 2}
    return DiTTransformer2DModel(sample_size=SIZE, in_channels=1, out_channels=1, num_embeds_ada_norm=1000, **sizes)


def predict_unet(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The noise in ``x``."""
    return model(x, t).sample


def predict_dit(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The noise in ``x``; all images are of one class."""
    times = t.expand(len(x)) if t.dim() == 0 else t
    return model(x, times, torch.zeros(len(x), dtype=torch.int64)).sample


MODELS: dict[str, tuple[Callable[[], nn.Module], Predict]] = {"UNet": (unet, predict_unet), "DiT": (dit, predict_dit)}


def blobs(count: int, generator: torch.Generator) -> torch.Tensor:
    """Images [count, 1, 16, 16] in -1..1 with one to three round spots."""
    axis = torch.arange(SIZE).float()
    centre = torch.rand(count, 3, 2, generator=generator) * SIZE
    width = 1 + 2 * torch.rand(count, 3, generator=generator)
    x, y = (axis[None, None] - centre[..., k, None] for k in (0, 1))
    spots = torch.exp(-(x[..., None, :].square() + y[..., :, None].square()) / (2 * width[..., None, None].square()))
    return (2 * spots.amax(1, keepdim=True) - 1).clamp(-1, 1)


def train(model: nn.Module, predict: Predict, scheduler: Any, steps: int) -> None:
    """Teach ``model`` to find the noise."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        clean = blobs(BATCH, generator)
        noise = torch.randn(clean.shape, generator=generator)
        t = torch.randint(1000, (BATCH,), generator=generator)
        loss = (predict(model, scheduler.add_noise(clean, noise, t), t) - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def denoise(model: nn.Module, predict: Predict, scheduler: Any, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Final images, and what entered each step."""
    x = torch.randn(IMAGES, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    entered = []
    for t in scheduler.timesteps:
        entered.append(x)
        x = scheduler.step(predict(model, x, t), t, x).prev_sample
    return x, entered


@torch.no_grad()
def errors(
    twin: nn.Module, model: nn.Module, predict: Predict, scheduler: Any, entered: list[torch.Tensor]
) -> list[float]:
    """Relative error of the prediction at each step."""
    found = []
    for t, x in zip(scheduler.timesteps, entered, strict=True):
        reference = predict(model, x, t)
        found.append(float((predict(twin, x, t) - reference).norm() / reference.norm()))
    return found


def psnr(images: torch.Tensor, reference: torch.Tensor) -> float:
    """Decibels."""
    peak = float(reference.max() - reference.min())
    return 20 * math.log10(peak) - 10 * math.log10(float((images - reference).square().mean()))


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """All schemes on one model."""
    from diffusers import DDIMScheduler

    torch.manual_seed(0)
    make, predict = MODELS[name]
    scheduler = DDIMScheduler(num_train_timesteps=1000)
    model = make()
    train(model.train(), predict, scheduler, options.train)
    model.eval()
    scheduler.set_timesteps(options.steps)
    samples = record_inputs(model, [lambda seed=seed: denoise(model, predict, scheduler, seed) for seed in (100, 101)])
    reference, entered = denoise(model, predict, scheduler, 0)
    found: dict[str, Any] = {"timesteps": scheduler.timesteps.tolist(), "parameters": model.num_parameters()}
    for kind, weight in WEIGHTS.items():
        for mode in ("static", "dynamic"):
            activation = INPUTS[kind](mode == "dynamic").to_quantization_spec()
            config = QConfig(QLayerConfig(input_tensors=activation, weight=weight.to_quantization_spec()))
            twin = ModelQuantizer(config).quantize_model(copy.deepcopy(model), samples if mode == "static" else None)
            per_step = errors(twin, model, predict, scheduler, entered)
            images, _ = denoise(twin, predict, scheduler, 0)
            found[f"{kind} {mode}"] = {"errors": per_step, "psnr": psnr(images, reference)}
    return found


def table(name: str, found: dict[str, Any]) -> str:
    """One model as a table: every third step, and the final images."""
    schemes = [f"{kind} {mode}" for kind in WEIGHTS for mode in ("static", "dynamic")]
    lines = [f"| {name}: t | {' | '.join(schemes)} |", "|" + "---|" * (len(schemes) + 1)]
    steps = found["timesteps"]
    for k in sorted({*range(0, len(steps), 3), len(steps) - 1}):
        lines.append(f"| {steps[k]} | " + " | ".join(f"{found[s]['errors'][k]:.4f}" for s in schemes) + " |")
    means = (sum(found[s]["errors"]) / len(steps) for s in schemes)
    lines.append("| mean | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    lines.append("| PSNR of the images, dB | " + " | ".join(f"{found[s]['psnr']:.1f}" for s in schemes) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--train", type=int, default=400, help="training steps")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help=record.HELP)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {"machine": measure.machine()}
    for name in options.models:
        report[name] = measured(name, options)
        print(table(name, report[name]) + "\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
