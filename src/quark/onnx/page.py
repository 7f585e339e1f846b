"""The page of one or several quantized models: comparisons, decisions, weights and neighbours become one ``Report``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from quark.onnx.causes import Causes
from quark.onnx.compare import Comparison, Model
from quark.onnx.explain import decisions
from quark.onnx.graph.model import load
from quark.onnx.weight_views import weight_views
from quark.report.page import ModelView, Report
from quark.report.values import Example, Links, Table
from quark.report.verdict import Verdict

FAR = 8
"""Nodes that a page knows nothing of, and a neighbour is looked for behind."""


def model_view(
    name: str,
    float_model: Model,
    quantized: Model,
    found: Comparison,
    verdict: Verdict,
    reasons: Mapping[str, str] | None = None,
) -> ModelView:
    """One quantized model for the page.

    Args:
        reasons: by tensor and node; None: as the quantized model's metadata tell them.
    """
    first, second = load(float_model), load(quantized)
    weights = weight_views(first, second)
    told = decisions(second) if reasons is None else reasons
    wanted = {name for one in found.layers for name in (one.name, one.tensor)} | {v.name for v in weights.values()}
    return ModelView(
        name,
        verdict,
        found.layers,
        (*found.tensors, *{view.name: view for view in weights.values()}.values()),
        {layer: view.name for layer, view in weights.items()},
        {key: why for key, why in told.items() if key in wanted},
    )


def page(
    title: str,
    float_model: Model,
    models: Sequence[ModelView],
    measured: Sequence[Causes],
    examples: Sequence[Example] = (),
    tables: Sequence[Table] = (),
) -> Report:
    """The page; ``measured``: what each model's layers cause, or nothing."""
    views = tuple(models)
    rows = {layer.tensor for view in views for layer in view.layers}
    notes = dict.fromkeys(one.told() for one in measured)
    held = (f"{view.name}: {one.held()}" for view, one in zip(views, measured, strict=False) if one.held())
    links = dict(neighbours(load(float_model), rows))
    return Report(title, views, links, tuple(examples), tuple(tables), notes=(*notes, *held))


def neighbours(model: ir.Model, rows: set[str]) -> Iterator[tuple[str, Links]]:
    """The neighbours of the layers that make ``rows``, past nodes that make none of them."""
    for node in model.graph:
        for output in node.outputs:
            if output.name in rows:
                yield str(output.name), Links(tuple(_reads(node, rows)), tuple(_feeds(output, rows)))


def _reads(node: ir.Node, rows: set[str], far: int = FAR) -> dict[str, None]:
    found: dict[str, None] = {}
    for value in node.inputs:
        if value is None or value.is_initializer():
            continue
        maker = value.producer()
        if value.name in rows or maker is None:
            found[str(value.name)] = None
        elif far:
            found |= _reads(maker, rows, far - 1)
    return found


def _feeds(value: ir.Value, rows: set[str], far: int = FAR) -> dict[str, None]:
    found: dict[str, None] = {}
    for node in dict.fromkeys(use.node for use in value.uses()):
        for output in node.outputs:
            if output.name in rows or output.is_graph_output():
                found[str(output.name)] = None
            elif far:
                found |= _feeds(output, rows, far - 1)
    return found
