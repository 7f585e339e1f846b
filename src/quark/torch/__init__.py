"""The torch flow: ``ModelQuantizer(config).quantize_model(model, dataloader)`` quantizes a PyTorch model in place;
``LLMTemplate`` makes configurations of language models."""

from __future__ import annotations

from quark.torch.quantizer import ModelQuantizer
from quark.torch.template import LLMTemplate

__all__ = ["LLMTemplate", "ModelQuantizer"]
