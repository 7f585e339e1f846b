"""Every configuration class and spec helper of the torch dialect under the name that users import it from."""

from __future__ import annotations

from quark.torch.config.algorithms import *  # noqa: F403
from quark.torch.config.algorithms import __all__ as ALGORITHMS
from quark.torch.config.model import Config, QConfig, QLayerConfig
from quark.torch.config.qat import QATSpec, TQTSpec
from quark.torch.config.specs import *  # noqa: F403
from quark.torch.config.specs import __all__ as SPECS
from quark.torch.config.tensor import QTensorConfig, QuantizationSpec

__all__ = [
    "Config",
    "QATSpec",
    "QConfig",
    "QLayerConfig",
    "QTensorConfig",
    "QuantizationSpec",
    "TQTSpec",
    *ALGORITHMS,
    *SPECS,
]
