"""Take out pairs of Casts to bfloat16 and back."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(__file__, __doc__, "remove_bfloat16_cast")

if __name__ == "__main__":
    run_as_program(TOOL)
