"""The ordered lists of what happens to a model before anything is quantized, and after. The order is meaning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from quark.config.job import Job, with_scale_rule
from quark.dataclass import dataclass
from quark.errors import ConfigError, ModelError
from quark.ir.walk import all_nodes, nodes_within
from quark.numerics.granularity import Tensor
from quark.onnx.graph.admission import admit
from quark.onnx.graph.budget import check_sizes
from quark.onnx.graph.functions import inline_functions
from quark.onnx.graph.halves import refuse_bfloat16, tool_command
from quark.onnx.graph.lift import lift
from quark.onnx.graph.lower import lower
from quark.onnx.graph.model import save
from quark.onnx.graph.pieces import WHOLE
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.run import unknown_operator
from quark.onnx.graph.shapes import are_stated, infer_shapes, leave_unsaid, names_stated, prove_shapes
from quark.onnx.passes import constants, quant_to_float
from quark.onnx.passes.nchw_to_nhwc import images, moved
from quark.onnx.passes.registry import apply, get_pass
from quark.onnx.qdq.node_kinds import opset_of
from quark.onnx.shapeshifter import ShapeShifterConfig, Steps, read, run_passes

_log = logging.getLogger(__name__)
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

#: Domains of operators in layouts that ONNX Runtime chooses for a processor when it loads a model.
_LAYOUTS = ("com.microsoft.nchwc", "com.ms.internal.nhwc")
#: Operators that an earlier opset had in a form that it called deprecated at once, which ``onnx.checker`` refuses.
_VALID_FROM = {"GroupNormalization": 21}


@dataclass(frozen=True)
class Step:
    """One line of a list of passes.

    Attributes:
        option: the option that switches the pass on; ``False`` (or ``None`` without a default) switches it off.
        name: the pass.
        given: what the pass gets.
        default: whether the pass runs where the option is ``None``.
        allowed: whether the pass may run at all.
    """

    option: str
    name: str
    given: Callable[[Job], dict[str, Any]] = lambda job: {}
    default: Callable[[Job], bool] = lambda job: False
    allowed: Callable[[Job], bool] = lambda job: True

    def wanted(self, job: Job) -> bool:
        """Whether the pass runs in this job."""
        value = getattr(job.options, self.option)
        if not self.allowed(job):
            return False
        return self.default(job) if value is None else value is not False


def _device(job: Job) -> bool:
    """Forms that NPU compilers know: for power-of-two scales, and for flows and types that only such devices run."""
    layer, casts = job.rules.default, job.options.BF16QDQToCast or job.options.EnableVaimlBF16
    narrow = all(spec is None or spec.row.onnx_type in ("INT8", "UINT8") for spec in (layer.inputs, layer.weight))
    return job.npu or job.options.EnableNPUTransformer or (job.target == "any" and not narrow and not casts)


def on_cpu(job: Job) -> bool:
    """Whether the model is made for ONNX Runtime's kernels on CPUs, in integers that are fixed beforehand."""
    return job.target == "cpu" and job.mode == "static"


def _asks_for_half(job: Job) -> bool:
    """Whether the user has said what float16 is to look like, which only a float16 model can."""
    options = job.options
    return options.QuantizeFP16 is True or "UseFP32Scale" in options.given


def _coarse(job: Job) -> bool:
    """Whether weights have one 8-bit scale (or a narrower one) for all channels, and the device leaves a choice."""
    weight = job.rules.default.weight
    narrow = weight is not None and weight.row.onnx_type in ("INT8", "UINT8", "INT4", "UINT4")
    return not job.npu and narrow and weight is not None and weight.granularity == Tensor()


def _integers(job: Job) -> bool:
    """Whether activations and weights are 8- or 16-bit integers, which biases have scales of their own beside."""
    layer, kinds = job.rules.default, ("INT8", "UINT8", "INT16", "UINT16")
    return all(spec is not None and spec.row.onnx_type in kinds for spec in (layer.inputs, layer.weight))


def _asked(option: str, job: Job) -> bool:
    """Whether the user has written a fusion down, and no opset that is too old for it."""
    return option in job.options.given and job.options.ConvertOpsetVersion is None


