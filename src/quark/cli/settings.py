"""Values typed on the command line: ``--set Option=value``.

A value is JSON where it can be, otherwise YAML: ``true``, ``99.9``, ``null``, ``Conv``, ``[Conv, Gemm]``,
``{input: [1, 3, 224, 224]}``; ``None``, ``True`` and ``False`` mean what they mean in Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from quark.errors import ConfigError
from quark.files.untrusted import parse_yaml
from quark.reading import DAMAGED_TEXT, reason_of

PYTHON = {"None": None, "True": True, "False": False}


def parse_settings(texts: Iterable[str]) -> dict[str, Any]:
    """``["Percentile=99.9", ...]`` as a dictionary.

    Raises:
        ConfigError: a text without ``=`` or name, a value that is neither JSON nor YAML, an option given twice.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigError(f"--set {text!r}: write it as Option=value, as in --set Percentile=99.9")
        if name in settings:
            raise ConfigError(f"--set {name} is given twice")
        settings[name] = parse_value(name, value)
    return settings


def parse_value(name: str, text: str) -> Any:
    """One value; the name is for the message."""
    if text in PYTHON:
        return PYTHON[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        pass
    except DAMAGED_TEXT as error:
        raise ConfigError(f"--set {name}: cannot read the value {text!r:.80}: {reason_of(error)}") from error
    return parse_yaml(text, f"--set {name}: the value {text!r:.80}")
