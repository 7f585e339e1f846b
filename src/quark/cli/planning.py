"""``quark onnx plan`` and ``quark onnx explain``: what will happen, and why something did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quark.cli.output import print_json, say, show, write_text
from quark.cli.quantization import configure, pass_facts
from quark.cli.requests import Predict
from quark.cli.settings import parse_settings
from quark.config.plan import Plan
from quark.errors import printable
from quark.onnx.describe import file_bytes
from quark.onnx.explain import carries_decisions, explain, explain_floats
from quark.onnx.forecast import OnnxForecast, forecast
from quark.onnx.quantized_plan import explain_graph
from quark.report import Table
from quark.report.summary import cost_table, decision_table, pass_table, rule_table, summary_tables


def run(request: Predict) -> None:
    """Decide about every tensor and predict the cost; only ``--plan`` is written, no data are read."""
    job = configure(request, parse_settings(request.settings)).compile()
    found = forecast(replace(job, plan=request.given_plan()), request.model)
    if request.plan is not None:
        write_text(found.plan.to_json(), request.plan)
    if request.json:
        print_json(facts(request.model, found))
        return
    for table in tables(request.model, found, request.tensors):
        show(table)
    written = "Nothing" if request.plan is None else f"Only {request.plan}"
    say(f"{written} was written. `quark onnx quantize` with the same options does it.")


def tables(model: Path, found: OnnxForecast, tensors: bool) -> Iterable[Table]:
    """The decisions and the predicted cost."""
    yield from summary_tables(found.plan)
    yield rule_table(found.plan)
    if tensors:
        yield decision_table(found.plan)
    yield pass_table((one.name, one.fired, one.refused) for one in found.passes)
    yield cost_table("Predicted", file_bytes(model), found.bytes, found.peak_bytes, found.seconds_per_sample)


def facts(model: Path, found: OnnxForecast) -> dict[str, Any]:
    """The same as data, for ``--json``."""
    return {
        "model": model,
        "bytes": {"float": file_bytes(model), "predicted": found.bytes},
        "peak_bytes": found.peak_bytes,
        "seconds_per_sample": found.seconds_per_sample,
        "proposals": found.plan.proposals,
        "passes": pass_facts(found.passes),
        "tensors": _tensors(found.plan),
        "nodes": {
            n.name: {"op_type": n.op_type, "quantized": n.quantized, "reason": n.reason}
            for n in found.plan.nodes.values()
        },
    }


def _tensors(plan: Plan) -> dict[str, Any]:
    return {t.name: {"role": t.role, "spec": t.spec.describe(), "reason": t.reason, "group": t.group} for t in plan}


def run_explain(model: Path, name: str | None, json: bool) -> None:
    """Say why one tensor or node of a quantized model is what it is; without a name, why nodes stay in float."""
    if name is None:
        lines = explain_floats(model)
    else:
        lines = explain(model, name) if carries_decisions(model) else explain_graph(model, name)
    if json:
        print_json({"model": model, "name": name, "because": lines.splitlines()})
        return
    print(printable(lines))
