"""The table of the graph passes that come with the package. A new row is tested, documented and offered everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.passes import (
    batch_norm_to_conv,
    clip6_to_relu,
    clip_to_relu,
    constants,
    fill_value_info,
    fix_shapes,
    float16_to_float32,
    fold_batch_norm,
    fold_batch_norm_after_concat,
    fold_div_into_matmul,
    fold_relu,
    fuse_gelu,
    fuse_instance_norm,
    fuse_l2_norm,
    fuse_layer_norm,
    input_initializers,
    nchw_to_nhwc,
    node_attributes,
    opset_version,
    reduce_mean_to_pool,
    simplify,
    split_large_pool,
    split_to_slice,
    unshare,
)
from quark.onnx.passes.row import Pass

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
    Pass("convert_opset_version", "Lift the model to a newer opset.", opset_version.run),
    Pass(
        "convert_fp16_to_fp32",
        "A float16 model becomes a float32 one.",
        float16_to_float32.run,
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
        "fold_batch_norm",
        "BatchNormalization goes into the Conv, ConvTranspose or Gemm before it.",
        fold_batch_norm.run,
    ),
    Pass(
        "fold_batch_norm_after_concat",
        "BatchNormalization after a Concat goes into every branch.",
        fold_batch_norm_after_concat.run,
        shapes=True,
    ),
    Pass("simplify", "Run onnxslim where a cheap look at the graph says it can gain something.", _simplify),
    Pass(
        "fuse_instance_norm",
        "Written-out instance normalization becomes InstanceNormalization.",
        fuse_instance_norm.run,
        shapes=True,
    ),
    Pass("fuse_l2_norm", "A vector divided by its length becomes LpNormalization.", fuse_l2_norm.run),
    Pass(
        "fuse_layer_norm",
        "Written-out layer normalization becomes LayerNormalization (opset 17).",
        fuse_layer_norm.run,
        shapes=True,
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
        "convert_reduce_mean_to_global_avg_pool",
        "A mean over the spatial axes becomes GlobalAveragePool.",
        reduce_mean_to_pool.run,
        shapes=True,
    ),
    Pass(
        "split_large_kernel_pool",
        "A global average over more than 512 pixels becomes two averages.",
        split_large_pool.run,
        shapes=True,
    ),
    Pass("convert_split_to_slice", "A Split becomes one Slice per output.", split_to_slice.run, shapes=True),
    Pass(
        "convert_bn_to_conv",
        "A BatchNormalization that stands alone becomes a depthwise 1x1 convolution.",
        batch_norm_to_conv.run,
        shapes=True,
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
    Pass("fill_value_info", "State the type and shape of every tensor.", fill_value_info.run),
)
