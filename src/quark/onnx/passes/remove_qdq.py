"""Take quantization out of a graph, everywhere or between chosen operators (RemoveQDQBetweenOps, the tools remove_qdq).

    X → Q → DQ → reader   becomes   X → reader

Block operators (BFP, MX) that quantize and dequantize in one node count as a pair. Stored weights keep their codes;
``quant_to_float`` turns those back as well.
"""

from __future__ import annotations

from typing import Annotated

import onnx_ir as ir

from quark.ir.surgery import remove_unused_functions
from quark.onnx.graph.functions import inline_those_with
from quark.onnx.graph.quantized import FUSED, QUANTIZE, remove, stages
from quark.onnx.graph.report import PassReport

Pairs = Annotated[
    list[tuple[str, str]], "Pairs (operator before, operator after) between which Q and DQ go, as [[Conv, Relu]]."
]


def run(model: ir.Model) -> PassReport:
    """Remove every Q/DQ pair of an activation, in place."""
    return _remove(model, None)


def between(model: ir.Model, remove_qdq_between_op_types: Pairs) -> PassReport:
    """Remove the pairs between chosen operators where the DQ has one reader and the tensor no other use, in place."""
    return _remove(model, set(remove_qdq_between_op_types))


def mul_add(model: ir.Model) -> PassReport:
    """Remove the pairs between a Mul and the Add that alone reads it, in place."""
    return _remove(model, {("Mul", "Add")})


def _remove(model: ir.Model, wanted: set[tuple[str, str]] | None) -> PassReport:
    fired, refused = 0, []
    inline_those_with(model, QUANTIZE | FUSED)
    for stage in stages(model):
        maker = stage.source.producer()
        readers = [use.node for node in stage.last for use in node.outputs[0].uses()]
        if wanted is not None:
            kinds = ("" if maker is None else maker.op_type, readers[0].op_type if len(readers) == 1 else "")
            if kinds not in wanted or any(node.outputs[0].is_graph_output() for node in stage.last):
                continue
        reason = remove(stage)
        if reason is None:
            fired += 1
        else:
            refused.append(f"{stage.first.name!r} stays: {reason}")
    if fired:
        remove_unused_functions(model)
    return PassReport("remove_qdq", fired, tuple(refused))
