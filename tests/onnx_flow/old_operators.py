"""A zoo of models as old exporters wrote them: one row for each form that an operator once had.

``ZOO[name]`` gives the opsets in which the form is valid and a function from an opset to the model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from tests.onnx_flow import models

IMAGE = "float[1, 2, 4, 6] x"
Build = Callable[[int], onnx.ModelProto]
ZOO: dict[str, tuple[range, Build]] = {}


def _row(name: str, opsets: range, signature: str, body: str, **weights: np.ndarray) -> None:
    graph = f"{name} {signature} {{ {body} }}"
    ZOO[name] = opsets, lambda opset: models.model(graph, weights, opset, ir_version=4)


def _unary(name: str, opsets: range, node: str, source: str = IMAGE, out: str = "float[a, b, c, d]", **weights) -> None:
    """``y = node`` on an input ``x``."""
    _row(name, opsets, f"({source}) => ({out} y)", f"y = {node}", **weights)


def _floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


_unary("upsample_nearest", range(7, 9), 'Upsample <mode = "nearest", scales = [1.0, 1.0, 2.0, 3.0]> (x)')
_unary("upsample_linear", range(7, 9), 'Upsample <mode = "linear", scales = [1.0, 1.0, 2.0, 2.0]> (x)')
_unary("upsample_fraction", range(7, 9), 'Upsample <mode = "nearest", scales = [1.0, 1.0, 1.5, 1.7]> (x)')
_unary("upsample_9", range(9, 10), "Upsample (x, s)", s=_floats(1, 1, 2, 2))
_unary("upsample_9_linear", range(9, 10), 'Upsample <mode = "linear"> (x, s)', s=_floats(1, 1, 2, 3))
_row(
    "upsample_9_constant_node",
    range(9, 10),
    f"({IMAGE}) => (float[a, b, c, d] y)",
    "s = Constant <value = float[4] {1.0, 1.0, 2.0, 2.0}> () y = Upsample (x, s)",
)
_row(
    "upsample_9_computed",
    range(9, 10),
    f"({IMAGE}, float[4] s) => (float[a, b, c, d] y)",
    "z = Mul (s, zeros) t = Add (z, twice) y = Upsample (x, t)",
    zeros=_floats(0, 0, 0, 0),
    twice=_floats(1, 1, 2, 2),
)
_unary("resize_10_up", range(10, 11), "Resize (x, s)", s=_floats(1, 1, 2.5, 2))
_unary("resize_10_down", range(10, 11), "Resize (x, s)", s=_floats(1, 1, 0.6, 0.4))
_unary("resize_10_linear_down", range(10, 11), 'Resize <mode = "linear"> (x, s)', s=_floats(1, 1, 0.6, 0.5))
_unary(
    "resize_11_half_pixel",
    range(11, 13),
    'Resize <mode = "linear"> (x, roi, s)',
    roi=_floats(),
    s=_floats(1, 1, 2, 1.5),
)
_unary(
    "resize_11_nearest",
    range(11, 13),
    'Resize <coordinate_transformation_mode = "asymmetric", mode = "nearest", nearest_mode = "floor"> (x, roi, s)',
    roi=_floats(),
    s=_floats(1, 1, 2, 2),
)
_unary("resize_11_sizes", range(11, 13), "Resize (x, roi, s, z)", roi=_floats(), s=_floats(), z=_ints(1, 2, 7, 5))
_unary(
    "resize_11_tf_half_pixel",
    range(11, 13),
    'Resize <coordinate_transformation_mode = "tf_half_pixel_for_nn", nearest_mode = "floor"> (x, roi, s)',
    roi=_floats(),
    s=_floats(1, 1, 2, 2),
)
_unary("clip_both", range(7, 11), "Clip <min = -0.5, max = 0.5> (x)")
_unary("clip_min", range(7, 11), "Clip <min = 0.0> (x)")
_unary("clip_none", range(7, 11), "Clip (x)")
ZOO["clip_float16"] = range(7, 11), models.half_float_clip
_row(
    "clip_of_unknown_type",
    range(7, 11),
    "(float[2, 3] x) => (float[2, 3] y)",
    "h = Neg (x) c = Clip <min = -0.5, max = 0.5> (h) y = Neg (c)",
)
_unary("pad_value", range(7, 11), 'Pad <mode = "constant", pads = [0, 0, 1, 0, 0, 0, 0, 2], value = 1.5> (x)')
_unary("pad_reflect", range(7, 11), 'Pad <mode = "reflect", pads = [0, 0, 1, 1, 0, 0, 1, 1]> (x)')
_unary("slice_axes", range(7, 10), "Slice <axes = [2, 3], starts = [1, -4], ends = [3, 9999]> (x)")
_unary("slice_all", range(7, 10), "Slice <starts = [0, 1], ends = [1, 2]> (x)")
_row(
    "topk",
    range(7, 10),
    f"({IMAGE}) => (float[a, b, c, d] y, int64[a, b, c, d] i)",
    "y, i = TopK <axis = 3, k = 2> (x)",
)
_unary("dropout", range(7, 12), "Dropout <ratio = 0.3> (x)")
_row("dropout_unread_mask", range(7, 12), f"({IMAGE}) => (float[a, b, c, d] y)", "d, m = Dropout (x) y = Neg (d)")
_row(
    "split_sizes",
    range(7, 13),
    f"({IMAGE}) => (float[a, b, c, d] y, float[a, b, c, e] z)",
    "y, z = Split <axis = 3, split = [2, 4]> (x)",
)
_row(
    "split_equal",
    range(7, 18),
    f"({IMAGE}) => (float[a, b, c, d] y, float[a, b, c, e] z)",
    "y, z = Split <axis = 3> (x)",
)
_unary("squeeze", range(7, 13), "Squeeze <axes = [0]> (x)", out="float[b, c, d]")
_unary("squeeze_all", range(7, 13), "Squeeze (x)", out="float[b, c, d]")
_unary("unsqueeze", range(7, 13), "Unsqueeze <axes = [0, 3]> (x)", out="float[e, a, b, f, c, d]")
for _name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"):
    _until = 13 if _name == "Sum" else 18
    _unary(f"reduce_{_name}", range(7, _until), f"Reduce{_name} <axes = [1, 3], keepdims = 0> (x)", out="float[a, c]")
_unary("reduce_everything", range(7, 18), "ReduceMean (x)")
for _name in ("Softmax", "LogSoftmax"):
    _unary(f"{_name}_matrix", range(7, 13), f"{_name} (x)", "float[3, 5] x", "float[a, b]")
    _unary(f"{_name}_flattens", range(7, 13), f"{_name} <axis = 1> (x)")
    _unary(f"{_name}_one_long_axis", range(7, 13), f"{_name} <axis = 1> (x)", "float[2, 5, 1, 1] x")
    _unary(f"{_name}_unknown_sizes", range(7, 13), f"{_name} <axis = 2> (x)", "float[N, 2, H, W] x")
    _unary(f"{_name}_last", range(11, 13), f"{_name} <axis = -1> (x)")
_row(
    "softmax_of_unknown_rank",
    range(7, 13),
    "(float[2, 3, 4] x, int64[2] shape) => (float[a, b] y)",
    "s = Mul (shape, zero) t = Add (s, to) r = Reshape (x, t) y = Softmax <axis = 0> (r)",
    zero=_ints(0, 0),
    to=_ints(4, 6),
)
_unary("hardmax_flattens", range(7, 13), "Hardmax <axis = 1> (x)")
_row(
    "scatter",
    range(9, 11),
    f"({IMAGE}) => (float[a, b, c, d] y)",
    "y = Scatter <axis = 3> (x, i, u)",
    i=np.array([[[[1, 0, 3]]]], np.int64),
    u=np.array([[[[9, 8, 7]]]], np.float32),
)
_unary(
    "batch_norm",
    range(7, 14),
    "BatchNormalization <epsilon = 0.01, momentum = 0.8> (x, n_scale, n_bias, n_mean, n_var)",
    **models.batch_norm("n", 2),
)
_row(
    "batch_norm_trains",
    range(7, 14),
    f"({IMAGE}) => (float[a, b, c, d] y, float[e] mean)",
    "y, mean, var, m, v = BatchNormalization <momentum = 0.8> (x, n_scale, n_bias, n_mean, n_var)",
    **models.batch_norm("n", 2),
)
_unary(
    "batch_norm_spatial",
    range(7, 9),
    "BatchNormalization <spatial = 1> (x, n_scale, n_bias, n_mean, n_var)",
    **models.batch_norm("n", 2),
)
_row(
    "roi_align",
    range(10, 16),
    "(float[1, 2, 8, 8] x) => (float[a, b, c, d] y)",
    "y = RoiAlign <output_height = 3, output_width = 3, sampling_ratio = 2> (x, rois, image)",
    rois=np.array([[0, 0, 5, 6], [1, 2, 7, 7]], np.float32),
    image=_ints(0, 0),
)
for _mode in ("bilinear", "bicubic", "nearest"):
    _row(
        f"grid_sample_{_mode}",
        range(16, 20),
        "(float[1, 2, 5, 5] x, float[1, 3, 3, 2] g) => (float[a, b, c, d] y)",
        f'h = Tanh (g) y = GridSample <mode = "{_mode}"> (x, h)',
    )
_unary("dft_default_axis", range(17, 20), "DFT (x)", "float[2, 6, 4, 1] x")
_unary("dft_axis", range(17, 20), "DFT <axis = 2> (x)", "float[2, 6, 4, 1] x")
_unary(
    "group_norm",
    range(18, 21),
    "GroupNormalization <num_groups = 2> (x, s, b)",
    "float[2, 6, 4, 4] x",
    s=_floats(1.5, 0.5),
    b=_floats(0.1, -0.2),
)
_row(
    "group_norm_computed_scale",
    range(18, 21),
    "(float[2, 6, 4, 4] x, float[2] s) => (float[2, 6, 4, 4] y)",
    "y = GroupNormalization <num_groups = 2> (x, s, b)",
    b=_floats(0.1, -0.2),
)
_unary("max_pool", range(7, 20), "MaxPool <kernel_shape = [2, 3], strides = [2, 2], pads = [0, 1, 0, 1]> (x)")
_unary("average_pool_ceil", range(10, 19), "AveragePool <ceil_mode = 1, kernel_shape = [3, 3], strides = [2, 2]> (x)")
_unary(
    "conv_auto_pad",
    range(7, 20),
    'Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, w)',
    w=models.normal(3, 2, 3, 3),
)
_unary(
    "conv_transpose",
    range(7, 20),
    "ConvTranspose <strides = [2, 2], output_padding = [1, 1]> (x, w)",
    w=models.normal(2, 3, 3, 3),
)
_unary("cast", range(7, 20), "Cast <to = 7> (x)", out="int64[a, b, c, d]")
_unary("arg_max", range(7, 20), "ArgMax <axis = 2, keepdims = 0> (x)", out="int64[a, b, d]")
_unary("depth_to_space", range(7, 20), "DepthToSpace <blocksize = 2> (x)", "float[1, 8, 3, 3] x")
_unary("instance_norm", range(7, 22), "InstanceNormalization (x, s, b)", s=_floats(1.5, 0.5), b=_floats(0.1, -0.2))
_unary("prelu", range(7, 20), "PRelu (x, s)", s=np.array([[[0.1]], [[0.3]]], np.float32))
_row(
    "lstm",
    range(7, 14),
    "(float[5, 2, 3] x) => (float[a, b, c, d] y)",
    "y = LSTM <hidden_size = 4> (x, w, r, b)",
    w=models.normal(1, 16, 3, scale=0.5),
    r=models.normal(1, 16, 4, scale=0.5),
    b=models.normal(1, 32, scale=0.2),
)
_row(
    "gru",
    range(7, 14),
    "(float[5, 2, 3] x) => (float[a, b, c, d] y)",
    "y = GRU <hidden_size = 4, linear_before_reset = 1> (x, w, r, b)",
    w=models.normal(1, 12, 3, scale=0.5),
    r=models.normal(1, 12, 4, scale=0.5),
    b=models.normal(1, 24, scale=0.2),
)
_row(
    "if_branches",
    range(7, 11),
    "(float[1, 2, 3] x, bool flag) => (float[a, b] y)",
    """y = If (flag) <
        then_branch = then () => (float[a, b] t) { s = Squeeze <axes = [0]> (x) t = Softmax <axis = 0> (s) },
        else_branch = other () => (float[a, b] o) {
            r = ReduceSum <axes = [0], keepdims = 0> (x) o = Clip <min = 0.0> (r)
        }
    >""",
)
_row(
    "loop_body",
    range(11, 13),
    "(float[2, 3] x) => (float[a, b] y)",
    """y = Loop (trips, go, x) <
        body = step (int64 i, bool c, float[2, 3] before) => (bool again, float[2, 3] after) {
            again = Identity (c)
            u = Unsqueeze <axes = [0]> (before)
            m = ReduceSum <axes = [0], keepdims = 0> (u)
            after = Tanh (m)
        }
    >""",
    trips=np.array(3, np.int64),
    go=np.array(True),
)
ZOO["cnn"] = range(7, 21), lambda opset: models.cnn(opset, ir_version=4)
ZOO["cnn_initializers_as_inputs"] = range(7, 12), lambda opset: models.initializers_as_inputs(models.cnn(opset))
ZOO["cnn_constant_weights"] = range(7, 12), lambda opset: models.constant_weights(models.cnn(opset, ir_version=4))
ZOO["nhwc"] = range(7, 13), models.nhwc
ZOO["two_inputs"] = range(7, 13), models.two_inputs
ZOO["branching"] = range(11, 13), models.branching
