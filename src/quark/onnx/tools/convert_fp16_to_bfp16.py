"""A float16 model becomes a BFP16 one: blocks of 8 values with one exponent."""

from __future__ import annotations

import argparse

from quark.onnx.tools.command import Tool, random_quantize, run_as_program
from quark.onnx.tools.widening import widened


def run(given: argparse.Namespace) -> str:
    """Quantize on generated data."""
    return random_quantize(given, "BFP16", {"external": given.save_as_external_data}, widened(given))


TOOL = Tool(__file__, __doc__, run)

if __name__ == "__main__":
    run_as_program(TOOL)
