"""Infinite weights become large finite ones."""

from __future__ import annotations

from quark.onnx.tools.command import Argument, over_pass, run_as_program

TOOL = over_pass(
    __file__, __doc__, arguments=(Argument("replace_inf_value", "What stands for infinity.", float, 10000.0),)
)

if __name__ == "__main__":
    run_as_program(TOOL)
