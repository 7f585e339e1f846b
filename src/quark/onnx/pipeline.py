"""The ordered list of what happens to a float model before anything is quantized. The order is meaning."""

from __future__ import annotations

import onnx_ir as ir

from quark.config.job import Job
from quark.config.options import Options
from quark.errors import ModelError
from quark.onnx.graph.lift import lift
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes import constants, fold_batch_norm, input_initializers, simplify, unshare
from quark.onnx.qdq.carriers import opset_of

_QUANTIZED_OPS = frozenset(
    [
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "QLinearConv",
        "QLinearMatMul",
        "ConvInteger",
        "MatMulInteger",
        "ExtendedQuantizeLinear",
        "ExtendedDequantizeLinear",
        "BFPQuantizeDequantize",
        "MXQuantizeDequantize",
        "MatMulNBits",
    ]
)

#: Operators that an earlier opset had in a form that it called deprecated at once, which ``onnx.checker`` refuses.
_VALID_FROM = {"GroupNormalization": 21}


def prepare(model: ir.Model, job: Job) -> tuple[ir.Model, list[PassReport]]:
    """Lift an old model, then fold and tidy it, so that placement finds weights in initializers and types everywhere.

    Raises:
        ModelError: the model is already quantized, is float16, or cannot be lifted.
    """
    refuse_quantized(model)
    model = lift(model, max([opset_of(job), *(_VALID_FROM.get(node.op_type, 0) for node in model.graph)]))
    reports = [input_initializers.run(model)]
    if not job.options.SkipPreprocess:
        reports += _optimize(model, job.options)
    infer_shapes(model)
    _refuse_float16(model)
    return model, reports


def _optimize(model: ir.Model, options: Options) -> list[PassReport]:
    reports = []
    if options.OptimizeModel:
        reports.append(constants.run(model))
    if options.OptimizeModel if options.FoldBatchNorm is None else options.FoldBatchNorm:
        reports.append(fold_batch_norm.run(model))
    if options.SimplifyModel:
        reports.append(simplify.run(model, options.SimplifyModelOptions))
    if options.CopySharedInit is not None:
        reports.append(unshare.run(model, options.CopySharedInit))
    if options.CopyBiasInit is not None:
        reports.append(unshare.run(model, options.CopyBiasInit, positions=(2,)))
    return reports


def refuse_quantized(model: ir.Model) -> None:
    """Raise ``ModelError`` for a model that already holds quantized operators."""
    found = [node for node in model.graph if node.op_type in _QUANTIZED_OPS]
    if found:
        first = found[0]
        raise ModelError(
            f"the model is already quantized: it holds {len(found)} quantization nodes, the first is {first.op_type} "
            f"{first.name!r}. Give the float model it was made from"
        )


def _refuse_float16(model: ir.Model) -> None:
    weights = [value.dtype for value in model.graph.initializers.values()]
    halves = sum(dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) for dtype in weights)
    if halves and ir.DataType.FLOAT not in [
        value.dtype for value in model.graph.initializers.values() if len(value.shape or ()) > 1
    ]:
        raise ModelError(
            f"the model is a float16 model ({halves} of its {len(weights)} constants are half precision); convert it "
            "to float32 before quantizing it"
        )