#: What a model needs before anything looks at it; runs under SkipPreprocess too.
FIRST = (
    Step("RemoveInputInit", "remove_input_init"),
    Step("ExpandFused", "expand_fused"),
    Step("ExpandFused", "einsum_to_matmul"),
    Step("ConvertFP16ToFP32", "convert_fp16_to_fp32"),
    Step(
        "FasterForms",
        "convert_fp16_to_fp32",
        lambda job: {"keep_interface": True},
        on_cpu,
        lambda job: not _asks_for_half(job),
    ),
)
#: Tidying and rewriting: types and shapes, folding, fusing, forms that the target has kernels for.
PREPARE = (
    Step("ConvertNCHWToNHWC", "convert_nchw_to_nhwc"),
    Step("FixShapes", "fix_shapes", lambda job: {"input_output_name_shapes": job.options.FixShapes}),
    Step("OptimizeModel", "optimize_with_ort"),
    Step("FasterForms", "later_transposes", default=on_cpu),
    Step(
        "FoldBatchNorm",
        "norm_before_concat",
        default=lambda job: job.options.OptimizeModel,
        allowed=lambda job: job.runs_samples,
    ),
    Step(
        "FoldBatchNorm",
        "fold_batch_norm",
        lambda job: {
            "keep_resolution": job.options.FoldBatchNorm is None and _coarse(job),
            "written_out": on_cpu(job) and not _coarse(job),
        },
        lambda job: job.options.OptimizeModel,
    ),
    Step("FoldBatchNorm", "fold_batch_norm_after_concat", default=lambda job: job.options.OptimizeModel),
    Step("SimplifyModel", "simplify", lambda job: {"simplify_Options": job.options.SimplifyModelOptions}),
    Step("FuseInstanceNorm", "fuse_instance_norm"),
    Step("FuseL2Norm", "fuse_l2_norm"),
    Step("FuseLayerNorm", "fuse_layer_norm", lambda job: {"lift": _asked("FuseLayerNorm", job)}),
    Step("FuseGelu", "fuse_gelu", lambda job: {"lift": _asked("FuseGelu", job)}),
    Step(
        "ConvertReduceMeanToGlobalAvgPool",
        "convert_reduce_mean_to_global_avg_pool",
        lambda job: {"keep_norms": on_cpu(job)},
        default=lambda job: _device(job) or on_cpu(job),
    ),
    Step("SplitLargeKernelPool", "split_large_kernel_pool", default=_device),
    Step("FasterForms", "fuse_lstm_cell", default=on_cpu),
    Step("FasterForms", "direct_convs", default=on_cpu),
    Step("FasterForms", "fewer_moves", default=on_cpu),
    Step("FasterForms", "faster_forms", default=on_cpu),
    Step("ConvertSplitToSlice", "convert_split_to_slice", default=_device),
    Step(
        "ConvertBNToConv",
        "convert_bn_to_conv",
        lambda job: {"keep_resolution": job.options.ConvertBNToConv is None and _coarse(job)},
        default=_device,
    ),
    Step("CopySharedInit", "copy_shared_init", lambda job: {"shared_init_op_types": job.options.CopySharedInit}),
    Step(
        "CopyBiasInit",
        "copy_bias_init",
        lambda job: {"shared_bias_op_types": job.options.CopyBiasInit},
        allowed=lambda job: _integers(job),
    ),
)
#: The part of it that bodies of If and Loop get.
BODY = tuple(
    step
    for step in PREPARE
    if step.name.startswith(("optimize", "later", "norm", "fold", "fuse", "convert_split", "convert_bn", "copy"))
)
#: What happens to the quantized model before it is written.
FINISH = (
    Step("ConvertClipToRelu", "convert_clip_to_relu", lambda job: {"loose": True}),
    Step("FoldRelu", "fold_relu"),
    Step("FasterForms", "fold_relu", lambda job: {"below": True}, on_cpu),
    Step("FasterForms", "faster_floats", default=on_cpu),
    Step("FasterForms", "body_constants", default=on_cpu),
    Step("FasterForms", "share_constants", default=on_cpu),
)
#: What is said of the tensors of the finished graph.
STATE = (Step("FillAllValueInfo", "fill_value_info"),)


