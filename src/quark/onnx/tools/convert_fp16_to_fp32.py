"""A float16 or bfloat16 model becomes a float32 one, or parts of it do."""

from __future__ import annotations

from quark.onnx.tools.command import Argument, names, over_pass, run_as_program

TOOL = over_pass(
    __file__,
    __doc__,
    arguments=(Argument("subgraphs_to_include", "Parts of the graph, as start:end;start:end.", names, None),),
)

if __name__ == "__main__":
    run_as_program(TOOL)
