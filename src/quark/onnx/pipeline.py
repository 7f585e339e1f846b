"""The ordered list of what happens to a float model before anything is quantized. The order is meaning."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from quark.config.job import Job, with_scale_rule
from quark.errors import ModelError
from quark.onnx.graph.lift import lift
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import unknown_operator
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes import (
    constants,
    float16_to_float32,
    fold_batch_norm,
    input_initializers,
    reduce_mean_to_pool,
    simplify,
    unshare,
)
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


@dataclass(frozen=True)
class Prepared:
    """A model ready for placement, the job as it applies to this model, and what the passes did."""

    model: ir.Model
    job: Job
    reports: list[PassReport]


def prepare(model: ir.Model, job: Job) -> Prepared:
    """Lift an old model, then fold and tidy it, so that placement finds weights in initializers and types everywhere.

    Raises:
        ModelError: the model is already quantized, holds an operator that nothing defines, is float16 where the
            options want float32, or cannot be lifted.
    """
    refuse_quantized(model)
    if not job.options.UserCustomOpLibPath:
        unknown = unknown_operator(model, None)
        if unknown is not None:
            raise unknown
    model = lift(model, max([opset_of(job), *(_VALID_FROM.get(node.op_type, 0) for node in model.graph)]))
    reports = [input_initializers.run(model)]
    constants.lift_constant_nodes(model.graph)
    if job.options.ConvertFP16ToFP32:
        reports.append(float16_to_float32.run(model))
    job = _for_float16(job, is_float16(model))
    if not job.options.SkipPreprocess:
        reports += _optimize(model, job)
    infer_shapes(model)
    return Prepared(model, job, reports)


def _optimize(model: ir.Model, job: Job) -> list[PassReport]:
    reports, options = [], job.options
    if options.OptimizeModel:
        reports.append(constants.run(model))
    if options.OptimizeModel if options.FoldBatchNorm is None else options.FoldBatchNorm:
        reports.append(fold_batch_norm.run(model))
    if options.SimplifyModel:
        reports.append(simplify.run(model, options.SimplifyModelOptions, always=bool(options.SimplifyModelOptions)))
    pools = options.ConvertReduceMeanToGlobalAvgPool
    if (job.npu or job.target == "cpu") if pools is None else pools:
        infer_shapes(model)
        reports.append(reduce_mean_to_pool.run(model))
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


def is_float16(model: ir.Model) -> bool:
    """Whether a model computes in float16: it has float16 tensors among inputs and weights, and no float32 weights."""
    types = {value.dtype for value in (*model.graph.inputs, *model.graph.initializers.values())}
    weights = {value.dtype for value in model.graph.initializers.values() if len(value.shape or ()) > 1}
    return ir.DataType.FLOAT16 in types and ir.DataType.FLOAT not in weights


def _for_float16(job: Job, float16: bool) -> Job:
    """The options that depend on the model's own type, settled."""
    options = job.options
    if options.QuantizeFP16 is False and float16:
        raise ModelError("the model is a float16 model: set QuantizeFP16 to quantize it as it is, or ConvertFP16ToFP32")
    if options.QuantizeFP16 and not float16:
        raise ModelError("QuantizeFP16 is set, but the model is no float16 model")
    if options.UseFP32Scale and not float16:
        raise ModelError("UseFP32Scale is for float16 models, and this model is none")
    wide = float16 and options.UseFP32Scale is not False
    if float16 and not wide:
        job = with_scale_rule(job, "float16")
        options = options.model_copy(update={"QuantizeBias": False})
    options = options.model_copy(update={"QuantizeFP16": float16, "UseFP32Scale": wide})
    return replace(job, options=options)
