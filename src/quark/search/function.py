"""A user's function by ``file.py:function``, loaded from its file without touching the import path."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np

from quark.errors import ConfigError, unknown
from quark.measure.score import Score, mean


class _Traceless(SourceFileLoader):
    """Loads a file and leaves no ``__pycache__`` beside it: the folder is the user's."""

    def set_data(self, path: str, data: bytes, *, _mode: int = 0o666) -> None:  # type: ignore[override]
        """Keep no bytecode."""


def load_function(text: str, option: str = "--metric") -> Callable[..., Any]:
    """The function that ``file.py:function`` names.

    Raises:
        ConfigError: no such file or function.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise ConfigError(f"{option} {text!r}: give a file and a function in it, as in task.py:accuracy")
    if path.suffix != ".py":
        raise ConfigError(f"{option}: {str(path)!r} is no Python file")
    loader = _Traceless(path.stem, str(path))
    spec = importlib.util.spec_from_loader(path.stem, loader)
    if spec is None:
        raise ConfigError(f"{option}: {str(path)!r} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{option}: {str(path)!r} has no function {name!r}")
    return function


def digest_of(text: str | None) -> str:
    """What tells two functions apart: the content of the file, and the name."""
    if text is None:
        return "none"
    file, _, name = text.rpartition(":")
    return f"{name} of {hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()}"


def number_of(value: Any, metric: str) -> float:
    """The number that a user's function returned, or the entry called ``metric`` of the dictionary.

    Raises:
        ConfigError: neither.
    """
    if isinstance(value, Mapping):
        if metric not in value:
            raise ConfigError(unknown("entry of the result of --metric", metric, value))
        value = value[metric]
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--metric returned {value!r} for {metric!r}; it must return a number") from error


def score_of(value: Any, metric: str) -> Score:
    """What a user's function returned: a number, a dictionary as in ``number_of``, or one number for every sample.

    Raises:
        ConfigError: none of these.
    """
    if isinstance(value, Score):
        return value
    if isinstance(value, Mapping) and metric in value:
        value = value[metric]
    listed = isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1)
    if not listed:
        return Score(number_of(value, metric))
    try:
        return mean([float(one) for one in value]) if len(value) else Score(number_of(None, metric))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--metric returned a list for {metric!r} whose entries are not all numbers") from error
