"""Options as one value: a class whose annotated rows are the options, and whose values hold what was given for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import FrozenInstanceError
from typing import Any, ClassVar, Self

from quark.dataclass import dataclass


@dataclass(frozen=True)
class Option:
    """A row of the table.

    Attributes:
        default: what it is where nothing is said.
        group: of the published list of the interface.
        doc: its effect, in a sentence.
    """

    default: Any
    group: int
    doc: str


def option(default: Any, group: int, doc: str) -> Any:
    """A row, in the place of what its annotation promises: a value's own attribute."""
    return Option(default, group, doc)


class OptionTable:
    """Base of a table: ``Name: type = option(default, group, doc)`` in its body are the rows. Values do not change.

    Attributes:
        ROWS: by name.
    """

    ROWS: ClassVar[Mapping[str, Option]] = {}

    def __init_subclass__(cls) -> None:
        cls.ROWS = {name: row for name, row in vars(cls).items() if isinstance(row, Option)}

    def __init__(self, **given: Any) -> None:
        if strange := given.keys() - self.ROWS.keys():
            raise TypeError(f"there are no options {sorted(strange)}")
        vars(self).update({name: copy(row.default) for name, row in self.ROWS.items()} | given)
        vars(self)["_given"] = frozenset(given)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in self.ROWS)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and dict(self) == dict(other)

    def __repr__(self) -> str:
        said = (f"{name}={value!r}" for name, value in self if name in self.given)
        return f"{type(self).__name__}({', '.join(said)})"

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to option {name!r}")

    @property
    def given(self) -> frozenset[str]:
        """The options that were set, to whatever."""
        return vars(self)["_given"]

    def changed(self, others: Mapping[str, Any]) -> Self:
        """The same with other values, which count as given."""
        return type(self)(**{name: getattr(self, name) for name in self.given} | dict(others))
