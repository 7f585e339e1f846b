"""List the stored tensors, the largest first, with their types and bytes."""

from __future__ import annotations

import argparse

from quark.onnx.graph.model import load
from quark.onnx.tools.command import Tool, run_as_program


def run(given: argparse.Namespace) -> str:
    """The list."""
    tensors = [value.const_value for value in load(given.input).graph.initializers.values()]
    held = sorted((one for one in tensors if one is not None), key=lambda one: -one.nbytes)
    lines = [f"{one.nbytes:>12,}  {one.dtype}  {list(one.shape.numpy())}  {one.name}" for one in held]
    return "\n".join([*lines, f"{sum(one.nbytes for one in held):>12,}  bytes in {len(held)} tensors"])


TOOL = Tool(__file__, __doc__, run, files=("input",))

if __name__ == "__main__":
    run_as_program(TOOL)
