"""Give operators of com.amd.quark the names of com.vai.quantize, or back."""

from __future__ import annotations

from quark.onnx.tools.command import Argument, boolean, over_pass, run_as_program

TOOL = over_pass(
    __file__,
    __doc__,
    arguments=(Argument("reverse_conversion", "From com.vai.quantize to com.amd.quark.", boolean, False),),
)

if __name__ == "__main__":
    run_as_program(TOOL)
