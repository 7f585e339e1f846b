"""Where transformers imports ``QuantConfigParser`` from."""

from __future__ import annotations

from quark.torch.export.custom_modes import QuantConfigParser

__all__ = ["QuantConfigParser"]
