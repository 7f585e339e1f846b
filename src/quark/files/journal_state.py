"""What the JSON file of a journal may hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from quark.errors import QuarkError
from quark.files.schema import FileName, Schema, first_reason, read_state

#: A number; one that JSON lacks, in words.
Number = int | float | dict[Literal["float"], Literal["inf", "-inf", "nan"]]
Kept = str | Number


class Tensors(Schema):
    """The tensors of one entry: a file of the folder, and the types in it that safetensors cannot name."""

    file: FileName = Field(pattern=r"^\d{1,12}\.safetensors$")
    crc32: int
    size: int = Field(ge=0)
    types: dict[str, str]


class State(Schema):
    """What the JSON file may hold."""

    version: int
    belongs: dict[str, str]
    next: int = Field(ge=0, le=10**9)
    values: dict[str, Kept | list[Kept] | dict[str, Kept | list[Kept]]]
    tensors: dict[str, Tensors]


def read(path: Path, refuse: Callable[[str], QuarkError]) -> State:
    """What the file holds; raises what ``refuse`` makes of a reason."""
    return read_state(path, State, refuse)


def valid(value: Any, kind: Any, refuse: Callable[[str], QuarkError]) -> Any:
    """A value of an entry, which must be of a type that pydantic knows; raises what ``refuse`` makes of a reason."""
    try:
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise refuse(first_reason(error)) from error
