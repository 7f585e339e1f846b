"""Which program loaded which format: written down by the tests that load, read by the table of docs/export.md."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

RECORD = "QUARK_COMPATIBILITY_RECORD"  # name of a file; not set: nothing is written down


def loaded_by(format: str, scheme: str, *programs: str) -> None:
    """A program has loaded a file of ``format`` with ``scheme``, and computed what it should."""
    if path := os.environ.get(RECORD):
        row = {"format": format, "scheme": scheme, "programs": {name: version(name) for name in programs}}
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
