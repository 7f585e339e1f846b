"""``dataclass`` of the standard library in a third of the time: 270 classes took a tenth of the imports of a command.

The standard library compiles ``__repr__``, ``__eq__`` and ``__hash__`` anew for every class. Here all classes share
them; ``__init__`` and what makes a class frozen stay the standard library's, and so do ``fields``, ``replace``,
``asdict`` and ``field``.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass as standard  # noqa: TID251
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


def _equal(self: Any, other: Any) -> bool:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return self.__compared__(self) == self.__compared__(other)


def _hash(self: Any) -> int:
    return hash(self.__compared__(self))


@reprlib.recursive_repr()
def _shown(self: Any) -> str:
    shown = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({shown})"


def _complete(cls: type, frozen: bool, eq: bool) -> type:
    """Give a class the shared methods, where it has none of its own."""
    own = cls.__dict__
    if "__repr__" not in own:
        cls.__repr__ = _shown  # type: ignore[method-assign, assignment]
    if not eq:
        return cls
    names = [one.name for one in fields(cls) if one.compare]
    names *= 1 + (len(names) == 1)  # always a tuple, which equals itself even where it holds a NaN
    cls.__compared__ = staticmethod(attrgetter(*names) if names else lambda _: ())  # type: ignore[attr-defined]
    hashes = own.get("__hash__") is not None or ("__hash__" in own and "__eq__" not in own)
    if "__eq__" not in own:
        cls.__eq__ = _equal  # type: ignore[method-assign, assignment]
    if not hashes:
        cls.__hash__ = _hash if frozen else None  # type: ignore[assignment]
    return cls


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: TID251
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, kw_only=False):
        """``dataclasses.dataclass``, of whose options it takes those that are used here."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, eq=eq, kw_only=kw_only)
        return _complete(standard(cls, frozen=frozen, eq=False, repr=False, kw_only=kw_only), frozen, eq)
