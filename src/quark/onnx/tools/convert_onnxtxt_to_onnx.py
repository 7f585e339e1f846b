"""A model from its text."""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx
from google.protobuf import text_format

from quark.errors import ModelError
from quark.onnx.graph.model import load, save
from quark.onnx.tools.command import Tool, run_as_program
from quark.reading import DAMAGED_TEXT, read_text, reason_of


def run(given: argparse.Namespace) -> str:
    """Read the text and write the model."""
    proto = onnx.ModelProto()
    try:
        text_format.Parse(read_text(given.input, ModelError, "the text of a model"), proto)
    except (text_format.ParseError, *DAMAGED_TEXT) as error:
        raise ModelError(f"{given.input} is not a model in text form: {reason_of(error)}") from error
    save(load(proto), Path(given.output), bool(given.save_as_external_data))
    return f"written: {given.output}"


TOOL = Tool(__file__, __doc__, run)

if __name__ == "__main__":
    run_as_program(TOOL)
