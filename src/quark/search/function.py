"""A user's function by ``file.py:function``, loaded from its file without touching the import path."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from quark.errors import ConfigError, check_name, unknown, users_code
from quark.files.plain import briefly, code_of, plain
from quark.measure.score import Score, mean


class _Traceless(SourceFileLoader):
    """Loads a file and leaves no ``__pycache__`` beside it: the folder is the user's."""

    def set_data(self, path: str, data: bytes, *, _mode: int = 0o666) -> None:  # type: ignore[override]
        """Keep no bytecode."""


def check_metric(metric: str, measures: Collection[str]) -> None:
    """Raise where a metric is neither one of the measures nor a function that can be loaded."""
    if ":" in metric:
        load_function(metric)
    elif metric not in measures:
        raise ConfigError(f"{unknown('metric', metric, measures)}, or FILE.py:FUNCTION")


def load_function(text: str, option: str = "--metric") -> Callable[..., Any]:
    """The function that ``file.py:function`` names.

    What it raises, and what its file does, ends in a ``ConfigError`` with the line of that file; the error is its
    ``__cause__``.

    Raises:
        ConfigError: no such file or function, or the file cannot be run.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or not name or (path.suffix != ".py" and not path.exists()):
        raise ConfigError(f"{option} {text!r}: give a file and a function in it, as in task.py:accuracy")
    function = getattr(run_file(file, option, text), name, None)
    if not callable(function):
        raise ConfigError(f"{option}: {str(path)!r} has no function {name!r}")
    return _guarded(function, path, f"{option} {text!r}")


def run_file(file: str, option: str, typed: str | None = None) -> ModuleType:
    """The module that a Python file makes; what it raises ends in a ``ConfigError`` with its line.

    Args:
        file: its path.
        option: that it was given with, for errors.
        typed: what was typed there, where that is more than the path.

    Raises:
        ConfigError: no such file, or it cannot be run.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{option} {(typed or file)!r}: the file {file!r} does not exist")
    if path.suffix != ".py":
        raise ConfigError(f"{option}: {str(path)!r} is not a Python file")
    loader = _Traceless(path.stem, str(path))
    spec = importlib.util.spec_from_loader(path.stem, loader)
    if spec is None:
        raise ConfigError(f"{option}: {str(path)!r} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    _guarded(lambda: loader.exec_module(module), path, f"{option}: {str(path)!r}")()
    return module


def _guarded(function: Callable[..., Any], path: Path, who: str) -> Callable[..., Any]:
    """The function, whose errors become sentences; ours stay as they are."""

    @wraps(function)
    def _call(*args: Any, **settings: Any) -> Any:
        with users_code(who, str(path)):
            return function(*args, **settings)

    return _call


def digest_of(text: str | None) -> str:
    """What tells two functions apart: the content of the file, and the name."""
    if text is None:
        return "none"
    file, _, name = text.rpartition(":")
    return f"{name} of {hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()}"


def digest_of_code(function: Callable[..., Any] | None) -> str:
    """The same for a function that has no file: its name, its own code, and the values that it holds."""
    if function is None:
        return "none"
    held = function if isinstance(function, partial) else plain(getattr(function, "__dict__", None), briefly)
    known = json.dumps([plain(held), code_of(function), code_of(type(function).__call__)])
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name} of {hashlib.blake2b(known.encode(), digest_size=8).hexdigest()}"


def number_of(value: Any, metric: str) -> float:
    """The number that a user's function returned, or the entry called ``metric`` of the dictionary.

    Raises:
        ConfigError: neither.
    """
    if isinstance(value, Mapping):
        check_name("entry of the result of --metric", metric, value)
        value = value[metric]
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        shown = " ".join(repr(value).split())
        raise ConfigError(f"--metric returned {shown} for {metric!r}; it must return a number") from error


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
    if not len(value):
        raise ConfigError(
            f"--metric returned an empty list for {metric!r}; it must return a number, or one for each sample"
        )
    try:
        return mean([float(one) for one in value])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--metric returned a list for {metric!r} whose entries are not all numbers") from error


def checked_reference(value: float) -> float:
    """The metric of the float model, which everything is compared with.

    Raises:
        ConfigError: it is not a finite number.
    """
    if not math.isfinite(value):
        raise ConfigError(f"the metric of the float model is {value:g}, so nothing can be compared with it")
    return value
