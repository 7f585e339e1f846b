"""The table of the graph passes that come with the package. A new row is tested, documented and offered everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import onnx_ir as ir

from quark.deferred import Late
from quark.onnx.graph.report import PassReport
from quark.onnx.passes import expand_fused
from quark.onnx.passes.row import Pass

if TYPE_CHECKING:
    from quark.onnx.passes import (
        align_scale,
        batch_norm_to_conv,
        bfloat16_nodes,
        bias_scale,
        bias_to_int16,
        channel_scales,
        clip6_to_relu,
        clip_to_relu,
        code_types,
        constants,
        cross_layer_equalization,
        custom_domains,
        direct_convs,
        einsum_to_matmul,
        faster_floats,
        faster_forms,
        fewer_moves,
        fill_value_info,
        fix_shapes,
        float16_to_float32,
        float32_to_half,
        fold_batch_norm,
        fold_batch_norm_after_concat,
        fold_div_into_matmul,
        fold_relu,
        fuse_gelu,
        fuse_instance_norm,
        fuse_l2_norm,
        fuse_layer_norm,
        fuse_lstm_cell,
        input_initializers,
        later_transposes,
        loop_constants,
        lstm_to_custom,
        nchw_to_nhwc,
        node_attributes,
        norm_before_concat,
        opset_version,
        qdq_to_qop,
        quant_to_float,
        reduce_mean_to_pool,
        remove_qdq,
        replace_inf,
        resize_to_power_of_two,
        share_constants,
        simplify,
        split_large_pool,
        split_to_slice,
        unshare,
        xint8_adjust,
        xint8_simulate,
    )
else:  # a run uses a few of them, and each is loaded when it is called
    _MODULES = """
    align_scale batch_norm_to_conv bfloat16_nodes bias_scale bias_to_int16 channel_scales clip6_to_relu
    clip_to_relu code_types constants cross_layer_equalization custom_domains direct_convs
    einsum_to_matmul faster_floats faster_forms fewer_moves fill_value_info fix_shapes
    float16_to_float32 float32_to_half fold_batch_norm fold_batch_norm_after_concat fold_div_into_matmul
    fold_relu fuse_gelu fuse_instance_norm fuse_l2_norm fuse_layer_norm fuse_lstm_cell
    input_initializers later_transposes loop_constants lstm_to_custom nchw_to_nhwc node_attributes
    norm_before_concat opset_version qdq_to_qop quant_to_float reduce_mean_to_pool remove_qdq
    replace_inf resize_to_power_of_two share_constants simplify split_large_pool split_to_slice unshare
    xint8_adjust xint8_simulate
    """
    globals().update({name: Late(f"quark.onnx.passes.{name}") for name in _MODULES.split()})

BIASED = ("Conv", "ConvTranspose", "Gemm")


def _copy_shared_init(
    model: ir.Model,
    shared_init_op_types: Annotated[Sequence[str], "Operators whose nodes get copies; [] for all."] = (),
) -> PassReport:
    return unshare.run(model, shared_init_op_types)


def _copy_bias_init(
    model: ir.Model,
    shared_bias_op_types: Annotated[Sequence[str], "Operators whose biases (third input) are copied."] = BIASED,
) -> PassReport:
    return unshare.run(model, shared_bias_op_types, positions=(2,))


def _simplify(
    model: ir.Model,
    simplify_Options: Annotated[dict[str, Any] | None, "Keyword arguments of onnxslim; given ones make it run."] = None,
) -> PassReport:
    return simplify.run(model, simplify_Options, always=bool(simplify_Options))


#: In the order of the flow.
TABLE: tuple[Pass, ...] = (
    Pass(
        "remove_input_init",
        "Initializers stop being graph inputs, so that weights are constants.",
        input_initializers.run,
    ),
    Pass(
        "convert_opset_version",
        "Bring the model to another opset; to an older one where its operators have the same form there.",
        opset_version.run,
    ),
    Pass(
        "expand_fused",
        "Operators that ONNX Runtime fuses layers into (FusedConv, Attention) become the layers again.",
        expand_fused.run,
        shapes=True,
        when=tuple(expand_fused.ROWS),
    ),
    Pass(
        "einsum_to_matmul",
        "An Einsum of two tensors becomes the MatMul that it is.",
        einsum_to_matmul.run,
        shapes=True,
        when=("Einsum",),
    ),
    Pass(
        "convert_fp16_to_fp32",
        "A float16 or bfloat16 model becomes a float32 one.",
        float16_to_float32.run,
        shapes=True,
        changes="every tensor is float32, inputs and outputs too; results in between are no longer rounded",
    ),
    Pass(
        "convert_nchw_to_nhwc",
        "Images come and go as [N, H, W, C].",
        nchw_to_nhwc.run,
        changes="the layout of the inputs and outputs of rank 4",
    ),
    Pass("fix_shapes", "Give inputs and outputs fixed shapes; every other shape follows.", fix_shapes.run),
    Pass("optimize_with_ort", "Fold constants, remove identities and what no output depends on.", constants.run),
    Pass(
        "norm_before_concat",
        "A normalization behind a Concat of parts with unlike ranges goes to every part.",
        norm_before_concat.run,
        shapes=True,
        when=("Concat",),
    ),
    Pass(
        "fold_batch_norm",
        "BatchNormalization goes into the Conv, ConvTranspose or Gemm before it.",
        fold_batch_norm.run,
    ),
    Pass(
        "fold_batch_norm_after_concat",
        "BatchNormalization after a Concat goes into every branch.",
        fold_batch_norm_after_concat.run,
        shapes=True,
        when=("BatchNormalization",),
    ),
    Pass("simplify", "Run onnxslim where a cheap look at the graph says it can gain something.", _simplify),
    Pass(
        "fuse_instance_norm",
        "Written-out instance normalization becomes InstanceNormalization.",
        fuse_instance_norm.run,
        shapes=True,
        when=("Sqrt",),
    ),
    Pass("fuse_l2_norm", "A vector divided by its length becomes LpNormalization.", fuse_l2_norm.run),
    Pass(
        "fuse_layer_norm",
        "Written-out layer normalization becomes LayerNormalization (opset 17).",
        fuse_layer_norm.run,
        shapes=True,
        when=("ReduceMean",),
    ),
    Pass("fuse_gelu", "Written-out GELU, exact or by tanh, becomes Gelu (opset 20).", fuse_gelu.run),
    Pass("fold_div_into_matmul", "A division by a constant goes into the weights before it.", fold_div_into_matmul.run),
    Pass(
        "replace_clip6_relu",
        "Every Clip(0, 6) becomes a Relu, through which equalization can move scales.",
        clip6_to_relu.run,
        changes="values above 6 are no longer cut",
    ),
    Pass(
        "cross_layer_equalization",
        "Channels of neighbouring convolutions and Gemm layers are scaled so that one scale per weight suits them.",
        cross_layer_equalization.run,
        shapes=True,
        when=("Conv", "ConvTranspose", "Gemm"),
    ),
    Pass(
        "convert_reduce_mean_to_global_avg_pool",
        "A mean over the spatial axes becomes GlobalAveragePool.",
        reduce_mean_to_pool.run,
        shapes=True,
        when=("ReduceMean",),
    ),
    Pass(
        "split_large_kernel_pool",
        "A global average over more than 512 pixels becomes two averages.",
        split_large_pool.run,
        shapes=True,
        when=("GlobalAveragePool",),
    ),
    Pass(
        "fuse_lstm_cell",
        "A step of an LSTM that is written out becomes LSTM.",
        fuse_lstm_cell.run,
        shapes=True,
        when=("Tanh",),
    ),
    Pass(
        "direct_convs",
        "Transposed convolutions of stride 1, and 1x1 convolutions of unfolded images, become plain convolutions.",
        direct_convs.run,
        shapes=True,
        when=("Conv", "ConvTranspose"),
    ),
    Pass(
        "fewer_moves",
        "Writing a block becomes a Concat; what only renames axes becomes one Reshape or nothing; Slices that are all "
        "of an axis become a Split.",
        fewer_moves.run,
        shapes=True,
        when=("ScatterND", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Slice"),
    ),
    Pass(
        "later_transposes",
        "Transposes between channels first and last go behind what computes alike in both orders, until they meet.",
        later_transposes.run,
        when=("Transpose",),
    ),
    Pass(
        "faster_forms",
        "Forms that kernels run faster: focus, averages as convolutions, Softmax over channels, one slope, shuffles.",
        faster_forms.run,
        shapes=True,
        when=("Conv", "AveragePool", "Softmax", "LogSoftmax", "PRelu", "Transpose"),
    ),
    Pass(
        "faster_floats",
        "What stays float takes forms that kernels run faster: activation functions, normalizations of sums.",
        faster_floats.run,
        shapes=True,
        when=("PRelu", "Elu", "Softplus", "Mish", "Reciprocal", "LayerNormalization", "DequantizeLinear"),
    ),
    Pass(
        "body_constants",
        "Constants that a body of If, Loop or Scan reads alone become its own.",
        loop_constants.make_own,
        when=("If", "Loop", "Scan"),
    ),
    Pass(
        "share_constants",
        "Constants of equal contents, such as the zero points of weights, are stored once.",
        share_constants.run,
    ),
    Pass(
        "convert_split_to_slice",
        "A Split becomes one Slice per output.",
        split_to_slice.run,
        shapes=True,
        when=("Split",),
    ),
    Pass(
        "convert_bn_to_conv",
        "A BatchNormalization that stands alone becomes a depthwise 1x1 convolution.",
        batch_norm_to_conv.run,
        shapes=True,
        when=("BatchNormalization",),
    ),
    Pass(
        "set_node_attributes", "Set attributes of named nodes.", node_attributes.run, changes="what the attributes do"
    ),
    Pass("copy_shared_init", "Give each node its own copy of an initializer that several share.", _copy_shared_init),
    Pass("copy_bias_init", "Give each node its own copy of a bias that several share.", _copy_bias_init),
    Pass(
        "convert_clip_to_relu", "A Clip from 0 becomes a Relu where quantization cuts off the rest.", clip_to_relu.run
    ),
    Pass("fold_relu", "A Relu or Clip disappears where the codes behind it do its work.", fold_relu.run),
    Pass(
        "xint8_simulate",
        "Quantized nodes compute what the fixed-point arithmetic of the NPU computes.",
        xint8_simulate.run,
        shapes=True,
        changes="Sigmoid becomes HardSigmoid; means and slopes by the error of their fixed-point factors",
    ),
    Pass(
        "xint8_adjust",
        "Power-of-two scales of a quantized model move within the limits of the NPU.",
        xint8_adjust.run,
        changes="tensors whose scale moved",
    ),
    Pass(
        "adjust_bias_scale",
        "The scale of a quantized bias becomes input scale x weight scale.",
        bias_scale.run,
        changes="biases whose scale was another",
    ),
    Pass(
        "align_scale",
        "One scale around operators that only move values.",
        align_scale.run,
        changes="the grids of the tensors around them",
    ),
    Pass(
        "constrain_per_channel_weight_scale",
        "The least scale of a weight's channels is raised where it is far below the largest.",
        channel_scales.run,
        changes="channels whose weights are almost 0",
    ),
    Pass(
        "convert_resize_fs_to_pof2s",
        "Codes around a Resize get a power-of-two scale.",
        resize_to_power_of_two.run,
        changes="the grids of the tensors around a Resize",
    ),
    Pass(
        "convert_code_type",
        "Another type for the codes of activations, such as uint8 for int8.",
        code_types.run,
        changes="nothing, but for u16_to_u8: fewer codes",
    ),
    Pass(
        "convert_bias_int32_to_int16",
        "Quantized biases of 32 bits become 16 bits, with a coarser scale where they need it.",
        bias_to_int16.run,
        changes="biases beyond 16 bits are rounded",
    ),
    Pass(
        "remove_qdq",
        "Take the Q/DQ pairs of activations out; stored weights keep their codes.",
        remove_qdq.run,
        changes="activations are no longer rounded",
    ),
    Pass(
        "remove_qdq_between_op_types",
        "Take Q/DQ pairs out between pairs of operators.",
        remove_qdq.between,
        changes="the tensors between them are no longer rounded",
    ),
    Pass(
        "remove_qdq_mul_add",
        "Take Q/DQ pairs out between a Mul and the Add that alone reads it.",
        remove_qdq.mul_add,
        changes="the tensors between them are no longer rounded",
    ),
    Pass(
        "convert_quant_to_float",
        "A quantized model, static or dynamic, becomes a float one with the weights that its codes stand for.",
        quant_to_float.run,
        changes="activations are no longer rounded",
    ),
    Pass(
        "convert_qdq_to_qop",
        "Q/DQ around Conv, MatMul, Add, Mul and Sigmoid becomes the integer operator.",
        qdq_to_qop.run,
        changes="results by one code at most: the integer kernels round once more",
    ),
    Pass(
        "convert_lstm_to_customlstm",
        "A quantized LSTM becomes the operator ExtendedLSTM, which states the grids of its tensors.",
        lstm_to_custom.run,
        when=("LSTM",),
    ),
    Pass(
        "convert_customqdq_to_qdq",
        "Extended Q and DQ of integers become those of com.microsoft.",
        custom_domains.to_contrib,
    ),
    Pass(
        "convert_custom_ops",
        "Operators of com.amd.quark get the names that older tools know, or back.",
        custom_domains.rename,
    ),
    Pass(
        "insert_clip_before_bfloat16_qdq",
        "A Clip to the finite bfloat16 values before every Q of that type.",
        bfloat16_nodes.insert_clip,
    ),
    Pass(
        "replace_bfloat16_qdq_with_cast",
        "Casts instead of extended Q and DQ of bfloat16.",
        bfloat16_nodes.to_cast,
    ),
    Pass(
        "remove_bfloat16_cast",
        "Take out pairs of Casts to bfloat16 and back.",
        bfloat16_nodes.remove_cast,
        changes="tensors are no longer rounded to bfloat16",
    ),
    Pass(
        "convert_fp32_to_half",
        "A float32 model computes in float16 or bfloat16.",
        float32_to_half.run,
        changes="every tensor is rounded to the narrower type",
    ),
    Pass(
        "replace_inf_weights",
        "Infinite weights become large finite ones.",
        replace_inf.run,
        changes="what is infinite",
    ),
    Pass("fill_value_info", "State the type and shape of every tensor.", fill_value_info.run),
)
