"""Take the Q/DQ pairs of activations out; stored weights keep their codes."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass("remove_qdq", "Take the Q/DQ pairs of activations out; stored weights keep their codes.")

if __name__ == "__main__":
    run_as_program(TOOL)
