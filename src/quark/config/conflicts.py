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


#: Groups of options (see ``quark.config.options``) that a mode has no use for, what counts there all the same, and
#: options of other groups that do not count.
IDLE_GROUPS: dict[str, tuple[int, ...]] = {"dynamic": (3, 4, 5, 6, 7, 8), "nbits": (3, 5, 6, 7, 8)}
_COUNTS = ("WeightCalibrateMethod", "MinMSEModeFloatScale", "QDQOpTypePerChannelSupportToAxis")
_STATIC = (
    *("AlignEltwiseQuantType", "FloatDecoding", "FloatOutputs", "FloatWhereFaster"),
    *("TuneSpeed", "TunedFloat"),
    *("ForceQuantizeNoInputCheck", "QuantizeAllOpTypes"),
)
_WORDS = {"dynamic": "dynamic quantization", "nbits": "UseMatMulNBits"}


def idle_options(options: Mapping[str, Any], groups: Mapping[str, int], mode: str) -> str:
    """A sentence about the options that were set and that change nothing in this mode; empty where there are none.

    Args:
        options: the values that are not defaults.
        groups: group of every option.
        mode: "static", "dynamic" or "nbits".
    """
    here = IDLE_GROUPS.get(mode, ())
    idle = [name for name in options if name in _STATIC or (groups[name] in here and name not in _COUNTS)]
    return f"without effect under {_WORDS[mode]}: {', '.join(idle)}" if here and idle else ""


def check_together(options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for the first row that applies; ``...`` stands for any value but ``None``."""
    for name, value, other, other_value, why in CONFLICTS:
        if _is(options[name], value) and _is(options[other], other_value):
            raise ConfigError(
                f"the options {name}={options[name]!r} and {other}={options[other]!r} exclude each other: {why}"
            )


def _is(given: Any, value: Any) -> bool:
    return given is not None if value is ... else given is value or (given == value and type(given) is type(value))