def run_steps(model: ir.Model, steps: Sequence[Step], job: Job, stale: bool = True) -> list[PassReport]:
    """Run the steps that the job wants, in order, in place. Shapes are inferred again only after something changed.

    Args:
        stale: whether something has changed since shapes were inferred.
    """
    reports: list[PassReport] = []
    present = _operators(model)
    for step in steps:
        row = get_pass(step.name)
        if not step.wanted(job) or (row.when and not present.intersection(row.when)):
            continue
        if row.shapes and stale:
            infer_shapes(model)
        reports.append(apply(model, row, row.arguments(step.given(job)) or {}))
        stale = (stale and not row.shapes) or reports[-1].fired > 0
        present = _operators(model) if reports[-1].fired else present
    return reports


def _operators(model: ir.Model) -> set[str]:
    return {node.op_type for node in nodes_within(model.graph)}


@dataclass(frozen=True)
class Prepared:
    """A model ready for placement.

    Attributes:
        job: the job as it applies to this model.
        reports: what the passes did.
        moved: inputs, and outputs, whose channels are last now.
        after: the passes of ``PreprocessYAML`` for the quantized model.
        stated: the tensors whose types the model stated before, where the written one says no more; else ``None``.
    """

    model: ir.Model
    job: Job
    reports: list[PassReport]
    moved: frozenset[str] = frozenset()
    after: Steps = ()
    stated: frozenset[str] | None = None


def prepare(model: ir.Model, job: Job, write: bool = True, of: object = None) -> Prepared:
    """Lift an old model, then fold and tidy it, so that placement finds weights in initializers and types everywhere.

    Args:
        write: whether the file is written that ``PreprocessYAML`` may name for the model after its passes.
        of: where the model came from, for what a refusal advises.

    Raises:
        ModelError: the model is already quantized, laid out for one processor, computes in bfloat16, holds an operator
            that nothing defines where samples are to run, is float16 where the options want float32, or cannot be
            lifted.
    """
    refuse_quantized(model, of)
    refuse_layouts(model)
    if not job.options.ConvertFP16ToFP32:
        refuse_bfloat16(model, of, job.options.ExecutionProviders)
    stated = names_stated(model) if job.target == "cpu" else None  # other compilers may need what is not stated
    given = images(model)
    recipe = None if job.options.PreprocessYAML is None else read(job.options.PreprocessYAML)
    reports = [] if recipe is None else _preprocess(model, recipe, job.options.CryptoMode, write)
    custom = bool(job.options.UserCustomOpLibPath) or not job.runs_samples
    unknown = None if custom else unknown_operator(model, None)
    if unknown is not None:
        raise unknown
    reports = [*admit(model, custom), *reports]
    model = _in_opset(model, job)
    inline_functions(model)
    prove_shapes(model)
    check_sizes(model)
    done = run_steps(model, FIRST, job, stale=False)
    lifted = constants.lift_constant_nodes(model.graph)
    job = _for_one_scale(_for_float16(job, is_float16(model)))
    if recipe is None and not job.options.SkipPreprocess:
        done += run_steps(model, PREPARE, job, stale=bool(lifted) or any(report.fired for report in done))
    if lifted or any(report.fired for report in done):  # else it is the graph whose shapes were proved
        prove_shapes(model)
        check_sizes(model)
    reports += done
    turned = moved(given, images(model))
    return Prepared(model, job, reports, turned, () if recipe is None else recipe.after, stated)


def _in_opset(model: ir.Model, job: Job) -> ir.Model:
    """The model in the opset that the job needs, or in ``ConvertOpsetVersion`` where that is not too old.

    Raises:
        ModelError: it cannot be brought there.
    """
    wanted, valid = job.options.ConvertOpsetVersion, [_VALID_FROM.get(node.op_type, 0) for node in model.graph]
    needed = max([opset_of(job), *valid])
    if wanted is not None:
        lower(model, needed)
        if needed > wanted:
            _log.warning("ConvertOpsetVersion=%d: the quantized model needs opset %d", wanted, needed)
    return lift(model, needed)


def _preprocess(model: ir.Model, recipe: ShapeShifterConfig, secret: bool, write: bool) -> list[PassReport]:
    """The passes of ``PreprocessYAML``; the model they make is written where the file says so.

    Raises:
        ConfigError: the file says so under ``CryptoMode``.
    """
    if secret and recipe.preprocessed is not None:
        raise ConfigError("CryptoMode: nothing of the model may reach the disk; leave out preprocessed_model_path")
    reports = run_passes(model, recipe.before)
    if recipe.preprocessed is not None and write:
        save(model, recipe.preprocessed)
    return reports


