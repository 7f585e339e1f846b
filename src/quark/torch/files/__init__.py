"""Checkpoints quantized file by file, whatever their size: ``quantize_checkpoint``; loaded when it is asked for, since
headers (``headers.py``) are read before torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.torch.files.quantize import quantize_checkpoint

__all__ = ["quantize_checkpoint"]


def __getattr__(name: str) -> Any:
    """Import what was left out until it is asked for (PEP 562)."""
    if name != "quantize_checkpoint":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quark.torch.files.quantize import quantize_checkpoint

    return quantize_checkpoint
