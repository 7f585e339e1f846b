"""Our dataclasses are those of the standard library: the same classes, made by both."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

from quark.dataclass import dataclass as ours


def _plain(dataclass: Callable[..., Any], **options: Any) -> type:
    @dataclass(**options)
    class Point:
        """A point."""

        x: int
        name: str = "a"
        seen: list[Any] = dataclasses.field(default_factory=list, compare=False, repr=False)

    return Point


def _derived(dataclass: Callable[..., Any], **options: Any) -> type:
    @dataclass(**options)
    class Derived:
        """Has fields that are not given."""

        x: int
        double: list[int] = dataclasses.field(init=False, default_factory=list, compare=False)
        half: float = dataclasses.field(init=False, default=0.0)

        def __post_init__(self) -> None:
            object.__setattr__(self, "half", self.x / 2)
            self.double.append(2 * self.x)

    return Derived


def _one(dataclass: Callable[..., Any], **options: Any) -> type:
    return dataclass(**options)(type("One", (), {"__annotations__": {"x": float}}))


def _none(dataclass: Callable[..., Any], **options: Any) -> type:
    return dataclass(**options)(type("Nothing", (), {}))


def _heir(dataclass: Callable[..., Any], **options: Any) -> type:
    return dataclass(**options)(type("Heir", (_plain(dataclass, **options),), {"__annotations__": {"z": int}, "z": 3}))


def _own(dataclass: Callable[..., Any], **options: Any) -> type:
    methods = {"__eq__": lambda self, other: True, "__hash__": lambda self: 7, "__repr__": lambda self: "own"}
    return dataclass(**options)(type("Own", (), {"__annotations__": {"x": int}} | methods))


NAN = float("nan")
MADE = {
    _plain: [{"x": 1}, {"x": 1, "seen": [2]}, {"x": 2}, {"x": 1, "name": "b"}],
    _derived: [{"x": 1}, {"x": 1}, {"x": 2}],
    _one: [{"x": NAN}, {"x": NAN}, {"x": 1.0}, {"x": 1}],
    _none: [{}, {}],
    _heir: [{"x": 1}, {"x": 1, "z": 4}, {"x": 1, "seen": [5]}],
    _own: [{"x": 1}, {"x": 2}],
}
OPTIONS = [{}, {"frozen": True}, {"eq": False}, {"frozen": True, "eq": False}, {"frozen": True, "kw_only": True}]


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def _told(made: Callable[..., type], dataclass: Callable[..., Any], options: dict[str, Any]) -> list[Any]:
    """What a class of one kind answers: compared, hashed, shown, changed, replaced, listed."""
    kind = made(dataclass, **options)
    values = [kind(**given) for given in MADE[made]]
    hashed = [value for value in values if kind.__hash__]
    return [
        [[one == other for one in [*values, 1, (1,)]] for other in values],
        [[hash(one) == hash(other) for one in hashed] for other in hashed],
        len(set(hashed)),
        [repr(value) for value in values],
        [dataclasses.asdict(value) for value in values],
        [dataclasses.asdict(dataclasses.replace(value)) for value in values],
        [field.name for field in dataclasses.fields(kind)],
        str(inspect.signature(kind)),
        inspect.get_annotations(kind.__init__),
        get_type_hints(kind.__init__),
        kind.__init__.__qualname__,
        kind.__match_args__,
        _refusal(lambda: kind(1, "b")),
        _refusal(lambda: setattr(values[0], "x", 5)),
        _refusal(lambda: setattr(values[0], "y", 5)),
        _refusal(lambda: delattr(values[0], "x")),
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__[1:])
def test_they_answer_as_those_of_the_standard_library(made: Callable[..., type], options: dict[str, Any]) -> None:
    assert _told(made, ours, options) == _told(made, dataclasses.dataclass, options)


def test_a_value_that_holds_itself_is_shown() -> None:
    one = _plain(ours)(1)
    one.name = one
    assert repr(one).endswith("Point(x=1, name=...)")


def test_classes_of_users_inherit_as_from_those_of_the_standard_library() -> None:
    """The page of own algorithms derives a frozen class by the standard library's own ``dataclass``."""

    @ours(frozen=True)
    class Ours:
        a: int = 1

    @dataclasses.dataclass(frozen=True)
    class Theirs(Ours):
        b: int = 2

    @ours(frozen=True)
    class Again(Theirs):
        c: int = 3

    assert (Theirs(3).a, Theirs(3).b, Again(b=5)) == (3, 2, Again(1, 5, 3))
    for value in (Ours(), Theirs(), Again()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.a = 4  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot inherit non-frozen dataclass from a frozen one"):
        dataclasses.dataclass(type("Loose", (Ours,), {"__annotations__": {}}))