def finish(model: ir.Model, prepared: Prepared) -> list[PassReport]:
    """What happens to the quantized model before it is written, in place; no shape is left that nothing proves."""
    reports = [*run_steps(model, FINISH, prepared.job, stale=not are_stated(model)), *run_passes(model, prepared.after)]
    prove_shapes(model, add=False)
    return reports


def state(model: ir.Model, prepared: Prepared) -> list[PassReport]:
    """What the finished model says of its tensors, in place."""
    job = prepared.job
    small = len(model.graph) <= WHOLE  # a larger graph runs in pieces, which are cut where types are stated
    if small and not job.options.FillAllValueInfo:
        leave_unsaid(model, prepared.stated)
    return run_steps(model, STATE, job)


def refuse_quantized(model: ir.Model, of: object) -> None:
    """Raise ``ModelError`` for a model that already holds quantized operators, in bodies or functions too."""
    found = [node for node in all_nodes(model) if node.op_type in _QUANTIZED_OPS]
    if found:
        first = found[0]
        back = quant_to_float.undoes(model, {node.op_type for node in found})
        raise ModelError(
            f"the model is already quantized: it holds {len(found)} quantization nodes, the first is {first.op_type} "
            f"{first.name!r}. Give the float model it was made from"
            + (f", or make one of it: {tool_command('convert_quant_to_float', of)}" if back else "")
        )


def refuse_layouts(model: ir.Model) -> None:
    """Raise ``ModelError`` for a model that ONNX Runtime has laid out for the kernels of one processor."""
    found = next((node for node in nodes_within(model.graph) if node.domain in _LAYOUTS), None)
    if found is not None:
        raise ModelError(
            f"ONNX Runtime has laid the model out for one processor: {found.name!r} is "
            f"{found.domain}::{found.op_type}, which has no quantized form. Give the model from before, or let ONNX "
            "Runtime save it again with graph_optimization_level = ORT_ENABLE_EXTENDED"
        )


def is_float16(model: ir.Model) -> bool:
    """Whether a model computes in float16: it has float16 tensors among inputs and weights, and no float32 weights."""
    types = {value.dtype for value in (*model.graph.inputs, *model.graph.initializers.values())}
    weights = {value.dtype for value in model.graph.initializers.values() if len(value.shape or ()) > 1}
    return ir.DataType.FLOAT16 in types and ir.DataType.FLOAT not in weights


def _for_one_scale(job: Job) -> Job:
    """Dynamic quantization with one scale per weight: normalizations stay beside the weights instead of inside.

    Folded in, they spread the channels further than 8 bits with one scale can hold (measured: 8 dB on UltraFace).
    """
    weight = job.rules.default.weight
    if job.mode != "dynamic" or weight is None or not isinstance(weight.granularity, Tensor):
        return job
    left = {name: False for name in ("FoldBatchNorm", "SimplifyModel") if name not in job.options.given}
    return replace(job, options=job.options.changed(left))


def _for_float16(job: Job, float16: bool) -> Job:
    """The options that depend on the model's own type, settled."""
    options = job.options
    if options.QuantizeFP16 is False and float16:
        _log.warning("the model is a float16 model, so QuantizeFP16 is on (ConvertFP16ToFP32 would make it float32)")
    if float16 and job.target == "cpu":
        _log.warning(
            "the CPU provider computes float16 in float32, with a Cast on each side of every quantized tensor, which "
            "may cost more time than the integers save: FasterForms=True computes in float32 inside"
        )
    if options.QuantizeFP16 and not float16:
        raise ModelError("QuantizeFP16 is set, but the model is not a float16 model")
    if options.UseFP32Scale and not float16:
        raise ModelError("UseFP32Scale is for float16 models, and this model is none")
    wide = float16 and options.UseFP32Scale is not False
    if float16 and not wide:
        job = with_scale_rule(job, "float16")
        options = options.changed({"QuantizeBias": False})
    options = options.changed({"QuantizeFP16": float16, "UseFP32Scale": wide})
    return replace(job, options=options)
