"""``quark auto``: which flow a model is for."""

from __future__ import annotations

from pathlib import Path

from quark.cli.auto_request import Request
from quark.errors import ModelNotFoundError

__all__ = ["Request", "run", "usual"]


def run(request: Request, report: Path | None, overwrite: bool, json: bool) -> None:
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

        torch_auto.run(request, report, overwrite, json)
    else:
        from quark.cli import onnx_auto

        onnx_auto.run(request, report, overwrite, json)


def usual(model: Path) -> str:
    """What a model is made for where nothing is said."""
    return "transformers" if model.is_dir() else "cpu"
