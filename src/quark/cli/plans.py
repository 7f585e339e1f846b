"""A plan wherever it is: in a file that ``--plan`` wrote, or in a quantized model."""

from __future__ import annotations

from pathlib import Path

from quark.config.plan import Plan
from quark.config.plan_diff import read_plan


def plan_in(path: Path) -> Plan:
    """The plan in a plan file, or that a quantized ONNX model was made by.

    Raises:
        QuarkError: the file holds neither, or the model is quantized in a way that no plan holds.
    """
    if path.suffix == ".onnx":
        from quark.onnx.quantized_plan import plan_of

        return plan_of(path)
    return read_plan(path)
