"""Whether an ONNX file computes what its model does, where answers alone cannot say it.

Two programs add in different orders. Where a number lies half-way between two codes the last bit decides which it gets,
and from there on the answers part: by 15 to 40 % of the logits of a small random model with int4 activations, as much
as the model's own when its embeddings move by one unit in the last place. So each quantizer of the model is given what
it reads in the file, must make of it exactly what the file makes, and hands on that: then the answers must be equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quark.torch.export.onnx_marks import Marked, quantizers_of


@torch.no_grad()
def pinned(model: nn.Module, path: Path, ids: torch.Tensor) -> tuple[float, float, float]:
    """Compare a decoder with the file that it was written to.

    Args:
        model: quantized.
        path: of the graph, with a cache.
        ids: token ids [texts, tokens].

    Returns:
        Relative errors, between the file and the model: of the logits; of the values of the quantizer that is worst,
        given the same inputs; of the logits where the model's quantizers hand on what those of the file do.
    """
    marks = [mark for mark in quantizers_of(model) if mark.value is None]
    graph, places = observed(path, marks)
    found = run(graph, ids)
    free, worst, taken = model(input_ids=ids).logits, 0.0, set()

    def hand_on(name: str, real: Any, x: torch.Tensor) -> torch.Tensor:
        nonlocal worst
        read, made = (found[place].reshape(x.shape) for place in places[name])
        worst = max(worst, apart(made, real(read)))
        taken.add(name)
        return made

    for mark in marks:
        real = mark.quantizer.forward
        mark.quantizer.__dict__["forward"] = lambda x, name=mark.name, real=real: hand_on(name, real, x)
    try:
        held = model(input_ids=ids).logits
    finally:
        for mark in marks:
            mark.quantizer.__dict__.pop("forward")
    if len(taken) != len(marks):
        raise ValueError(f"{len(marks)} quantizers, of which {len(taken)} ran")
    return apart(found["logits"], free), worst, apart(found["logits"], held)


def observed(path: Path, marks: list[Marked]) -> tuple[Any, dict[str, tuple[str, str]]]:
    """The graph with what its quantizers of activations read and make as outputs, and their names by the quantizer."""
    import onnx

    proto = onnx.load(path)
    constants = {tensor.name for tensor in proto.graph.initializer}
    places = {}
    for mark in marks:
        nodes = [node for node in proto.graph.node if node.output[0].startswith(f"{mark.name}.")]
        made = [name for node in nodes for name in node.output]
        read = [name for node in nodes for name in node.input]
        (source,) = {name for name in read if name} - constants - set(made)
        (result,) = set(made) - set(read)
        places[mark.name] = source, result
    for name in sorted({name for pair in places.values() for name in pair}):
        proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return proto, places


def run(proto: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """All outputs, by ONNX Runtime as onnxruntime-genai is told to run the file, with an empty cache."""
    import onnxruntime

    from quark.torch.export.genai import EXACT

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for name, value in EXACT.items():
        options.add_session_config_entry(name, value)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.ones(ids.shape, np.int64)}
    for one in session.get_inputs()[2:]:
        feeds[one.name] = np.zeros((len(ids), one.shape[1], 0, one.shape[3]), np.float32)
    names = [one.name for one in session.get_outputs()]
    return {name: torch.from_numpy(value) for name, value in zip(names, session.run(None, feeds), strict=True)}


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative distance."""
    return float((found - wanted).double().norm() / wanted.double().norm().clamp(min=1e-30))
