"""The weights of a written ONNX file, as ONNX Runtime computes them by the nodes that decode them, against the values
that the model computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quark.torch.export.onnx_marks import Marked
from quark.torch.export.verify import check


@torch.no_grad()
def verify_weights(path: Path, found: Sequence[Marked], results: Mapping[int, str], turned: set[str]) -> None:
    """Compare.

    Args:
        path: the file, perhaps with its tensors beside it.
        found: the quantizers of the model.
        results: names in the graph of what they give, by their numbers.
        turned: of these, those that are stored transposed.

    Raises:
        ModelError: a weight that is not what the model computes with.
    """
    import onnx

    proto = onnx.load(path)
    makers = {name: node for node in proto.graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for key, name in results.items():
        marked = found[key]
        if marked.value is None or name not in makers:
            continue  # an activation, or a weight that nothing reads
        made = torch.from_numpy(np.ascontiguousarray(evaluated(proto, name, makers, constants)))
        value = marked.value.detach()
        check(marked.name, made.T if name in turned else made, value if marked.frozen else marked.quantizer(value))


def evaluated(proto: Any, name: str, makers: Mapping[str, Any], constants: Mapping[str, Any]) -> np.ndarray:
    """The value of a name that depends on constants only."""
    import onnxruntime
    from onnx import TensorProto, helper

    nodes: list[Any] = []
    used, waiting = {}, [name]
    while waiting:
        wanted = waiting.pop()
        if wanted in constants:
            used[wanted] = constants[wanted]
        elif wanted in makers and not any(makers[wanted] is node for node in nodes):
            nodes.append(makers[wanted])
            waiting += [one for one in makers[wanted].input if one]
    order = {id(node): number for number, node in enumerate(proto.graph.node)}
    nodes.sort(key=lambda node: order[id(makers[node.output[0]])])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "weight", [], outputs, list(used.values()))
    model = helper.make_model(graph, opset_imports=proto.opset_import, functions=list(proto.functions))
    model.ir_version = proto.ir_version
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # each constant is used once
    options.intra_op_num_threads = 1  # no threads are started for each constant
    options.log_severity_level = 4  # functions have no shapes; the export says what matters
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (value,) = session.run(None, {})
    return np.asarray(value, np.float32)
