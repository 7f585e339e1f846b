"""Give inputs and outputs fixed shapes; every other shape follows."""

from __future__ import annotations

from quark.onnx.tools.command import Argument, over_pass, run_as_program

TOOL = over_pass(
    __file__,
    __doc__,
    "fix_shapes",
    arguments=(Argument("fix_shapes", "Shapes, as x:[1,3,224,224];y:[1,1000].", parameter="input_output_name_shapes"),),
)

if __name__ == "__main__":
    run_as_program(TOOL)
