"""Quantized biases of 32 bits become 16 bits; the model is lifted to opset 21."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(__file__, __doc__)

if __name__ == "__main__":
    run_as_program(TOOL)
