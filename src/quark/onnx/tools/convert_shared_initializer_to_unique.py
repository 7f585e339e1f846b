"""Give each node its own copy of an initializer that several share."""

from __future__ import annotations

from quark.onnx.tools.command import Argument, names, over_pass, run_as_program

TOOL = over_pass(
    __file__,
    __doc__,
    "copy_shared_init",
    arguments=(
        Argument(
            "op_types",
            "Operators whose nodes get copies, as Conv,Gemm; all by default.",
            names,
            (),
            "shared_init_op_types",
        ),
    ),
)

if __name__ == "__main__":
    run_as_program(TOOL)
