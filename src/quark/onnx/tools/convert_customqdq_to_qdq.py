"""Extended Q and DQ of integer codes become those of com.microsoft."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass("convert_customqdq_to_qdq", "Extended Q and DQ of integer codes become those of com.microsoft.")

if __name__ == "__main__":
    run_as_program(TOOL)
