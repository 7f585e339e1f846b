"""Configuration classes, spec helpers and ``ModelQuantizer`` of the torch flow."""

from __future__ import annotations

from quark.torch.quantization.config.config import *  # noqa: F403
from quark.torch.quantization.config.config import __all__ as CONFIGURATION
from quark.torch.quantizer import ModelQuantizer

__all__ = ["ModelQuantizer", *CONFIGURATION]
