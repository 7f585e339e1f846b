"""Initializers stop being graph inputs."""

from __future__ import annotations

from quark.onnx.tools.command import over_pass, run_as_program

TOOL = over_pass(__file__, __doc__, "remove_input_init")

if __name__ == "__main__":
    run_as_program(TOOL)
