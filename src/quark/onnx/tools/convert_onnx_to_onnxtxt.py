"""A model as text that people read and edit."""

from __future__ import annotations

import argparse
from pathlib import Path

from google.protobuf import text_format

from quark.files.ours import MARK
from quark.files.outputs import Output, write_output
from quark.onnx.graph.model import load, to_proto
from quark.onnx.tools.command import Tool, run_as_program


def run(given: argparse.Namespace) -> str:
    """Write the text."""
    text = text_format.MessageToString(to_proto(load(given.input)))
    write_output(Output(Path(given.output), folder=True), f"# {MARK}\n{text}")
    return f"written: {given.output}"


TOOL = Tool(__file__, __doc__, run, writes="text")

if __name__ == "__main__":
    run_as_program(TOOL)
