"""Configurations take the fields that they have: ``config.exlude = [...]`` would be read by nobody."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from quark.errors import check_name


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


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    """What the constructors of a class and its bases take, and what it declares."""
    taken = [inspect.signature(one).parameters for one in kind.__mro__ if "__init__" in vars(one)]
    declared = [vars(one).get("__annotations__", {}) for one in kind.__mro__]
    names = dict.fromkeys(name for group in (*taken, *declared) for name in group)
    return tuple(name for name in names if name not in ("self", "args", "kwargs"))
