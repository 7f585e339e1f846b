"""What is typed, in the type of its option, without pydantic.

Typer converts words by pydantic, which takes as long to import as all of typer. Here the words that are plainly in
order are converted; all others go to typer, which converts them or says what is wrong.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, get_args, get_origin

from quark.config.typed import is_plainly

_HARD = object()
_NUMBERS = {int: re.compile("[0-9]{1,18}"), float: re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")}


class TypedWords:
    """In the place of what typer converts the words of one parameter with."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value, by ourselves or by typer; of an option that may be repeated a list."""
        kind, told = param.type_descriptor.annotation, param.type_descriptor.parameter_info
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        if get_origin(kind) is list and several and isinstance(value, (list, tuple)):
            made: Any = [_typed(one, get_args(kind)[0], told) for one in value]
            hard = any(one is _HARD for one in made)
        else:
            made = _HARD if several else _typed(value, kind, told)
            hard = made is _HARD
        return type(param).get_runtime_param(param).coerce(value, param=param, ctx=ctx) if hard else made


class Typed:
    """Mixed into a command or group of typer: its parameters, that of ``--help`` too, convert their words so."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters; of a typer that converts in another way they are as they were."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in found:
            if hasattr(one, "get_runtime_param"):
                one.get_runtime_param = TypedWords
        return found


def _typed(value: Any, kind: Any, told: Any) -> Any:
    """One word in its type, ``_HARD`` where that is more than to read it."""
    if told.parser is not None:
        return _HARD
    if kind is Path and isinstance(value, str):
        return Path(value) if _is_any_path(value, told) else _HARD
    if isinstance(value, str) and kind in _NUMBERS and _NUMBERS[kind].fullmatch(value):
        value = kind(value)
    bounded = type(value) in _NUMBERS and not _within(value, told)
    return _HARD if bounded or not is_plainly(value, kind) else value


def _within(value: float, told: Any) -> bool:
    return (told.min is None or told.min <= value) and (told.max is None or value <= told.max)


def _is_any_path(value: str, told: Any) -> bool:
    """Whether a path is asked nothing but to be readable where it is there."""
    asked = (told.exists, told.writable, told.resolve_path, told.allow_dash, told.path_type, "\0" in value)
    return (
        told.file_okay and told.dir_okay and not any(asked) and (not os.path.exists(value) or os.access(value, os.R_OK))
    )
