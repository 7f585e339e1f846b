"""Take Q/DQ pairs out between pairs of operators."""

from __future__ import annotations

from quark.onnx.tools.command import Argument, over_pass, pairs, run_as_program

TOOL = over_pass(
    __file__,
    __doc__,
    "remove_qdq_between_op_types",
    arguments=(
        Argument(
            "between_ops", "Pairs of operators, as Conv,Relu;Add,Relu.", pairs, parameter="remove_qdq_between_op_types"
        ),
    ),
)

if __name__ == "__main__":
    run_as_program(TOOL)
