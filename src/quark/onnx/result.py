"""What a quantization made and learnt, as one value: for scripts, notebooks and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.numerics.formats import Int, get_format
from quark.onnx.algorithms.mixed import Mixed
from quark.onnx.compare import Comparison
from quark.onnx.coverage import Coverage, coverage
from quark.onnx.forecast import written_bytes
from quark.onnx.graph.libraries import Libraries
from quark.onnx.graph.report import PassReport
from quark.report.page import ModelView, Report
from quark.report.summary import pass_table, summary_tables
from quark.report.tables import plain
from quark.report.values import Weakness
from quark.report.verdict import Line, Verdict, accuracy_line, coverage_line, size_line, worst


@dataclass
class Result:
    """What a quantization made and learnt.

    Attributes:
        plan: every decision, with ranges and scales.
        passes: what the graph passes did and refused to do.
        seconds: time of each stage.
        proto: the quantized model, when no output path was given.
        weak: the layers that lose most to their weights.
        metrics: what ``EvalMetrics`` measured.
        mixed: what automatic mixed precision decided.
        samples: how many samples calibration read.
        bytes_before: size of the float file with its external data; None for a model in memory.
        written: the quantized model: its path, or itself.
        counted: how much of it is quantized; ``None`` where it has free sizes.
        sample: where it has, what they are: the sample that it was tried on.
        libraries: files with the model's custom operators.
    """

    plan: Plan
    passes: list[PassReport]
    seconds: dict[str, float] = field(default_factory=dict)
    proto: onnx.ModelProto | None = None
    weak: tuple[Weakness, ...] = ()
    metrics: Comparison | None = None
    mixed: Mixed | None = None
    samples: int = 0
    bytes_before: int | None = None
    written: Path | onnx.ModelProto | None = None
    counted: Coverage | None = None
    sample: Mapping[str, np.ndarray] | None = None
    libraries: Libraries = None

    @property
    def bytes(self) -> int | None:
        """Size of the quantized model with its external data; None where there is none."""
        if isinstance(self.written, Path):
            return written_bytes(self.written)
        return None if self.written is None else self.written.ByteSize()

    @cached_property
    def coverage(self) -> Coverage | None:
        """How much of the model is computed in integers and stored as codes; found when first asked for."""
        if self.counted is not None or self.written is None:
            return self.counted
        return coverage(self.written, self.sample, self.libraries)

    @property
    def verdict(self) -> Verdict:
        """Accuracy (where ``EvalMetrics`` measured it), size and coverage, a line each."""
        lines: list[Line] = []
        if self.metrics is not None:
            found = worst(self.metrics.outputs, self.metrics.answers)
            lines.append(accuracy_line(found, f"on {self.metrics.samples} samples of EvalMetrics"))
        if self.bytes_before is not None and self.bytes is not None:
            lines.append(size_line(self.bytes_before, self.bytes))
        integers = {tensor.role for tensor in self.plan if isinstance(get_format(tensor.spec.format), Int)}
        if integers and self.coverage is not None:
            products = self.coverage.integer if "activation" in integers else None
            lines.append(coverage_line(products, self.coverage.stored))
        return Verdict(tuple(lines))

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values; infinite ratios are words."""
        nodes = self.plan.nodes.values()
        found: dict[str, Any] = {
            "nodes": {"total": len(nodes), "quantized": sum(node.quantized for node in nodes)},
            "bytes": {"float": self.bytes_before, "quantized": self.bytes},
            "seconds": dict(self.seconds),
            "samples": self.samples,
            "passes": {one.name: {"fired": one.fired, "refused": list(one.refused)} for one in self.passes},
            "proposals": list(self.plan.proposals),
            "verdict": self.verdict.facts(),
        }
        if self.metrics is not None:
            outputs = self.metrics.outputs.items()
            found["outputs"] = {name: {"sqnr": plain(d.sqnr), "cosine": plain(d.cosine)} for name, d in outputs}
        return found

    def report(self) -> Report:
        """The page: verdict, tables, and layers where ``EvalMetrics`` measured them."""
        passes = pass_table((one.name, one.fired, one.refused) for one in self.passes)
        measured = self.metrics
        layers, tensors = (measured.layers, measured.tensors) if measured is not None else ((), ())
        name = self.written.name if isinstance(self.written, Path) else "quantized model"
        reasons = {one: self.plan.explain(one) for one in (*self.plan.nodes, *self.plan.tensors)}
        view = ModelView(name, self.verdict, layers, tensors, reasons=reasons)
        return Report(name, (view,), tables=(*summary_tables(self.plan, self.weak), passes))

    def save_report(self, path: str | Path) -> Path:
        """Write the page as one HTML file that needs nothing else.

        Raises:
            OutputError: the file cannot be written.
        """
        from quark.report.html import write_html

        return write_html(self.report(), path)

    def __repr__(self) -> str:
        """The verdict, as an interpreter and a notebook's file show it; plans hold megabytes."""
        return "\n".join(self.verdict.words()) or "no verdict"

    def _repr_html_(self) -> str:
        """The verdict as a notebook shows it."""
        from html import escape

        cells = ((line.subject, line.word, line.reason) for line in self.verdict.lines)
        rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
        return f"<table>{rows}</table>"
