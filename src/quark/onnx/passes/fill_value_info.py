"""State the type and shape of every tensor (FillAllValueInfo).

Shape inference first; what it leaves open is read off one run of the model on random data with every such tensor as an
output. Sizes that the model leaves open at its inputs stay open there, and become 1 in nothing: a shape that was read
off a run is stated only where all inputs have fixed shapes.

Not handled: tensors of subgraphs that inference does not reach.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from quark.errors import QuarkError
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import Runner
from quark.onnx.graph.shapes import infer_shapes


def run(model: ir.Model) -> PassReport:
    """Fill in ``model`` in place; ``fired`` counts the values that learnt something."""
    fired = infer_shapes(model)
    missing = [value for node in model.graph for value in node.outputs if value.name and not _complete(value)]
    if not missing:
        return PassReport("fill_value_info", fired)
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    if not all(value.shape is not None and value.shape.is_static() for value in inputs):
        open_ = next(value.name for value in inputs if value.shape is None or not value.shape.is_static())
        return PassReport(
            "fill_value_info", fired, (f"{len(missing)} tensors: the input {open_!r} has no fixed shape",)
        )
    try:
        found = Runner(model, [str(value.name) for value in missing]).run(_feeds(inputs)).values
    except QuarkError as error:
        return PassReport("fill_value_info", fired, (f"{len(missing)} tensors: the model does not run: {error}",))
    for value in missing:
        fired += _state(value, found[str(value.name)])
    return PassReport("fill_value_info", fired + infer_shapes(model))  # bodies learn from what they read


def _complete(value: ir.Value) -> bool:
    return value.type is not None and value.shape is not None and value.shape.is_static()


def _state(value: ir.Value, array: object) -> int:
    if not isinstance(array, np.ndarray):  # a sequence
        return 0
    value.shape = ir.Shape(array.shape)
    if value.type is None:
        value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    return 1


def _feeds(inputs: list[ir.Value]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds = {}
    for value in inputs:
        shape, dtype = [int(size) for size in value.shape or () if isinstance(size, int)], value.dtype
        kind = (dtype or ir.DataType.FLOAT).numpy()
        sample = rng.standard_normal(shape) if np.dtype(kind).kind in "fV" else rng.integers(0, 2, shape)
        feeds[str(value.name)] = np.asarray(sample).astype(kind)
    return feeds
