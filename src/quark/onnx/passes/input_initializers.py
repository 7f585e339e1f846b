"""Initializers stop being graph inputs (RemoveInputInit).

Files of IR version 3 list every initializer among the graph inputs, which makes each weight a default that a feed may
override: no runtime and no pass may treat it as a constant then. Weights of a model that is to be quantized are
constants. Main graph only: subgraphs have no such inputs.
"""

from __future__ import annotations

import onnx_ir as ir

from quark.onnx.graph.model import suitable_ir_version
from quark.onnx.graph.report import PassReport


def run(model: ir.Model) -> PassReport:
    """Take initializers off the list of graph inputs; their values stay."""
    inputs = model.graph.inputs
    kept = [value for value in inputs if not value.is_initializer()]
    removed = len(inputs) - len(kept)
    if removed:
        inputs[:] = kept
        model.ir_version = suitable_ir_version(model)  # before IR version 4, what is no input is no initializer
    return PassReport("input_initializers", fired=removed)
