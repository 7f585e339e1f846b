"""The four ways in which a bfloat16 model is written (the tools convert_fp32_to_bf16 and convert_fp16_to_bf16)."""

from __future__ import annotations

import argparse
from typing import Any

from quark.errors import ConfigError, unknown
from quark.onnx.tools.command import Argument, apply_pass, random_quantize

OPTIONS: dict[str, dict[str, Any]] = {
    "with_cast": {"BF16QDQToCast": True},
    "customqdq": {},
    "simulate_bf16": {"EnableVaimlBF16": True},
}
#: The opset from which Conv, pooling and normalization are defined for bfloat16.
BFLOAT16_OPSET = 22
FORMAT = Argument(
    "format",
    "with_cast: Cast pairs; customqdq: extended Q/DQ; simulate_bf16: rounded float32 weights and Cast pairs; bf16: "
    "bfloat16 tensors throughout (not for ONNX Runtime's CPU provider).",
    str,
    "with_cast",
)


def write(given: argparse.Namespace, source: Any = None) -> str:
    """Write the model in the format that is asked for.

    Raises:
        ConfigError: there is no such format.
    """
    if given.format == "bf16":
        return apply_pass("convert_fp32_to_half", {"to": "bfloat16", "keep_io_types": True}, given, BFLOAT16_OPSET)
    if given.format not in OPTIONS:
        raise ConfigError(unknown("format", given.format, [*OPTIONS, "bf16"]))
    options = {**OPTIONS[given.format], "external": given.save_as_external_data}
    return random_quantize(given, "BF16", options, source)
