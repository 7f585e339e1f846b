"""The torch flow: ``ModelQuantizer(config).quantize_model(model, dataloader)`` quantizes a PyTorch model in place."""

from __future__ import annotations

from quark.torch.quantizer import ModelQuantizer

__all__ = ["ModelQuantizer"]
