"""A model as text that people read and edit."""

from __future__ import annotations

import argparse
from pathlib import Path

from google.protobuf import text_format  # type: ignore[import-untyped]

from quark.onnx.graph.model import load, to_proto
from quark.onnx.tools.command import Tool, run_as_program


def run(given: argparse.Namespace) -> str:
    """Write the text."""
    Path(given.output).write_text(text_format.MessageToString(to_proto(load(given.input))), encoding="utf-8")
    return f"written: {given.output}"


TOOL = Tool("convert_onnx_to_onnxtxt", "A model as text that people read and edit.", run)

if __name__ == "__main__":
    run_as_program(TOOL)
