"""Names and globs of layers, and sizes of groups: what needs names and lengths alone, and so no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from quark.errors import ConfigError, nearest
from quark.numerics.formats import Format, Int
from quark.numerics.ggml import GGML, Ggml
from quark.numerics.granularity import WHOLE, Channel, Group, normal_axis
from quark.torch.stage import Stage


class Usual(str):
    """A pattern of a template: it may match nothing, where one that a user wrote must match."""


def matches(names: Iterable[str], pattern: str) -> bool:
    """Whether a name or glob fits any name of a layer."""
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def check_pattern(
    field: str, pattern: str, known: Iterable[str], everything: Sequence[str], layers: Sequence[str]
) -> None:
    """A name or glob of a configuration matches something.

    Args:
        field: of the configuration.
        pattern: name or glob; a usual one of a template need not match.
        known: names that it may match.
        everything: names of all modules.
        layers: names of those that can be quantized.

    Raises:
        ConfigError: it matches nothing, or is the name of a module that holds layers.
    """
    if isinstance(pattern, Usual):
        return
    if not matches(known, pattern):
        raise ConfigError(f"{field}: {pattern!r} matches no layer of the model.{hint(pattern, everything, layers)}")
    holds = any(name.startswith(f"{pattern}.") for name in layers)
    if holds and pattern in everything and not matches(layers, pattern):
        raise ConfigError(f"{field}: {pattern!r} is a module that holds layers; write {pattern + '.*'!r}")


def hint(pattern: str, everything: Sequence[str], layers: Sequence[str]) -> str:
    """What the user may have meant: a subtree, the name with a wildcard before it, or the nearest name."""
    inside = [name for name in everything if name == pattern and any(x.startswith(f"{name}.") for x in layers)]
    if inside:
        return f" {pattern!r} holds layers; {pattern + '.*'!r} names them."
    suffix = "*" + pattern.lstrip("*")
    if any(fnmatchcase(name, suffix) for name in layers):
        return f" Did you mean {suffix!r}?"
    last = pattern.rsplit(".", 1)[-1].strip("*")
    parts = sorted({name.rsplit(".", 1)[-1] for name in layers})
    close = difflib.get_close_matches(last, parts, n=1)
    return nearest(pattern, layers) or (f" Did you mean {'*' + close[0]!r}?" if close else "")


def check_fit(what: str, shape: tuple[int, ...], stage: Stage) -> None:
    """The axes exist, and groups divide their axis (the blocks of block formats may end short)."""
    granularity = stage.spec.granularity
    granularity.blocks(shape) if not isinstance(granularity, Channel | Group) else axis_of(what, shape, granularity)
    if isinstance(granularity, Group):
        check_group(what, shape[axis_of(what, shape, granularity)], granularity.size, stage.format)


def axis_of(what: str, shape: tuple[int, ...], granularity: Channel | Group) -> int:
    """The axis of a granularity, from the front."""
    if not -len(shape) <= granularity.axis < len(shape):
        raise ConfigError(f"{what} has the shape {list(shape)}, so there is no axis ch_axis={granularity.axis}")
    return normal_axis(granularity.axis, shape)


def check_group(what: str, length: int, size: int, format: Format) -> None:
    """Groups of integers divide the axis (the nearest sizes that do are named), and so do blocks of GGML."""
    if isinstance(format, Ggml) and length % size:
        smaller = ", ".join(row.kind for row in GGML.values() if row.size < size and length % row.size == 0)
        remedy = f"; {smaller} would fit" if smaller else "; leave it float (--exclude)"
        raise ConfigError(f"{what} has rows of {length} numbers, and {format.kind} has blocks of {size}{remedy}")
    if size == WHOLE or not isinstance(format, Int) or length % size == 0:
        return
    divisors = [n for n in range(1, length + 1) if length % n == 0]
    near = sorted(sorted(divisors, key=lambda n: abs(n - size))[:3])
    raise ConfigError(
        f"{what}: group_size={size} does not divide the {length} elements of its axis; "
        f"{', '.join(map(str, near))} would, and -1 takes the whole axis"
    )
