"""What commands write beside their outputs without an option of its own; checked with all outputs, before work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quark.files.outputs import Output


def recipe_beside(given: Mapping[str, Any]) -> Iterator[Output]:
    """The configuration file that ``quark auto`` writes beside its model or folder."""
    output = Path(given["output"]).expanduser()  # a word still, in some versions of typer
    output = (
        output.resolve() if Path(given["model"]).is_dir() else output.with_name(output.stem) if output.name else output
    )
    yield Output(output.parent / f"{output.name}.recipe.yaml", "the recipe")


def preprocessing_beside(given: Mapping[str, Any]) -> Iterator[Output]:
    """What is done with files before the model sees them, where ``quark onnx quantize`` takes no arrays."""
    from quark.onnx.data_files import is_picture
    from quark.onnx.preprocess_file import FILE

    data, function = given["data"], given["preprocess"]
    if data is not None and (function is not None or is_picture(Path(data))):
        yield Output(Path(given["output"]).parent / FILE, f"the file {FILE}")
