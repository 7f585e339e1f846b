"""Types and shapes of what operators of ONNX Runtime's own make, in its domain and, as some writers have it, in ONNX's.

Shape inference ends at an operator that ONNX does not know. Those below make tensors of the type and shape of one of
their inputs; for inference, an Identity stands for each such output. Not handled: caches that grow, and attention whose
result is as wide as its values.
"""

from __future__ import annotations

import onnx

#: Operator -> output -> the input that it is like.
LIKE: dict[str, dict[int, int]] = {
    "BiasGelu": {0: 0},
    "FastGelu": {0: 0},
    "Gelu": {0: 0},
    "GroupQueryAttention": {0: 0},
    "LayerNormalization": {0: 0},
    "QuickGelu": {0: 0},
    "RotaryEmbedding": {0: 0},
    "SimplifiedLayerNormalization": {0: 0},
    "SkipLayerNormalization": {0: 0, 3: 0},
    "SkipSimplifiedLayerNormalization": {0: 0, 3: 0},
}
DOMAIN = "com.microsoft"


def stand_in(graph: onnx.GraphProto, version: int) -> list[int]:
    """Put stand-ins behind the operators above, in place.

    Args:
        graph: of a model that is only there for inference.
        version: of the standard operators.

    Returns:
        The positions of the nodes that were there before.
    """
    nodes, places = list[onnx.NodeProto](), list[int]()
    for node in graph.node:
        places.append(len(nodes))
        nodes.append(node)
        if not _is_known(node, version):
            continue
        for output, source in LIKE[node.op_type].items():
            if output < len(node.output) and node.output[output]:
                made = node.output[output]
                node.output[output] = ""
                nodes.append(onnx.helper.make_node("Identity", [node.input[source]], [made]))
    if len(nodes) > len(places):
        kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)
    return places


def _is_known(node: onnx.NodeProto, version: int) -> bool:
    """Whether a node is one of ONNX Runtime's, in a form whose result is like its input."""
    if node.op_type not in LIKE or node.domain not in ("", DOMAIN):
        return False
    if not node.domain and onnx.defs.has(node.op_type, version, ""):
        return False
    packed = node.op_type == "GroupQueryAttention" and (len(node.input) < 3 or not node.input[1])
    return not packed and len(node.input) > 0 and bool(node.input[0])
