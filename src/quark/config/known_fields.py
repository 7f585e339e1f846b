"""Configurations take the fields that they have: ``config.exlude = [...]`` would be read by nobody."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

from quark.errors import ConfigError, check_name


class KnownFields:
    """Base of configurations that can be changed after they are made.

    Raises:
        ConfigError: on setting an attribute that the constructor of the class does not take.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        kind: Any = type(self)
        if not name.startswith("_"):
            check_name(f"field of {kind.__name__}", name, _fields(kind))
        super().__setattr__(name, value)


def check_switches(config: object, *names: str) -> None:
    """Raise for a field that is neither True nor False: of words, "no" too, all count as True."""
    for name in names:
        if not isinstance(value := getattr(config, name), bool):
            raise ConfigError(f"the field {name} must be True or False, not {value!r}")


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    """What a class and its bases declare, and what their constructors take or set: classes of users may have more."""
    makers = [one for one in kind.__mro__ if "__init__" in vars(one) and one is not object]
    groups = [vars(one).get("__annotations__", {}) for one in kind.__mro__]
    groups += [(*inspect.signature(one).parameters, *_set_in(vars(one)["__init__"])) for one in makers]
    return tuple(dict.fromkeys(name for group in groups for name in group if name not in ("args", "kwargs")))


def _set_in(function: Any) -> Iterator[str]:
    """The attributes that a function sets."""
    yield from (step.argval for step in dis.get_instructions(function) if step.opname == "STORE_ATTR")
