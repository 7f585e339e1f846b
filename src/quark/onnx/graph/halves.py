"""Models that compute in bfloat16, which ONNX Runtime's CPU provider has no kernels for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import onnx_ir as ir

from quark.errors import ModelError
from quark.ir.surgery import label
from quark.ir.walk import all_nodes


def bfloat16_node(model: ir.Model) -> ir.Node | None:
    """The first node of ONNX's own that computes in bfloat16; a Cast only rounds to it."""
    for node in all_nodes(model):
        values = [value for value in (*node.inputs, *node.outputs) if value is not None]
        own = node.domain in ("", "ai.onnx") and node.op_type != "Cast"
        if own and any(value.dtype == ir.DataType.BFLOAT16 for value in values):
            return node
    return None


def refuse_bfloat16(model: ir.Model, source: object, providers: Sequence[str]) -> None:
    """Refuse a model that computes in bfloat16 where only CPUs are to run it.

    Args:
        model: the model.
        source: where it came from; a path stands in the command that helps.
        providers: execution providers that are to run it.

    Raises:
        ModelError: it names the first such node and the command that makes the model float32.
    """
    node = bfloat16_node(model) if set(providers) <= {"CPUExecutionProvider"} else None
    if node is not None:
        raise ModelError(
            f"the model computes in bfloat16, at {label(node)}, and ONNX Runtime has no such kernels for CPUs; as "
            f"float32 it keeps all its values: {tool_command('convert_fp16_to_fp32', source)}"
        )


def tool_command(tool: str, source: object) -> str:
    """The command that makes a float32 model of a file, beside it; of a model in memory with a name to fill in."""
    path = str(source) if str(source).endswith(".onnx") else "model.onnx"
    return shlex.join(["quark", "onnx", "tool", tool, path, path[: -len("onnx")] + "float32.onnx"])
