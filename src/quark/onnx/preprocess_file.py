"""``preprocess.yaml`` beside a quantized model: what was done with the pictures that it was calibrated on.

Commands that run the model later read pictures the same way where they are told nothing else. A function of the user's
own is named in the file, and is not run because a file says so.
"""

from __future__ import annotations

from pathlib import Path

from quark.errors import DataError
from quark.files.ours import MARK
from quark.files.untrusted import Schema, checked, read_settings
from quark.onnx.preprocessing import Preprocessing

FILE = "preprocess.yaml"


class _Fields(Schema):
    mean: list[float | int] | None = None
    std: list[float | int] | None = None
    scale: float | int | None = None
    size: list[int] | None = None
    resize: str | None = None
    bgr: bool | None = None
    function: str | None = None


def text_of(settings: Preprocessing) -> str:
    """What the file says: every field, since other programs have other defaults; of a function its name alone."""
    import yaml

    said = settings.to_dict()
    usual = (
        {} if settings.function else {"scale": 255.0, "mean": [0.0], "std": [1.0], "bgr": False, "resize": "stretch"}
    )
    return f"# {MARK}: pixel / scale - mean, / std\n{yaml.safe_dump({**usual, **said}, sort_keys=False)}"


def read_beside(model: Path) -> Preprocessing | None:
    """The settings beside a model's file; None where there are none.

    Raises:
        ConfigError: no YAML.
        DataError: a field that it does not have, a value that it cannot have, or a function of the user's own.
    """
    path = model.with_name(FILE)
    if not path.is_file():
        return None

    def refuse(why: str) -> DataError:
        return DataError(f"{str(path)!r}: {why}")

    fields = checked(read_settings(path, "the preprocessing") or {}, _Fields, refuse).model_dump(exclude_none=True)
    if "function" in fields:
        raise refuse(f"the samples were read by the function {fields['function']!r}: give it with --preprocess again")
    try:
        return Preprocessing.from_dict(fields)
    except DataError as error:
        raise refuse(str(error)) from error
