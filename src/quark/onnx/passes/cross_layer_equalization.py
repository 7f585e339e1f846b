"""Cross-layer equalization as a pass of its own (onnx_cross_layer_equalization); the parameters of ``CLEConfig``.

A chain takes part when all its layers are of the chosen types and names. See :mod:`quark.onnx.algorithms.cle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import onnx_ir as ir

from quark.errors import check_names
from quark.ir.surgery import name_of
from quark.onnx.algorithms import cle
from quark.onnx.algorithms.channels import LAYERS
from quark.onnx.graph.report import PassReport
from quark.onnx.quantization.config.algorithm import CLEConfig

Types = Annotated[Sequence[str], "Operators that may be equalized."]
Chosen = Annotated[Sequence[str], "Names of the nodes that may be; [] for all."]
Excluded = Annotated[Sequence[str], "Names of nodes that may not."]


def run(
    model: ir.Model,
    op_types_to_quantize: Types = LAYERS,
    nodes_to_quantize: Chosen = (),
    nodes_to_exclude: Excluded = (),
    replace_clip6_relu: Annotated[bool, "First turn Clip(0, 6) into Relu."] = False,
    cle_balance_method: Annotated[str, "max: channels are compared by their largest magnitude."] = "max",
    cle_steps: Annotated[int, "Times the model is gone through; -1 until nothing changes."] = 1,
    cle_weight_threshold: Annotated[float, "Channels whose magnitudes sum to less stay."] = 0.5,
    cle_scale_append_bias: Annotated[bool, "Count the bias as one more weight of its channel."] = True,
    cle_scale_use_threshold: Annotated[bool, "Use cle_weight_threshold."] = True,
    cle_total_layer_diff_threshold: Annotated[float, "With cle_steps=-1, the change that counts as none."] = 2e-7,
) -> PassReport:
    """Equalize the chains of the main graph, in place.

    Raises:
        ConfigError: a name that no node has, an operator that is never equalized, a setting outside its range.
    """
    config = CLEConfig(
        cle_balance_method,
        cle_steps,
        cle_weight_threshold,
        cle_scale_append_bias,
        cle_scale_use_threshold,
        cle_total_layer_diff_threshold,
    )
    nodes = {name_of(node): node for node in model.graph}
    for kind, given, known in (
        ("node", (*nodes_to_quantize, *nodes_to_exclude), nodes),
        ("operator that can be equalized", op_types_to_quantize, LAYERS),
    ):
        check_names(kind, given, known)

    def takes_part(node: ir.Node) -> bool:
        wanted = not nodes_to_quantize or node.name in nodes_to_quantize
        return wanted and node.name not in nodes_to_exclude and node.op_type in op_types_to_quantize

    return cle.run(model, config, replace_clip6_relu, takes_part)
