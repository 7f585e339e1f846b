"""The functions that export and import models, and the one that transformers calls."""

from __future__ import annotations

from torch import nn

from quark.errors import ConfigError
from quark.torch.config.model import QConfig
from quark.torch.export.compressed_tensors import export_compressed_tensors
from quark.torch.export.gguf_model import export_gguf
from quark.torch.export.huggingface import export_safetensors
from quark.torch.export.onnx_model import export_onnx
from quark.torch.export.skeleton import is_inside_attention, prepared, unpack
from quark.torch.files.loading import import_model_from_safetensors

__all__ = [
    "export_compressed_tensors",
    "export_gguf",
    "export_onnx",
    "export_safetensors",
    "import_model_from_safetensors",
    "unpack",
]


def _map_to_quark(
    model: nn.Module,
    quantization_config: QConfig,
    pack_method: str = "reorder",
    custom_mode: str = "quark",
    weight_format: str = "real_quantized",
) -> None:
    """Make a float model of transformers, before its tensors are loaded, ready to take those of our checkpoints."""
    if is_inside_attention(quantization_config):
        raise ConfigError(
            "this checkpoint quantizes caches after RoPE or attention probabilities, which transformers cannot load; "
            "use import_model_from_safetensors(None, folder)"
        )
    prepared(model, quantization_config, pack_method, weight_format)
