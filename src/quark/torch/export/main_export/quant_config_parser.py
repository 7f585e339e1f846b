"""Where transformers imports ``QuantConfigParser`` from, when it reads a ``quantization_config`` of ours.

It looks up the quantizer of ``quant_method: "quark"`` after that, so this is where ours takes its place.
"""

from __future__ import annotations

from quark.errors import ConfigError
from quark.torch.export.custom_modes import QuantConfigParser
from quark.torch.export.oldest_transformers import why_too_old

__all__ = ["QuantConfigParser"]

if old := why_too_old():
    raise ConfigError(f"transformers does not load the format quark: {old}")

from quark.torch.export.loader import register  # imports what older ones lack

register()
