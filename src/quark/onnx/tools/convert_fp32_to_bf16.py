"""A float32 model becomes a bfloat16 one, in one of four forms."""

from __future__ import annotations

from quark.onnx.tools.bfloat16_formats import FORMAT, write
from quark.onnx.tools.command import Tool, run_as_program

TOOL = Tool(__file__, __doc__, write, (FORMAT,))

if __name__ == "__main__":
    run_as_program(TOOL)
