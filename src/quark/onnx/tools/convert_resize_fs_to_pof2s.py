"""Codes around a Resize get a power-of-two scale."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(__file__, __doc__)

if __name__ == "__main__":
    run_as_program(TOOL)
