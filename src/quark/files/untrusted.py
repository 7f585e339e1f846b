"""Files that say how to go on, and files that say what to do: read as if a stranger had written them.

Each has a schema (pydantic; unknown keys are refused), a largest size, and names only files of its own folder. JSON and
text are read by ``quark.reading``; YAML here, without aliases (a few lines of them stand for gigabytes) and without
doubled keys.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from quark.errors import ConfigError, QuarkError
from quark.reading import DAMAGED_TEXT, parse_json, read_text, reason_of

STATE_BYTES = 1 << 26
"""Bytes of a file that a job goes on with: 64 MiB. 10,000 tuned layers have 5."""
CONFIG_BYTES = 1 << 24
"""Bytes of a configuration: 16 MiB. A plan for 100,000 layers has 10."""
WORDS = 1 << 26
"""Bytes of the decisions in a model's metadata, when they are unpacked: 64 MiB, some 200,000 tensors."""

Kept = TypeVar("Kept", bound="Schema")
Value = TypeVar("Value", bound=BaseModel)


class Schema(BaseModel):
    """What a file may hold: these fields, of these types, and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class OpenSchema(BaseModel):
    """A part of a file of other people: these fields, of these types; fields that are not read are left alone."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, defer_build=True)


def _plain(name: str) -> str:
    """The name of a file in its folder, on every system."""
    if not re.fullmatch(r"[\w.+\-]+", name) or name.strip(".") == "" or len(name) > 255:
        raise ValueError("it must be the plain name of a file in the folder")
    return name


FileName = Annotated[str, AfterValidator(_plain)]
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


def own_file(folder: Path, name: str, refuse: Callable[[str], QuarkError]) -> Path:
    """The file called ``name`` in ``folder``.

    Raises:
        QuarkError: that of ``refuse``: another folder's file, or a link to one.
    """
    try:
        path = folder / _plain(name)
    except ValueError as error:
        raise refuse(f"names the file {name!r:.80}: {error}") from error
    if os.path.islink(path):
        raise refuse(f"names the file {name!r}, which is a link")
    return path


def unpacked_text(packed: str, limit: int = WORDS) -> str:
    """The text that was compressed and put into base64.

    Raises:
        ValueError: it is damaged, or longer than ``limit`` bytes; nothing more than that is unpacked.
    """
    try:
        machine = zlib.decompressobj()
        content = machine.decompress(base64.b64decode(packed, validate=True), limit)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if machine.unconsumed_tail:
        raise ValueError(f"it has more than {limit} bytes")
    if not machine.eof:
        raise ValueError("it is cut off")
    return content.decode("utf-8")


# ---- YAML ------------------------------------------------------------------------------------------------------------


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text.

    Args:
        source: how the message calls the text, such as the quoted path.

    Raises:
        ConfigError: not YAML, aliases, doubled keys, nested too deeply, numbers of thousands of digits.
    """
    import yaml

    from quark.files.plain_yaml import Plain

    try:
        return yaml.load(text, Plain)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, *DAMAGED_TEXT) as error:
        raise ConfigError(f"{source} is not valid YAML: {reason_of(error)}") from error


def read_settings(path: Path, what: str) -> Any:
    """The value in a configuration file: JSON where its name ends so, YAML otherwise.

    Raises:
        ConfigError: it cannot be read.
    """
    text = read_text(path, ConfigError, what, CONFIG_BYTES)
    if path.suffix == ".json":
        return parse_json(text, f"{what} {str(path)!r}", ConfigError)
    return parse_yaml(text, f"{what} {str(path)!r}")
