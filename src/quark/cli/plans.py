"""A plan wherever it is: in a file that ``--plan`` wrote, or in a quantized model of either flow."""

from __future__ import annotations

from pathlib import Path

from quark.config.plan import Plan
from quark.config.plan_diff import read_plan


def plan_in(path: Path) -> Plan:
    """The plan in a plan file, or that a quantized ONNX model or checkpoint folder was made by.

    Raises:
        QuarkError: the file holds neither, or the model is quantized in a way that no plan holds.
    """
    if path.suffix == ".onnx":
        from quark.onnx.quantized_plan import plan_of

        return plan_of(path)
    if path.is_dir():
        from quark.torch.files.quantized_plan import plan_of as plan_of_folder

        return plan_of_folder(path)
    return read_plan(path)


def check_plan(path: Path | None) -> None:
    """Refuse a plan file that is missing or broken, before torch is loaded; None: none is given.

    Raises:
        ConfigError: as ``read_plan``.
    """
    if path is not None and path.suffix != ".onnx" and not path.is_dir():
        read_plan(path)
