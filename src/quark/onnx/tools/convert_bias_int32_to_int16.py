"""Quantized biases of 32 bits become 16 bits; the model is lifted to opset 21."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(
    "convert_bias_int32_to_int16", "Quantized biases of 32 bits become 16 bits; the model is lifted to opset 21."
)

if __name__ == "__main__":
    run_as_program(TOOL)
