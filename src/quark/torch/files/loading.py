"""``import_model_from_safetensors``: a quantized folder, whoever wrote it, becomes a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ConfigError
from quark.torch.devices import usable
from quark.torch.export.checkpoint import method_of
from quark.torch.export.reload import own_model
from quark.torch.files.foreign import OWN, quantized_model
from quark.torch.files.methods import GRIDS


def import_model_from_safetensors(
    model: nn.Module | None,
    model_dir: str | Path,
    multi_device: bool = False,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    device: str | torch.device = "cpu",
    multi_gpu: bool = False,
) -> nn.Module:
    """Load a quantized model from ``model_dir``.

    Args:
        model: the float model (its values are not used; it may be on the meta device), which becomes quantized in
            place; None: made by transformers from ``config.json``. Where graph mode quantized it: the graph that
            ``torch.export`` makes of it, which does not change.
        model_dir: folder with ``config.json`` and safetensors files, written here or by another program.
        multi_device, multi_gpu: models spread over several devices are not available.
        trust_remote_code, device: for a model that transformers makes.
        attn_implementation: likewise; None: transformers' own choice, but "eager" where attention probabilities are
            quantized. Kernels differ in the last bits: choose that of the model that was exported.

    Returns:
        ``model``, or the new one. Its weights are kept as codes; ``unpack`` decodes them once.

    Raises:
        ModelError: files that are missing, broken, or do not fit the model; the file and the tensor are named.
        ConfigError: an unknown method or scheme, a device that is not there, or codes of another program that no layer
            of ours holds.
    """
    if multi_device or multi_gpu:
        raise ConfigError(
            "multi_device and multi_gpu are not available: load the model on one device (weights stay codes, a quarter "
            "of the float ones), or let `vllm serve FOLDER --tensor-parallel-size N` spread it over several"
        )
    folder = Path(model_dir)
    usable(device)
    method = method_of(folder)
    if method in OWN or method not in GRIDS or (model is None and trust_remote_code):
        return own_model(model, folder, trust_remote_code, attn_implementation, device)
    made: Any = quantized_model(folder, model)
    if model is None and attn_implementation is not None:
        made.set_attn_implementation(attn_implementation)
    return made if model is not None else made.to(device)
