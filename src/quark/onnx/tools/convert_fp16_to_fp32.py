"""A float16 model becomes a float32 one."""

from __future__ import annotations

from quark.onnx.tools.command import Argument, names, over_pass, run_as_program

TOOL = over_pass(
    "convert_fp16_to_fp32",
    "A float16 model becomes a float32 one, or parts of it do.",
    arguments=(Argument("subgraphs_to_include", "Parts of the graph, as start:end;start:end.", names, None),),
)

if __name__ == "__main__":
    run_as_program(TOOL)
