"""Scales that the readers of a format hold in the type of the model.

vLLM and the kernels of AWQ and GPTQ cast the scales of packed integers to the type that the model computes in, without
a word. So a scale is written in that type where it holds it (``scale_type`` of the configuration sees to that); else it
stays float32 in the file, where nothing is lost yet, and a warning names how far off such a reader will be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quark.config.file_formats import quantizes_behind_rope
from quark.torch.config.model import QConfig, QLayerConfig
from quark.torch.config.tensor import QTensorConfig
from quark.torch.config.type import QSchemeType, ScaleType
from quark.torch.export.model_files import float_dtype
from quark.torch.export.stored import StoredTensor
from quark.torch.fake_quantize import parts
from quark.torch.quantized_layer import quantized_layers

log = logging.getLogger(__name__)
SCALE_TYPES = {torch.float16: ScaleType.float16, torch.bfloat16: ScaleType.bfloat16}
GROUPED = (QSchemeType.per_group, QSchemeType.per_channel)


def in_type_of_model(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``scale`` in ``dtype`` if that holds every value of it."""
    cast = scale.to(dtype)
    return cast if torch.equal(cast.to(scale.dtype), scale) else scale


def warn_of_casts(format: str, model: nn.Module, worst: float) -> None:
    """Say how far the scales of ``model`` move when a reader casts them to its type."""
    if worst > 0:
        name = str(float_dtype(model)).removeprefix("torch.")
        log.warning(
            "%s: the scales are float32, and readers that cast them to %s move them by up to %.2g; "
            "with scale_type=%r in the configuration they run what was evaluated",
            format,
            name,
            worst,
            name,
        )


def is_before_rope(config: QConfig, format: str, program: str | None) -> bool:
    """Whether keys were evaluated before the rotary embedding, where readers of the format quantize them behind it."""
    quantized = bool(config.kv_cache_quant_config) and not config.kv_cache_post_rope
    return quantized and quantizes_behind_rope(format, program)


def warn_of_rope(config: QConfig, format: str, program: str | None) -> None:
    """Say that keys were evaluated elsewhere than where readers of the format quantize them."""
    if is_before_rope(config, format, program):
        log.warning(
            "%s: keys were quantized before the rotary embedding, and what reads this quantizes them behind it; with "
            "kv_cache_post_rope=True in the configuration it runs what was evaluated (models without RoPE: it does)",
            format,
        )


def moved(scale: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest relative change of a scale under a cast."""
    if not scale.is_floating_point() or not scale.numel():
        return 0.0
    whole = scale.float()
    away = (whole.to(dtype).float() - whole).abs() / whole.abs().clamp_min(torch.finfo(torch.float32).tiny)
    return float(away.max())


def worst_cast(model: nn.Module) -> float:
    """How far a cast to the type of ``model`` moves the scales of its weights."""
    dtype, worst = float_dtype(model), 0.0
    for _, layer in quantized_layers(model):
        quantizer = layer.weight_quantizer
        if isinstance(quantizer, StoredTensor):
            worst = max(
                worst, *(moved(value, dtype) for name, value in quantizer.stored.items() if "scale" in name), 0.0
            )
        elif quantizer is not None:
            worst = max(worst, *(moved(part.scale, dtype) for part in parts(quantizer) if part.scale is not None), 0.0)
    return worst


def with_scales_in(config: QConfig, dtype: torch.dtype, all_scales: bool = False) -> QConfig:
    """``config`` with the scales of integer weights in groups and channels in ``dtype``, where they were float32.

    Weights beside int8 activations keep float32 scales: their readers do. With ``all_scales`` every float scale is in
    ``dtype``: those of FP8, of inputs and of caches, too; ``FakeQuantize`` divides inputs in that type then.
    """
    if dtype not in SCALE_TYPES:
        return config
    layer_with = layer_with_all if all_scales else layer_with_grouped
    return with_layers(config, lambda layer: layer_with(layer, dtype))


def with_layers(config: QConfig, changed: Callable[[QLayerConfig], QLayerConfig]) -> QConfig:
    """``config`` with every configuration of a layer in it ``changed``."""
    return replace(
        config,
        global_quant_config=changed(config.global_quant_config),
        layer_quant_config={name: changed(value) for name, value in config.layer_quant_config.items()},
        layer_type_quant_config={kind: changed(value) for kind, value in config.layer_type_quant_config.items()},
        kv_cache_quant_config={name: changed(value) for name, value in config.kv_cache_quant_config.items()},
    )


def layer_with_grouped(layer: QLayerConfig, dtype: torch.dtype) -> QLayerConfig:
    """One layer's configuration with its weight's scales in ``dtype``."""
    weight: Any = layer.weight
    if not isinstance(weight, QTensorConfig) or "int" not in weight.dtype.name or weight.qscheme not in GROUPED:
        return layer
    if weight.scale_rule is not None or weight.scale_type not in (None, ScaleType.float, ScaleType.float32):
        return layer
    if layer.input_tensors is not None and weight.dtype.name.endswith("int8"):
        return layer
    return replace(layer, weight=replace(weight, scale_type=SCALE_TYPES[dtype]))


def layer_with_all(layer: QLayerConfig, dtype: torch.dtype) -> QLayerConfig:
    """One layer's configuration with the scales of its weight, inputs and cached outputs in ``dtype``."""
    slots = ("weight", "input_tensors", "output_tensors")
    return replace(layer, **{slot: tensor_with(getattr(layer, slot), dtype) for slot in slots})


def tensor_with(tensor: Any, dtype: torch.dtype) -> Any:
    """A tensor's configuration with scales in ``dtype``, a half type, where they would be float32."""
    plain = isinstance(tensor, QTensorConfig) and tensor.scale_type in (None, ScaleType.float, ScaleType.float32)
    if not plain or dtype not in SCALE_TYPES or not tensor.dtype.name.startswith(("int", "uint", "fp8")):
        return tensor
    return replace(tensor, scale_type=SCALE_TYPES[dtype])
