"""How bfloat16 stands in a graph: extended Q/DQ, with a Clip before, as a pair of Casts, or not at all.

insert_clip       Q → Clip(-max, max) → Q          values beyond the largest bfloat16 stay finite
to_cast           Q, DQ → Cast(bfloat16), Cast(float)     a scale other than 1 becomes Div and Mul
remove_cast       Cast(bfloat16) → Cast(float) goes
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.ir.surgery import (
    bypass,
    input_at,
    int_attribute,
    nodes_of,
    prune,
    remove_unused_functions,
    substitute,
)
from quark.onnx.graph.quantized import DEQUANTIZE, QUANTIZE, Rewriter, all_nodes_in_graphs, code_type, parameters
from quark.onnx.graph.report import PassReport

LARGEST = 255 * 2.0**120
BFLOAT16, FLOAT = ir.DataType.BFLOAT16, ir.DataType.FLOAT


def insert_clip(model: ir.Model) -> PassReport:
    """A Clip to the finite bfloat16 values before every Q of that type, in place."""
    rewriter, fired = None, 0
    for node in all_nodes_in_graphs(model):
        source = input_at(node, 0)
        if node.op_type not in QUANTIZE or code_type(node) != "BFLOAT16" or source is None or node.graph is None:
            continue
        maker = source.producer()
        if maker is not None and maker.op_type == "Clip":
            continue
        rewriter = rewriter or Rewriter(model)
        bounds = [
            rewriter.constant(np.array(sign * LARGEST, np.float32), FLOAT, f"bfloat16_{what}")
            for sign, what in ((-1, "min"), (1, "max"))
        ]
        clip = ir.node("Clip", [source, *bounds], name=f"{node.name}_Clip")
        clip.outputs[0].name = rewriter.names.fresh(f"{source.name}_Clip_Output")
        clip.outputs[0].type, clip.outputs[0].shape = source.type, source.shape
        node.graph.insert_before(node, clip)
        node.replace_input_with(0, clip.outputs[0])
        fired += 1
    return PassReport("insert_clip", fired)


def to_cast(model: ir.Model) -> PassReport:
    """Casts in the place of extended Q and DQ of bfloat16, in place."""
    fired, refused = 0, []
    for node in all_nodes_in_graphs(model):
        if node.op_type not in QUANTIZE | DEQUANTIZE or code_type(node) != "BFLOAT16" or node.graph is None:
            continue
        found = parameters(node)
        if found is None or found[0].size != 1 or found[1].any():
            refused.append(f"{node.name!r} stays: it has a scale per channel, a zero point, or computed ones")
            continue
        substitute(node.outputs[0], _casts(node, float(found[0].reshape(()))))
        fired += 1
    if fired:
        remove_unused_functions(model)
    return PassReport("to_cast", fired, tuple(refused))


def _casts(node: ir.Node, scale: float) -> list[ir.Node]:
    """Cast, with the division before or the product after it where the scale is not 1."""
    quantizes = node.op_type in QUANTIZE
    to = {"to": int(BFLOAT16 if quantizes else FLOAT)}
    if scale == 1:
        return [ir.node("Cast", [node.inputs[0]], attributes=to, name=node.name)]
    if quantizes:
        divided = ir.node("Div", [node.inputs[0], node.inputs[1]], name=f"{node.name}_Div")
        divided.outputs[0].name = f"{node.outputs[0].name}_Div"
        return [divided, ir.node("Cast", [divided.outputs[0]], attributes=to, name=node.name)]
    cast = ir.node("Cast", [node.inputs[0]], attributes=to, name=f"{node.name}_Cast")
    cast.outputs[0].name = f"{node.outputs[0].name}_Cast"
    return [cast, ir.node("Mul", [cast.outputs[0], node.inputs[1]], name=node.name)]


def remove_cast(model: ir.Model) -> PassReport:
    """Take out pairs of Casts to bfloat16 and back, in place."""
    fired, refused = 0, []
    for node in nodes_of(model, "Cast"):
        if node.graph is None or int_attribute(node, "to", 0) != BFLOAT16 or node.inputs[0] is None:
            continue
        source = node.inputs[0]
        readers = [use.node for use in node.outputs[0].uses()]
        backs = [one for one in readers if one.op_type == "Cast" and int_attribute(one, "to", 0) == source.dtype]
        for back in dict.fromkeys(backs):
            reason = bypass(back, source)
            if reason is None:
                fired += 1
            else:
                refused.append(f"{back.name!r} stays: {reason}")
        prune(node)
    return PassReport("remove_cast", fired, tuple(refused))
