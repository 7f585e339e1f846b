"""Options that cannot work together: one row per pair, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.errors import ConfigError

_NO_TRACE = "nothing of the model may reach the disk"
_TOO_LARGE = "the kept activations would be written again after every sample"

#: (option, its value, other option, its value, why the two exclude each other).
CONFLICTS: tuple[tuple[str, Any, str, Any, str], ...] = (
    ("CryptoMode", True, "SaveAndRestore", ..., _NO_TRACE),
    ("CryptoMode", True, "SaveTensorHistFig", True, _NO_TRACE),
    ("CryptoMode", True, "DebugMode", True, "no message may say anything about the model"),
    ("UseMatMulNBits", True, "UseFP32Scale", True, "a float16 model keeps float16 scales there"),
    ("EncryptionAlgorithm", ..., "CryptoMode", False, "it says how CryptoMode encrypts"),
    ("SaveAndRestore", ..., "NumBins", 0, _TOO_LARGE),
    ("SaveAndRestore", ..., "CalibOptimizeMem", False, _TOO_LARGE),
    ("SaveAndRestore", ..., "CalibOptimizeDisk", False, _TOO_LARGE),
)


def check_together(options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for the first row that applies; ``...`` stands for any value but ``None``."""
    for name, value, other, other_value, why in CONFLICTS:
        if _is(options[name], value) and _is(options[other], other_value):
            raise ConfigError(
                f"the options {name}={options[name]!r} and {other}={options[other]!r} exclude each other: {why}"
            )


def _is(given: Any, value: Any) -> bool:
    return given is not None if value is ... else given is value or (given == value and type(given) is type(value))
