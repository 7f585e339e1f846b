"""``dataclass`` of the standard library without its price: it compiles four to seven methods for every class.

All classes share ``__repr__``, ``__eq__``, ``__hash__`` and what makes them frozen. ``__init__`` is compiled when it is
first asked for: of 270 classes that a command imports, most are never made. ``fields``, ``replace``, ``asdict`` and
``field`` are the standard library's.

Not handled: ``InitVar``, slots.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from dataclasses import dataclass as standard  # noqa: TID251
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]


class _Factory:
    """In a signature: the default is made anew for every value."""

    def __repr__(self) -> str:
        return "<factory>"


FACTORY = _Factory()


class _Init:
    """``__init__`` of a class that has not been made yet."""

    def __init__(self, cls: type, frozen: bool) -> None:
        self._cls, self._frozen = cls, frozen

    def __get__(self, value: object, owner: type) -> Callable[..., None]:
        made = _compiled(self._cls, self._frozen)
        self._cls.__init__ = made  # type: ignore[misc]
        return made.__get__(value, owner)


def _compiled(cls: type, frozen: bool) -> Callable[..., None]:
    """What takes the fields of a class, in their order, and sets them."""
    every = fields(cls)
    given = [one for one in every if one.init]
    by_name = [one for one in given if one.kw_only]
    taken = ["self", *(_parameter(one) for one in given if not one.kw_only), *["*"][: len(by_name)]]
    body = [_set(one, frozen) for one in every if one.init or one.default_factory is not MISSING]
    body += ["self.__post_init__()"] if hasattr(cls, "__post_init__") else []
    text = f"def __init__({', '.join([*taken, *map(_parameter, by_name)])}):\n  " + "\n  ".join(body or ["pass"])
    given_by_name = {"_factory": FACTORY, "_put": object.__setattr__, **_defaults(every)}
    found: dict[str, Any] = {}
    # closed over, so that annotations are looked up in the module of the class, as those of any of its functions
    exec(f"def made({', '.join(given_by_name)}):\n {text}\n return __init__", _globals(cls), found)  # noqa: S102
    made = found["made"](**given_by_name)
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = {one.name: one.type for one in given} | {"return": None}
    return made


def _globals(cls: type) -> dict[str, Any]:
    return vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}


def _defaults(every: Iterable[Field[Any]]) -> dict[str, Any]:
    """The defaults of fields and what makes them, by the names that the text of ``__init__`` has for them."""
    plain = {f"_default_{one.name}": one.default for one in every}
    return plain | {f"_make_{one.name}": one.default_factory for one in every}


def _parameter(one: Field[Any]) -> str:
    if one.default is not MISSING:
        return f"{one.name}=_default_{one.name}"
    return one.name if one.default_factory is MISSING else f"{one.name}=_factory"


def _set(one: Field[Any], frozen: bool) -> str:
    """The line that gives a field its value."""
    value = one.name
    if one.default_factory is not MISSING:
        value = f"_make_{one.name}()" + (f" if {one.name} is _factory else {one.name}" if one.init else "")
    return f"_put(self, {one.name!r}, {value})" if frozen else f"self.{one.name} = {value}"


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


def _lock(cls: Any) -> None:
    """Refuse that fields are assigned to."""
    names = frozenset(one.name for one in fields(cls))

    def assign(self: Any, name: str, value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = assign, delete


def _complete(cls: type, frozen: bool, eq: bool) -> type:
    """Give a class the shared methods, where it has none of its own."""
    own = cls.__dict__
    if "__init__" not in own:
        cls.__init__ = _Init(cls, frozen)  # type: ignore[misc]
    if "__repr__" not in own:
        cls.__repr__ = _shown  # type: ignore[method-assign, assignment]
    if frozen:
        _lock(cls)
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
        above = [one.__dataclass_params__ for one in cls.__mro__[1:] if "__dataclass_params__" in one.__dict__]
        locked = [params for params in above if params.frozen]
        for params in locked:  # the standard library would have this class locked its way
            params.frozen = False
        made = standard(cls, init=False, eq=False, repr=False, kw_only=kw_only)
        for params in locked:
            params.frozen = True
        made.__dataclass_params__.frozen = frozen  # what classes of others that inherit from it go by
        return _complete(made, frozen, eq)
