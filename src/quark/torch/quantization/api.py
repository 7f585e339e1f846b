"""Where users of the peer import ``ModelQuantizer`` from."""

from __future__ import annotations

from quark.torch.quantizer import ModelQuantizer

__all__ = ["ModelQuantizer"]
