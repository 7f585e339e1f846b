"""Where transformers imports ``QuantConfigParser`` from, when it reads a ``quantization_config`` of ours.

It looks up the quantizer of ``quant_method: "quark"`` after that, so this is where ours takes its place.
"""

from __future__ import annotations

from quark.torch.export.custom_modes import QuantConfigParser
from quark.torch.export.loader import register

__all__ = ["QuantConfigParser"]

register()
