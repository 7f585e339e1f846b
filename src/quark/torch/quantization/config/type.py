"""The enumerations of the torch dialect."""

from __future__ import annotations

from quark.torch.config.type import *  # noqa: F403
from quark.torch.config.type import __all__ as __all__
