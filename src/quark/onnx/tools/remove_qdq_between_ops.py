"""Take Q/DQ pairs out between pairs of operators."""

from __future__ import annotations

from quark.onnx.tools.command import Argument, over_pass, pairs, run_as_program

TOOL = over_pass(
    "remove_qdq_between_ops",
    "Take Q/DQ pairs out between pairs of operators.",
    "remove_qdq_between_op_types",
    arguments=(
        Argument(
            "between_ops", "Pairs of operators, as Conv,Relu;Add,Relu.", pairs, parameter="remove_qdq_between_op_types"
        ),
    ),
)

if __name__ == "__main__":
    run_as_program(TOOL)
