"""The table of the graph passes that come with the package. A new row is tested, documented and offered everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import onnx_ir as ir

from quark.onnx.graph.report import PassReport
from quark.onnx.passes import (
    constants,
    float16_to_float32,
    fold_batch_norm,
    input_initializers,
    opset_version,
    reduce_mean_to_pool,
    simplify,
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
        changes="tensors are float32, those at the model's ends too; intermediate results are not rounded to float16",
    ),
    Pass("optimize_with_ort", "Fold constants, remove identities and what no output depends on.", constants.run),
    Pass(
        "fold_batch_norm",
        "BatchNormalization goes into the Conv, ConvTranspose or Gemm before it.",
        fold_batch_norm.run,
    ),
    Pass("simplify", "Run onnxslim where a cheap look at the graph says it can gain something.", _simplify),
    Pass(
        "convert_reduce_mean_to_global_avg_pool",
        "A mean over the spatial axes becomes GlobalAveragePool.",
        reduce_mean_to_pool.run,
        shapes=True,
    ),
    Pass("copy_shared_init", "Give each node its own copy of an initializer that several share.", _copy_shared_init),
    Pass("copy_bias_init", "Give each node its own copy of a bias that several share.", _copy_bias_init),
)
