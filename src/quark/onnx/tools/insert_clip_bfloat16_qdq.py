"""A Clip to the finite bfloat16 values before every Q of that type."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(__file__, __doc__, "insert_clip_before_bfloat16_qdq")

if __name__ == "__main__":
    run_as_program(TOOL)
