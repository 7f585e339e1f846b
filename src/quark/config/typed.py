"""Values of the types that tables of options, parameters and arguments state.

A value that is plainly of its type is taken as it is. Only what is left goes to pydantic, which converts it or says why
it does not fit: importing that library and building its validators takes a tenth of a second, and a command whose words
are all in order needs neither.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_PLAIN = (bool, int, float, str, NoneType)
_HOLDS = MappingProxyType({"gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le})


class Constraint:
    """In ``Annotated``: what a type's schema of pydantic has besides, ``gt``, ``ge``, ``lt``, ``le`` or ``strict``."""

    def __init__(self, **settings: float) -> None:
        self.settings = settings

    def __repr__(self) -> str:
        return f"Constraint({', '.join(f'{name}={bound}' for name, bound in self.settings.items())})"

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        """Pydantic asks for it."""
        return {**handler(source), **self.settings}

    def holds(self, value: Any) -> bool:
        """Whether a value of the type is plainly within the bounds."""
        return all(name in _HOLDS and _HOLDS[name](value, bound) for name, bound in self.settings.items())


class Before:
    """In ``Annotated``: a function of the value that is looked at instead of it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"Before({self.function.__name__})"


class Misfit(ValueError):
    """A value is not of its type.

    Attributes:
        place: where in the value: keys and indices.
        value: what stands there.
        reason: what is wrong with it.
    """

    def __init__(self, place: tuple[int | str, ...], value: Any, reason: str) -> None:
        super().__init__(reason)
        self.place, self.value, self.reason = place, value, reason


def is_plainly(value: Any, hint: Any) -> bool:
    """Whether a value is exactly of a type, so that nothing is to be converted; False where that is hard to say."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint in _PLAIN:
        return hint is Any or type(value) is hint
    if kind in (Union, UnionType):
        return any(is_plainly(value, one) for one in inner)
    if kind in (list, Sequence):
        return type(value) is list and all(is_plainly(one, inner[0]) for one in value)
    if kind is dict:
        pairs = value.items() if type(value) is dict else ()
        return type(value) is dict and all(is_plainly(k, inner[0]) and is_plainly(v, inner[1]) for k, v in pairs)
    if kind is Literal:
        return type(value) is str and value in inner
    if kind is Annotated:
        marks = hint.__metadata__
        return is_plainly(value, inner[0]) and all(isinstance(one, Constraint) and one.holds(value) for one in marks)
    return False


def typed(value: Any, hint: Any, strict: bool = False) -> Any:
    """The value as the type has it.

    Args:
        value: what was given.
        hint: the type, with ``Constraint``; outermost also with ``Before``.
        strict: nothing is converted but what JSON and Python write differently.

    Raises:
        Misfit: it is not of the type.
    """
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, Before):
            value, hint = mark.function(value), get_args(hint)[0]
    return value if is_plainly(value, hint) else _converted(value, hint, strict)


def _converted(value: Any, hint: Any, strict: bool) -> Any:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    try:
        return TypeAdapter(hint, config=ConfigDict(strict=True) if strict else None).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        raise Misfit(first["loc"], first["input"], first["msg"]) from error
