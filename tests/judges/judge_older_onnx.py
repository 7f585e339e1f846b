"""For tests written with an older onnx: models that name no IR version get one that ONNX Runtime reads."""

from __future__ import annotations

from typing import Any

import onnx.helper

IR_VERSION = 10


def pytest_configure(config: Any) -> None:
    """Before their modules are imported."""
    onnx.IR_VERSION = onnx.helper.IR_VERSION = IR_VERSION
