"""``quark auto``: which flow a model is for."""

from __future__ import annotations

from pathlib import Path

from quark.cli.requests import Auto
from quark.errors import ModelNotFoundError


def run(request: Auto) -> None:
    """A folder is a torch model, a file an ONNX model.

    Raises:
        ModelNotFoundError: neither is there.
    """
    if not request.model.exists():
        raise ModelNotFoundError(
            f"the model {str(request.model)!r} does not exist (current folder: {str(Path.cwd())!r})"
        )
    if request.model.is_dir():
        from quark.cli import torch_auto

        torch_auto.run(request)
    else:
        from quark.cli import onnx_auto

        onnx_auto.run(request)
