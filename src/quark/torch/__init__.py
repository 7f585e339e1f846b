"""The torch flow: ``ModelQuantizer(config).quantize_model(model, dataloader)`` quantizes a PyTorch model in place;
``LLMTemplate`` makes configurations of language models; ``export_safetensors`` writes the quantized model and
``import_model_from_safetensors`` reads it."""

from __future__ import annotations

from quark.torch.export.api import export_safetensors, import_model_from_safetensors
from quark.torch.quantizer import ModelQuantizer
from quark.torch.template import LLMTemplate

__all__ = ["LLMTemplate", "ModelQuantizer", "export_safetensors", "import_model_from_safetensors"]
