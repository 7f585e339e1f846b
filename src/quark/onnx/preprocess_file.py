"""``preprocess.yaml`` beside quantized models: what was done with the pictures that each was calibrated on.

    model.onnx: {float_model: float.onnx, scale: 255.0, mean: [0.0], ...}        a section a model of the folder

Commands that run the model later read pictures the same way where they are told nothing else. Fields without sections,
as people write them, are of every model of the folder. A function of the user's own is named in the file, and is not
run because a file says so.
"""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

from quark.errors import ConfigError, DataError
from quark.files.ours import MARK
from quark.files.untrusted import read_settings
from quark.onnx.preprocessing import Preprocessing

FILE = "preprocess.yaml"


def text_of(settings: Preprocessing, made: Path, source: Path) -> str:
    """What the file beside ``made`` says from now on: every field, since other programs have other defaults.

    Args:
        settings: how the pictures of ``made`` were read; of a function its name alone is written.
        made: the quantized model.
        source: the float model; named where it is in the folder too, since others have models of the same name.
    """
    import yaml

    said = settings.to_dict()
    usual = (
        {} if settings.function else {"scale": 255.0, "mean": [0.0], "std": [1.0], "bgr": False, "resize": "stretch"}
    )
    others = {name: part for name, part in _sections(made.with_name(FILE)).items() if _is_there(made, name)}
    here = {"float_model": source.name} if source.resolve().parent == made.resolve().parent else {}
    others = {name: part for name, part in others.items() if name not in (made.name, *here.values())}
    whole = {**others, made.name: {**here, **usual, **said}}
    return f"# {MARK}: pixel / scale - mean, / std\n{yaml.safe_dump(whole, sort_keys=False)}"


def _sections(path: Path) -> dict[Any, Any]:
    """What a file says of each model, one without sections of every model of the folder; nothing where it is not there
    or damaged."""
    try:
        said = read_settings(path, "the preprocessing") if path.is_file() else {}
    except ConfigError:
        return {}
    if not isinstance(said, dict) or not said or _has_sections(said):
        return said if _has_sections(said) else {}
    return {model.name: deepcopy(said) for model in sorted(path.parent.glob("*.onnx"))}  # what is shared gets aliases


def _has_sections(said: Any) -> bool:
    return isinstance(said, dict) and bool(said) and all(isinstance(part, dict) for part in said.values())


def _is_there(model: Path, name: object) -> bool:
    return os.path.isfile(model.parent / str(name))


def _of(said: Any, model: Path) -> Any:
    """The part of a file that is about ``model``: its own section, the last one made from it, or the only one where
    the model that it names is gone, since models are renamed."""
    if not _has_sections(said):
        return said
    if model.name in said:
        return said[model.name]
    made = [part for part in said.values() if part.get("float_model") == model.name]
    (name, only), *more = said.items()
    return made[-1] if made else {} if more or _is_there(model, name) else only


def read_beside(model: Path) -> Preprocessing | None:
    """The settings beside a model's file; None where there are none, those of a model alone where they say of which.

    Raises:
        ConfigError: no YAML.
        DataError: a field that it does not have, a value that it cannot have, or a function of the user's own.
    """
    path = model.with_name(FILE)
    if not path.is_file():
        return None

    from quark.files.schema import checked
    from quark.onnx.kept_beside import PreprocessingFields

    def refuse(why: str) -> DataError:
        return DataError(f"{str(path)!r}: {why}")

    said = _of(read_settings(path, "the preprocessing"), model)
    if not said:
        return None
    fields = checked(said, PreprocessingFields, refuse).model_dump(exclude_none=True, exclude={"float_model"})
    if "function" in fields:
        raise refuse(f"the samples were read by the function {fields['function']!r}: give it with --preprocess again")
    try:
        return Preprocessing.from_dict(fields)
    except DataError as error:
        raise refuse(str(error)) from error
