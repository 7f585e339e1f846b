"""Diffusion models: the inputs of a denoiser over a whole denoising loop, as calibration samples.

A denoiser sees noise at the first step and almost an image at the last; a static range must know all of them. So
samples are recorded from runs of the pipeline itself, all steps of them, and not made up.

``quantize_diffusion_model_in_place`` quantizes the denoiser of a pipeline of diffusers (``unet`` or ``transformer``);
anything else with a call is recorded by ``record_inputs``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quark.errors import ConfigError, DataError, ModelError
from quark.torch.config.model import QConfig
from quark.torch.quantizer import ModelQuantizer

DENOISERS = ("unet", "transformer")
ACTIVATIONS = ("input_tensors", "output_tensors")
Sample = dict[str, Any]


def denoiser_of(pipeline: Any, name: str | None = None) -> nn.Module:
    """The denoiser of a pipeline of diffusers.

    Raises:
        ModelError: the pipeline has none of that name.
    """
    names = DENOISERS if name is None else (name,)
    found = next((part for key in names if isinstance(part := getattr(pipeline, key, None), nn.Module)), None)
    if found is None:
        raise ModelError(f"{type(pipeline).__name__} has no module called {' or '.join(map(repr, names))}")
    return found


@contextmanager
def recorded(module: nn.Module) -> Iterator[list[Sample]]:
    """The arguments of every call of ``module`` inside the block, by name."""
    samples: list[Sample] = []
    parameters = list(inspect.signature(module.forward).parameters)

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(parameters, args, strict=False)) | kwargs
        samples.append({name: kept(value) for name, value in named.items()})

    with module.register_forward_pre_hook(record, with_kwargs=True):
        yield samples


def kept(value: Any) -> Any:
    """A copy of a tensor on the CPU; anything else as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def record_inputs(module: nn.Module, runs: Iterable[Callable[[], Any]]) -> list[Sample]:
    """What ``module`` is called with while each of ``runs`` is called.

    Raises:
        DataError: it is never called.
    """
    with recorded(module) as samples:
        for run in runs:
            run()
    if not samples:
        raise DataError(f"no run called the {type(module).__name__}")
    return samples


def get_calib_dataloader(
    pipe: Any,
    target_module: nn.Module | str | None,
    prompts: Iterable[Any],
    n_steps: int = 20,
    seed: int = 42,
    device: str | torch.device = "cpu",
) -> list[Sample]:
    """Samples of the denoiser of ``pipe``: every step of every prompt.

    Args:
        pipe: of diffusers.
        target_module: the denoiser, or its name in the pipeline; None: ``unet`` or ``transformer``.
        prompts: what the pipeline is called with, one after the other.
        n_steps: denoising steps.
        seed: of the noise of every prompt, where the pipeline takes a generator.
        device: of that generator.
    """
    module = target_module if isinstance(target_module, nn.Module) else denoiser_of(pipe, target_module)
    takes = "generator" in inspect.signature(type(pipe).__call__).parameters

    def run(prompt: Any) -> None:
        more = {"generator": torch.Generator(device).manual_seed(seed)} if takes else {}
        pipe(prompt, num_inference_steps=n_steps, **more)

    return record_inputs(module, [partial(run, prompt) for prompt in prompts])


def qconfig_needs_activation_calibration(qconfig: QConfig) -> bool:
    """Whether a configuration has static activations, and so needs samples."""
    layers = (
        qconfig.global_quant_config,
        *qconfig.layer_quant_config.values(),
        *qconfig.layer_type_quant_config.values(),
    )
    return any(stage.calibrated for layer in layers for slot in ACTIVATIONS for stage in layer.stages(slot))


def quantize_diffusion_model_in_place(
    model: Any, qconfig: QConfig, dataloader: Iterable[Any] | None = None, denoiser: str | None = None
) -> Any:
    """Quantize the denoiser of ``model``, a pipeline; a module is quantized itself.

    Raises:
        ConfigError: static activations without samples; ``get_calib_dataloader`` makes them.
    """
    if dataloader is None and qconfig_needs_activation_calibration(qconfig):
        raise ConfigError("static activations need samples: make them with get_calib_dataloader(pipe, None, prompts)")
    module = model if isinstance(model, nn.Module) else denoiser_of(model, denoiser)
    ModelQuantizer(qconfig).quantize_model(module, dataloader)
    return model
