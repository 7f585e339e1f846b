"""Activations of uint16 become uint8: the same range with fewer codes."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(__file__, __doc__, "convert_code_type", {"change": "u16_to_u8"})

if __name__ == "__main__":
    run_as_program(TOOL)
