"""The first input of a call, which callers give by position, ``linear(x)``, or by its name, ``linear(input=x)``, and
hooks for a while, most of which look at it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

HIDDEN = "hidden_states"  # what transformers calls it, some blocks behind other positional arguments

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@lru_cache(maxsize=1024)
def first_name(forward: Callable[..., Any]) -> str:
    """The name of the first parameter of the ``forward`` of a class, behind ``self``."""
    return next(iter(list(inspect.signature(forward).parameters)[1:]), "")


def first_key(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Where the first input of a call of ``module`` is: 0, a keyword, or None where there is no input."""
    named = HIDDEN, first_name(getattr(module, "float_class", type(module)).forward)
    found = next((name for name in named if name in kwargs), None)
    return found or (0 if args else next(iter(kwargs), None))


def first_input(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What ``module`` is called with first; None where it is called with nothing."""
    key = first_key(module, args, kwargs)
    return args[0] if key == 0 else None if key is None else kwargs[str(key)]


def with_input(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any) -> Arguments:
    """The arguments of the same call with another first input."""
    key = first_key(module, args, kwargs)
    if key == 0:
        return (value, *args[1:]), dict(kwargs)
    return args, dict(kwargs) if key is None else {**kwargs, str(key): value}


@contextmanager
def attached(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that are there for a while."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield
