"""Calibration: the samples run through the model while observers look at the activations.

A sample is what the model takes: a tensor, a mapping (dict, ``BatchEncoding``) of keyword arguments, a tuple or list
of positional ones. Of a tuple that is longer than the model's arguments (images and labels) the first are taken.
Arrays become tensors, and tensors go to the device of the model. While the samples run nothing is quantized, and the
model is in ``eval()``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.errors import DataError
from quark.torch.fake_quantize import FakeQuantize, parts
from quark.torch.graph.point import points
from quark.torch.kv_cache import cache_quantizers
from quark.torch.quantized_layer import forget_quantized, quantized_layers, static_parts
from quark.torch.softmax import softmax_quantizers

RAISED_BY = "raised by sample"
NOT_RUN = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)
"""What models raise where they miss an input: pictures, sound, or the words that a decoder begins with."""
"""How the note begins that an error of the model gets while a sample runs."""


def calibrate(model: nn.Module, samples: Iterable[Any]) -> list[str]:
    """Find the static ranges of the activations of ``model``.

    Returns:
        Names of the tensors that no value reached; they stay float.

    Raises:
        DataError: no samples, a sample that is not a model input, or values that are not finite.
    """
    observed = list(static_activations(model))
    for part in observed:
        part.start(device_of(model))
    with evaluating(model), disabled([model], observers=False):
        count = sum(noted(model, sample, number) for number, sample in enumerate(progress(samples)))
    if not count:
        raise DataError("the dataloader is empty, and static activations need at least one sample")
    return [part.tensor_name for part in observed if not part.finish()]


def static_activations(model: nn.Module) -> Iterator[FakeQuantize]:
    """The quantizers whose range the samples give: of layers, caches, attention, graphs."""
    for _, layer in quantized_layers(model):
        yield from (part for _, part in static_parts(layer))
    for _, point in points(model):
        yield from (part for part in parts(point) if part.stage.calibrated)
    for _, cache in cache_quantizers(model):
        yield from (part for part in parts(cache) if part.stage.calibrated)
    yield from (part for part in softmax_quantizers(model) if part.stage.calibrated)


def noted(model: nn.Module, sample: Any, number: int) -> int:
    """As ``run``; what the model raises says which sample it was."""
    try:
        return run(model, sample)
    except Exception as error:
        error.add_note(f"{RAISED_BY} {number} of the dataloader: {described(sample)}")
        raise


def described(sample: Any) -> str:
    """Types and shapes of a sample, in a line."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        return f"{str(sample.dtype).removeprefix('torch.')} {list(sample.shape)}"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name}: {described(value)}" for name, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(map(described, sample)) + ")"
    return type(sample).__name__


def run(model: nn.Module, sample: Any) -> int:
    """One sample through the model; 1."""
    args, kwargs = arguments_of(model, sample)
    model(*args, **kwargs)
    return 1


def arguments_of(model: nn.Module, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model is called with on a sample, on its device.

    Raises:
        DataError: a sample of another type.
    """
    sample = to_device(sample, device_of(model))
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if isinstance(sample, Mapping):
        return (), {str(name): value for name, value in sample.items()}
    if isinstance(sample, tuple | list):
        return accepted(model, sample), {}
    raise DataError(
        f"a sample is a tensor, a mapping of keyword arguments, or a tuple or list of arguments, not "
        f"{type(sample).__name__}"
    )


def device_of(model: nn.Module) -> torch.device:
    """Where the first parameter of ``model`` is, and where its input goes."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def accepted(model: nn.Module, sample: tuple[Any, ...] | list[Any]) -> tuple[Any, ...]:
    """As many of the first values as ``model.forward`` has positional arguments."""
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return tuple(sample)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(sample[: sum(kind in positional for kind in kinds)])


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors inside ``value`` on ``device``, arrays as tensors.

    Raises:
        DataError: a tensor without values.
    """
    if isinstance(value, torch.Tensor):
        if value.is_meta and device.type != "meta":
            raise DataError("a sample is on the meta device, so it has no values")
        return value.to(device)
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value, device=device)
    if isinstance(value, Mapping):
        return {name: to_device(item, device) for name, item in value.items()}
    if isinstance(value, tuple | list):  # each stays what it is: models tell lists of shapes from shapes
        moved = [to_device(item, device) for item in value]
        return moved if isinstance(value, list) else value._make(moved) if hasattr(value, "_make") else tuple(moved)
    return value


def progress(samples: Iterable[Any]) -> Iterator[Any]:
    """``samples``, with a progress bar where there is a terminal."""
    from quark.report.progress import bars

    total = length_hint(samples) or None
    with bars() as update:
        for done, sample in enumerate(samples):
            update("calibrate", done, total)
            yield sample


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in ``eval()`` without gradients; every module gets its mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def on_cpu(model: nn.Module) -> Iterator[None]:
    """The model on the CPU, and back on its device afterwards."""
    device = next(model.parameters()).device
    if device.type == "cpu":
        yield
        return
    model.cpu()
    try:
        yield
    finally:
        model.to(device)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Within the block, models of transformers keep no key-value cache: a block's answer would depend on earlier calls,
    and torch.export knows none."""
    configs: dict[int, Any] = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    changed = [config for config in configs.values() if getattr(config, "use_cache", False)]
    try:
        for config in changed:
            config.use_cache = False
        yield
    finally:
        for config in changed:
            config.use_cache = True


@contextmanager
def disabled(modules: Iterable[nn.Module], observers: bool = True) -> Iterator[None]:
    """All quantizers in ``modules`` let tensors through as they are; without ``observers``, all but those that observe.

    Layers forget the weights that they have quantized, before and after: a weight kept from here would stay float.
    """
    inside = list(dict.fromkeys(part for module in modules for part in module.modules()))
    quantizers = [part for part in inside if isinstance(part, FakeQuantize)]
    found = [part for part in quantizers if observers or part.observer is None]
    before = [part.enabled for part in found]
    forget_quantized(inside)
    for part in found:
        part.enabled = False
    try:
        yield
    finally:
        for part, value in zip(found, before, strict=True):
            part.enabled = value
        forget_quantized(inside)
