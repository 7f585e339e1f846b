"""Activations of int8 become uint8 on the same grid."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(__file__, __doc__, "convert_code_type", {"change": "s8_to_u8"})

if __name__ == "__main__":
    run_as_program(TOOL)
