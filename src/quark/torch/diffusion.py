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

    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield samples
    finally:
        handle.remove()


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
    pipeline: Any, prompts: Iterable[Any], n_steps: int = 20, denoiser: str | None = None
) -> list[Sample]:
    """Samples of the denoiser of ``pipeline``: every step of every prompt.

    Args:
        pipeline: of diffusers.
        prompts: what the pipeline is called with, one after the other.
        n_steps: denoising steps.
        denoiser: its name in the pipeline; None: ``unet`` or ``transformer``.
    """
    runs = (lambda prompt=prompt: pipeline(prompt, num_inference_steps=n_steps) for prompt in prompts)
    return record_inputs(denoiser_of(pipeline, denoiser), runs)


def qconfig_needs_activation_calibration(config: QConfig) -> bool:
    """Whether a configuration has static activations, and so needs samples."""
    layers = (config.global_quant_config, *config.layer_quant_config.values(), *config.layer_type_quant_config.values())
    return any(stage.calibrated for layer in layers for slot in ACTIVATIONS for stage in layer.stages(slot))


def quantize_diffusion_model_in_place(
    pipeline: Any, config: QConfig, dataloader: Iterable[Any] | None = None, denoiser: str | None = None
) -> Any:
    """Quantize the denoiser of ``pipeline``; a module is quantized itself.

    Raises:
        ConfigError: static activations without samples; ``get_calib_dataloader`` makes them.
    """
    if dataloader is None and qconfig_needs_activation_calibration(config):
        raise ConfigError("static activations need samples: make them with get_calib_dataloader(pipeline, prompts)")
    module = pipeline if isinstance(pipeline, nn.Module) else denoiser_of(pipeline, denoiser)
    ModelQuantizer(config).quantize_model(module, dataloader)
    return pipeline
