"""A float32 model becomes a bfloat16 one, in one of four forms."""

from __future__ import annotations

import argparse

from quark.onnx.tools.bfloat16_formats import FORMAT, write
from quark.onnx.tools.command import Tool, run_as_program


def run(given: argparse.Namespace) -> str:
    """Write the model in the format that is asked for."""
    return write(given)


TOOL = Tool("convert_fp32_to_bf16", "A float32 model becomes a bfloat16 one, in one of four forms.", run, (FORMAT,))

if __name__ == "__main__":
    run_as_program(TOOL)
