"""A float16 model becomes a bfloat16 one, in one of four forms."""

from __future__ import annotations

import argparse

from quark.onnx.tools.bfloat16_formats import FORMAT, write
from quark.onnx.tools.command import Tool, run_as_program
from quark.onnx.tools.widening import widened


def run(given: argparse.Namespace) -> str:
    """Widen the model to float32, then write it in the format that is asked for."""
    given.input = widened(given)
    return write(given)


TOOL = Tool(__file__, __doc__, run, (FORMAT,))

if __name__ == "__main__":
    run_as_program(TOOL)
