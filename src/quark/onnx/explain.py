"""Why a tensor of a quantized model is what it is: the decisions travel with the model.

``attach`` writes every decision (tensor, spec, rule; node, quantized or not, reason) into the model's metadata under
``openquark.plan``: JSON, compressed, in base64, some 10 to 30 bytes per tensor. ``explain`` reads it back; it needs the
quantized file only. Metadata are ignored by runtimes, and a tool that rewrites the model may drop them.

Not handled: models written under ``CryptoMode``, which carry no words about themselves.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from quark.config.plan import Plan
from quark.errors import ConfigError, ModelError, unknown
from quark.files.untrusted import unpacked_text
from quark.onnx.graph.model import load
from quark.onnx.qdq.initializers import shortened
from quark.reading import parse_json

if TYPE_CHECKING:
    from quark.onnx.kept_beside import StoredDecisions

KEY = "openquark.plan"
VERSION = 1
#: What emission appends to the name of a tensor that it writes (``quark.onnx.qdq``).
SUFFIXES = (
    *("_QuantizeLinear_Output", "_DequantizeLinear_Output", "_QuantizeDequantize_Output", "_QuantizeLinear_Input"),
    *("_QuantizeLinear", "_DequantizeLinear", "_QuantizeDequantize", "_quantized_scale", "_quantized_zero_point"),
    *("_quantized", "_scale", "_zero_point", "_scales", "_zero_points", "_Q2", "_Q4", "_Q8", "_bf16", "_codes"),
)


def attach(model: ir.Model, plan: Plan) -> None:
    """Write the decisions of ``plan`` into the metadata of ``model``."""
    model.metadata_props[KEY] = packed(plan)


def packed(plan: Plan) -> str:
    """The decisions of ``plan`` as ``attach`` writes them."""
    lines = {
        "version": VERSION,
        "tensors": {tensor.name: plan.explain(tensor.name) for tensor in plan},
        "nodes": {name: _of_node(plan, name) for name in plan.nodes},
        "floats": {name: plan.explain_float(name) for name in plan.floats if _is_news(plan, name)},
    }
    return base64.b64encode(zlib.compress(json.dumps(lines, separators=(",", ":")).encode(), 9)).decode()


def explain(path: str | Path, name: str) -> str:
    """The decision about a tensor or a node of a quantized model, in one line each.

    Args:
        path: the quantized model.
        name: a tensor or node of the float model, or what it became (``conv1_quantized``, ``x_DequantizeLinear``).

    Raises:
        ModelError: the file is not a model of ours.
        ConfigError: it has no tensor or node of this name; the nearest one is shown.
    """
    model = load(path)
    lines = _decisions(model, path)
    kinds = [lines.tensors, lines.nodes, lines.floats]
    known = [key for kind in kinds for key in kind]
    whole = {shortened(key): key for key in reversed(known)}  # what is written for a tensor of a long name is shorter
    for candidate in (name, *bases(name), *(whole[base] for base in bases(name) if base in whole)):
        found = [kind[candidate] for kind in kinds if candidate in kind]
        if found:
            return "\n".join(found)
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [value for node in model.graph for value in node.outputs]
    here = next((value for value in values if value.name == name), None)
    if here is None:
        raise ConfigError(unknown("tensor or node", name, [*known, *(str(value.name) for value in values)]))
    nodes = [here.producer(), *(use.node for use in here.uses())]
    told = [lines.nodes[node.name] for node in nodes if node is not None and node.name in lines.nodes]
    return "\n".join([f"tensor {name!r}: float, because no rule quantizes it; its nodes:", *told])


def explain_floats(path: str | Path) -> str:
    """Every node of a quantized model that stays in float, and why, a line each.

    Raises:
        ModelError: as ``explain``.
    """
    told = _decisions(load(path), path).nodes.values()
    return "\n".join(line for line in told if ": float, because" in line) or "no node stays in float"


def carries_decisions(path: str | Path) -> bool:
    """Whether a model carries the decisions that it was made by."""
    return KEY in load(path).metadata_props


def decisions(model: ir.Model) -> dict[str, str]:
    """The decision about every tensor and node, in a line each, by name; none where the model carries none."""
    if KEY not in model.metadata_props:
        return {}
    told = _decisions(model, model.graph.name or "the quantized model")
    return {**told.floats, **told.nodes, **told.tensors}


def _is_news(plan: Plan, name: str) -> bool:
    """Whether the node of the same name, if there is one, does not say it already."""
    return name not in plan.nodes or plan.nodes[name].quantized


def _of_node(plan: Plan, name: str) -> str:
    node = plan.nodes[name]
    return f"{node.op_type} {name!r}: {'quantized' if node.quantized else 'float'}, because {node.reason}"


def bases(name: str) -> list[str]:
    """What the tensor may have been called before it was written."""
    return [name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)]


def _decisions(model: ir.Model, path: str | Path) -> StoredDecisions:
    text = model.metadata_props.get(KEY)
    if text is None:
        raise ModelError(
            f"{str(path)!r} holds no decisions: another tool or version made it, or it was quantized under CryptoMode"
        )

    def refuse(why: str) -> ModelError:
        return ModelError(f"{str(path)!r}: its decisions ({KEY}) are damaged: {why}")

    from quark.files.schema import checked
    from quark.onnx.kept_beside import StoredDecisions

    try:
        words = unpacked_text(text)
    except ValueError as error:
        raise refuse(str(error)) from error
    return checked(
        parse_json(words, f"{str(path)!r}: the text of its decisions ({KEY})", ModelError), StoredDecisions, refuse
    )
