"""List inputs, outputs and nodes with what they read and write."""

from __future__ import annotations

import argparse

from quark.ir.surgery import name_of
from quark.onnx.graph.model import load
from quark.onnx.tools.command import Tool, run_as_program


def run(given: argparse.Namespace) -> str:
    """The list."""
    graph = load(given.input).graph
    lines = [f"input   {value.name}  {value.dtype}  {value.shape}" for value in graph.inputs]
    lines += [f"output  {value.name}  {value.dtype}  {value.shape}" for value in graph.outputs]
    for node in graph:
        ends = [
            ", ".join(name_of(value) for value in side if value is not None) for side in (node.inputs, node.outputs)
        ]
        lines.append(f"node    {node.name}  {node.op_type}  ({ends[0]}) -> ({ends[1]})")
    return "\n".join(lines)


TOOL = Tool(__file__, __doc__, run, files=("input",))

if __name__ == "__main__":
    run_as_program(TOOL)
