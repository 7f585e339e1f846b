"""A float32 model computes in float16."""

from __future__ import annotations

from quark.onnx.tools.command import Argument, boolean, over_pass, run_as_program

TOOL = over_pass(
    __file__,
    __doc__,
    "convert_fp32_to_half",
    {"to": "float16"},
    arguments=(
        Argument("keep_io_types", "Inputs and outputs stay float32.", boolean, False),
        Argument("disable_shape_infer", "Accepted; types are followed node by node.", boolean, False, accepted=True),
        Argument("not_simplify", "Accepted; nothing is simplified here.", boolean, False, accepted=True),
        Argument("all_tensors_to_one_file", "Accepted; external data are one file.", boolean, False, accepted=True),
    ),
)

if __name__ == "__main__":
    run_as_program(TOOL)
