"""Files that say how to go on, and files that say what to do: read as if a stranger had written them.

Each has a schema (``schema.py``), a largest size, and names only files of its own folder. JSON and text are read by
``quark.reading``; YAML here, without aliases (a few lines of them stand for gigabytes) and without doubled keys.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quark.errors import ConfigError, QuarkError
from quark.reading import DAMAGED_TEXT, parse_json, read_text, reason_of

STATE_BYTES = 1 << 26
"""Bytes of a file that a job goes on with: 64 MiB. 10,000 tuned layers have 5."""
CONFIG_BYTES = 1 << 24
"""Bytes of a configuration: 16 MiB. A plan for 100,000 layers has 10."""
WORDS = 1 << 26
"""Bytes of the decisions in a model's metadata, when they are unpacked: 64 MiB, some 200,000 tensors."""


def plain_name(name: str) -> str:
    """The name of a file in its folder, on every system."""
    if not re.fullmatch(r"[\w.+\-]+", name) or name.strip(".") == "" or len(name) > 255:
        raise ValueError("it must be the plain name of a file in the folder")
    return name


def own_file(folder: Path, name: str, refuse: Callable[[str], QuarkError]) -> Path:
    """The file called ``name`` in ``folder``.

    Raises:
        QuarkError: that of ``refuse``: another folder's file, or a link to one.
    """
    try:
        path = folder / plain_name(name)
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
