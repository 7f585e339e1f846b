"""Biases of 8 bits become int32 with the scale that integer kernels on CPUs expect."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(__file__, __doc__, "adjust_bias_scale", {"widen": True})

if __name__ == "__main__":
    run_as_program(TOOL)
