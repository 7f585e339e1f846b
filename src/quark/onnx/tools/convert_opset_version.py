"""Lift a model to a newer opset."""

from __future__ import annotations

from quark.onnx.tools.command import Argument, over_pass, run_as_program

TOOL = over_pass(
    __file__,
    __doc__,
    arguments=(Argument("target_opset_version", "The wanted opset.", int),),
    order=("input", "target_opset_version", "output"),
)

if __name__ == "__main__":
    run_as_program(TOOL)
