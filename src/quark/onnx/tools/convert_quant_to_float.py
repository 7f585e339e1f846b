"""A quantized model, static or dynamic, becomes a float one with the weights that its codes stand for."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(__file__, __doc__)

if __name__ == "__main__":
    run_as_program(TOOL)
