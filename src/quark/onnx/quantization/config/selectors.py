"""What a user writes to name nodes, as selectors: names, ``^patterns``, subgraphs ``([start names], [end names])``.

A list of subgraphs inside the list is the same as the subgraphs themselves. Anything else is an error that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.config.rules import Selector, Subgraph
from quark.errors import ConfigError

Excluded = str | tuple[list[str], list[str]]
_FORMS = "a node name, nor a pattern such as '^/layer1/.*', nor a subgraph ([start names], [end names])"


def parse_selectors(given: Any, source: str) -> tuple[Selector, ...]:
    """The selectors of a list.

    Args:
        given: what the user wrote.
        source: the field it stands in, for messages.

    Raises:
        ConfigError: it is not a list, or an entry is none of the three forms.
    """
    entries = parse_names(given, source)
    return tuple(selector for entry in entries for selector in _parse_entry(entry, source))


def parse_names(given: Any, source: str) -> tuple[Any, ...]:
    """The entries of a list; a bare text would otherwise be read letter by letter.

    Raises:
        ConfigError: it is not a list.
    """
    if isinstance(given, str):
        raise ConfigError(f"{source}: give a list, [{given!r}], not the text {given!r}")
    if isinstance(given, Mapping) or not hasattr(given, "__iter__"):
        raise ConfigError(f"{source}: give a list of names, not {given!r}")
    return tuple(given)


def parse_types(given: Any, source: str) -> tuple[str, ...]:
    """The operator types of a list.

    Raises:
        ConfigError: it is not a list, or an entry is not text.
    """
    for entry in (names := parse_names(given, source)):
        if not isinstance(entry, str):
            raise ConfigError(f"{source}: an operator type is a text such as 'Conv', not {entry!r}")
    return names


def parse_mapping(given: Any, source: str, key: type) -> dict[Any, Any]:
    """A dictionary from layer configurations (or ``None``) to lists.

    Raises:
        ConfigError: it is no such dictionary.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{source}: give a dictionary {{{key.__name__}(…): [names]}}, not {given!r}")
    for layer in given:
        if layer is not None and not isinstance(layer, key):
            raise ConfigError(f"{source}: its keys are {key.__name__}(…) or None, not {layer!r}")
    return dict(given)


def _parse_entry(entry: Any, source: str) -> tuple[Selector, ...]:
    if isinstance(entry, str):
        return (entry,)
    if _is_subgraph(entry):
        return (Subgraph(tuple(entry[0]), tuple(entry[1])),)
    if isinstance(entry, (list, tuple)) and entry and all(_is_subgraph(one) for one in entry):
        return tuple(Subgraph(tuple(start), tuple(end)) for start, end in entry)
    raise ConfigError(f"{source}: {entry!r} is neither {_FORMS}")


def _is_subgraph(entry: Any) -> bool:
    return isinstance(entry, (list, tuple)) and len(entry) == 2 and all(_is_name_list(side) for side in entry)


def _is_name_list(side: Any) -> bool:
    return isinstance(side, (list, tuple)) and bool(side) and all(isinstance(name, str) for name in side)
