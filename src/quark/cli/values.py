"""The options of a command as one value: a frozen dataclass, whose annotated fields are the options.

    @dataclass(frozen=True, kw_only=True)
    class Search:
        model: Annotated[Path, Reads(), typer.Argument(help="The float model.")]
        exclude: Annotated[tuple[str, ...], typer.Option(help="May be repeated.")] = ()
        source: Source = Source()

    @app.command()
    @takes_values(samples=16)
    def search(request: Search) -> None: ...

The command has the options of every dataclass among its parameters, and of those inside of them. A field of the type
``tuple[X, ...]`` is an option that may be repeated; a field without marks is none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cached_property
from typing import Annotated, Any, get_args, get_origin, get_type_hints

FIXED = "fixed"
"""Marks a field of a dataclass's type that a command has no options for."""
_KIND = inspect.Parameter.KEYWORD_ONLY


def takes_values(samples: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the parameters of a command that are dataclasses by their options.

    Args:
        samples: what ``--samples`` is by default, where the command differs from the dataclass.
    """

    return lambda command: Command(command, {} if samples is None else {"samples": samples})


class Command:
    """A command as typer reads one: a function whose parameters are options.

    They are looked up when they are asked for: most commands are not called.

    Args:
        command: what takes dataclasses.
        defaults: of options, where they differ from the dataclasses'.
    """

    def __init__(self, command: Callable[..., None], defaults: Mapping[str, Any]) -> None:
        self._command, self._defaults = command, defaults
        self.__name__, self.__doc__, self.__module__ = command.__name__, command.__doc__, command.__module__

    def __call__(self, **given: Any) -> None:
        """Make the dataclasses of the options, and run."""
        requests = {name: made(cls, given) for name, cls in self._values.items()}
        self._command(**requests, **{name: given[name] for name in self._parameters if name not in requests})

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self._command, eval_str=True).parameters

    @cached_property
    def _values(self) -> dict[str, Any]:
        return {name: one.annotation for name, one in self._parameters.items() if is_dataclass(one.annotation)}

    @cached_property
    def __signature__(self) -> inspect.Signature:
        options: list[inspect.Parameter] = []
        for name, one in self._parameters.items():  # arguments stand in the order of the signature
            options += options_of(self._values[name]) if name in self._values else [one.replace(kind=_KIND)]
        every = [one.replace(default=self._defaults.get(one.name, one.default)) for one in options]
        return inspect.Signature(every, return_annotation=None)

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {one.name: one.annotation for one in self.__signature__.parameters.values()} | {"return": None}


def options_of(cls: Any) -> Iterator[inspect.Parameter]:
    """The parameters of a command for the fields of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from options_of(hint)
        elif get_origin(hint) is Annotated and FIXED not in get_args(hint):
            default: Any = inspect.Parameter.empty if field.default is MISSING else field.default
            if _repeated(hint):
                item, *marks = get_args(hint)
                annotated: Any = Annotated
                several: Any = list[get_args(item)[0]]  # type: ignore[misc]
                parts = (several if field.default is MISSING else several | None, *marks)
                hint = annotated[parts]
                default = None if default == () else default
            yield inspect.Parameter(field.name, _KIND, default=default, annotation=hint)


def made(cls: Any, given: dict[str, Any]) -> Any:
    """The dataclass, from the values of its options."""
    hints = get_type_hints(cls, include_extras=True)
    values = {}
    for field in fields(cls):
        hint = hints[field.name]
        if is_dataclass(hint):
            values[field.name] = made(hint, given)
        elif get_origin(hint) is Annotated and FIXED not in get_args(hint):
            value = given[field.name]
            values[field.name] = tuple(value or ()) if _repeated(hint) else value
    return cls(**values)


def _repeated(hint: Any) -> bool:
    return get_origin(get_args(hint)[0]) is tuple
