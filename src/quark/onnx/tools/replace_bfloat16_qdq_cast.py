"""Casts instead of extended Q and DQ of bfloat16."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(__file__, __doc__, "replace_bfloat16_qdq_with_cast")

if __name__ == "__main__":
    run_as_program(TOOL)
