"""Checkpoints quantized file by file, whatever their size: ``quantize_checkpoint``."""

from __future__ import annotations

from quark.torch.files.quantize import quantize_checkpoint

__all__ = ["quantize_checkpoint"]
