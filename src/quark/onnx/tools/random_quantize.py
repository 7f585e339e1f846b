"""Quantize a model on generated data: to try a configuration out, not for results."""

from __future__ import annotations

import argparse

from quark.onnx.tools.command import Argument, Tool, names, random_quantize, run_as_program, subgraphs

ARGUMENTS = (
    Argument("config", "A preset; `quark presets` lists them.", str, "XINT8"),
    Argument("exclude_nodes", "Nodes that stay float, as a;b.", names, ()),
    Argument("exclude_subgraphs", "Subgraphs that stay float, as start,start:end;start:end.", subgraphs, ()),
)


def run(given: argparse.Namespace) -> str:
    """Quantize on generated data."""
    options = {
        "exclude": given.exclude_nodes,
        "subgraphs": given.exclude_subgraphs,
        "external": given.save_as_external_data,
    }
    return random_quantize(given, given.config, options)


TOOL = Tool(__file__, __doc__, run, ARGUMENTS, output_flags=("quantized_model_path",))

if __name__ == "__main__":
    run_as_program(TOOL)
