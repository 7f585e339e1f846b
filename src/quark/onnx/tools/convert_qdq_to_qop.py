"""Q/DQ around Conv, MatMul, Add, Mul and Sigmoid becomes the integer operator."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass("convert_qdq_to_qop", "Q/DQ around Conv, MatMul, Add, Mul and Sigmoid becomes the integer operator.")

if __name__ == "__main__":
    run_as_program(TOOL)
