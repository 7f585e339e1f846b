"""The observers of the torch dialect."""

from __future__ import annotations

from quark.torch.quantization.observer.observer import *  # noqa: F403
from quark.torch.quantization.observer.observer import __all__ as __all__
