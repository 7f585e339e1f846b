"""What a file may hold, as classes of pydantic: unknown keys are refused, types are not converted.

Modules that define such classes are imported where a file is read: the library takes as long as ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from quark.errors import ConfigError, QuarkError
from quark.files.untrusted import STATE_BYTES, plain_name
from quark.reading import parse_json, read_text

Kept = TypeVar("Kept", bound="Schema")
Value = TypeVar("Value", bound=BaseModel)


class Schema(BaseModel):
    """What a file may hold: these fields, of these types, and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class OpenSchema(BaseModel):
    """A part of a file of other people: these fields, of these types; fields that are not read are left alone."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, defer_build=True)


FileName = Annotated[str, AfterValidator(plain_name)]
"""The name of a file in the folder that belongs to it: no path, no ``..``, no drive."""


def read_state(path: Path, schema: type[Kept], refuse: Callable[[str], QuarkError], limit: int = STATE_BYTES) -> Kept:
    """What a file holds that a job goes on with.

    Args:
        path: a JSON file.
        schema: what it may hold.
        refuse: makes the error of a reason in words.
        limit: bytes that are read.

    Raises:
        QuarkError: that of ``refuse``: no regular file, too large, not JSON, or not what ``schema`` says.
    """
    try:
        found = parse_json(read_text(path, ConfigError, limit=limit), "it", ConfigError)
    except ConfigError as error:
        raise refuse(f"is damaged ({error})") from error
    return checked(found, schema, lambda why: refuse(f"is damaged ({why})"))


def checked(value: Any, schema: type[Value], refuse: Callable[[str], QuarkError]) -> Value:
    """A value as ``schema`` says.

    Raises:
        QuarkError: that of ``refuse``, with the first field that does not fit.
    """
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise refuse(first_reason(error)) from error


def first_reason(error: ValidationError) -> str:
    """The first field that does not fit, and why."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = "".join(f"[{str(part)[:60]!r}]" for part in first["loc"])
    return f"{where or 'it'}: {first['msg'][:200]}"
