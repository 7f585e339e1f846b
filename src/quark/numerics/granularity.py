"""Which elements share a scale, as a value: ``Tensor()``, ``Channel(axis)``, ``Group(axis, size)``, ``Token()``,
``Block2D(rows, columns)``.

Every granularity is a block length per axis: the parameters form the grid of ``ceil(n / block)`` blocks, and
``parameter_shape`` is that grid without the axes on which all elements share one parameter. A group that does not
divide its axis leaves a shorter last group. The rest (tiling, broadcasting, views for the arithmetic) follows from the
block lengths alone, so a new granularity is one class with one method.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from numbers import Integral
from typing import NamedTuple, TypeAlias

from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.numerics.array import Array, Same, is_torch, namespace, permute, repeat

Shape: TypeAlias = tuple[int, ...]
WHOLE = 1 << 62  # a group longer than any axis
Index: TypeAlias = tuple[slice, ...]


class Piece(NamedTuple):
    """A part of a tensor and its parameters, as views that broadcast against each other."""

    part: Index  # of the tensor
    shape: Shape  # to view that part in, blocked axes split in two
    parameter_part: Index  # of the parameter grid
    parameter_shape: Shape  # to view that part in


@dataclass(frozen=True)
class Granularity:
    """Base of the granularities; a subclass says how long a block is on each axis."""

    def blocks(self, shape: Shape) -> Shape:
        """Block length on each axis of a tensor of ``shape``."""
        raise NotImplementedError

    def parameter_shape(self, shape: Shape) -> Shape:
        """Shape of the scales of a tensor of ``shape``."""
        return self.grid(shape)

    def grid(self, shape: Shape) -> Shape:
        """Number of blocks on each axis of a tensor of ``shape``."""
        return tuple(-(-n // b) for n, b in zip(shape, self.blocks(shape), strict=True))

    def tile(self, x: Array) -> Same:
        """``x`` as [*parameter_shape, n], one row of n elements per parameter; short blocks are padded with 0."""
        shape = tuple(x.shape)
        grid, blocks = self.grid(shape), self.blocks(shape)
        split = tuple(itertools.chain.from_iterable(zip(grid, blocks, strict=True)))
        order = (*range(0, 2 * len(shape), 2), *range(1, 2 * len(shape), 2))
        padded = pad(x, tuple(g * b for g, b in zip(grid, blocks, strict=True)))
        return permute(padded.reshape(split), order).reshape((*self.parameter_shape(shape), prod(blocks)))

    def elements(self, x: Array) -> list[Same]:
        """The elements of each parameter, [n]; those of a short last block alone, without padding."""
        tiled = self.tile(x)
        count = prod(tiled.shape[:-1])
        there = self.tile(namespace(x).ones_like(x)).reshape((count, -1)) > 0
        return [row[part] for row, part in zip(tiled.reshape((count, -1)), there, strict=True)]

    def expand(self, parameter: Same, shape: Shape) -> Same:
        """``parameter`` (of ``parameter_shape``) broadcast to one value per element of a tensor of ``shape``."""
        grid = parameter.reshape(self.grid(shape))
        for axis, (count, block) in enumerate(zip(grid.shape, self.blocks(shape), strict=True)):
            if count > 1 and block > 1:
                grid = repeat(grid, block, axis)[(slice(None),) * axis + (slice(0, shape[axis]),)]
        return namespace(parameter).broadcast_to(grid, shape)

    def pieces(self, shape: Shape) -> Iterator[Piece]:
        """Parts of a tensor of ``shape`` (one, and one more per short last block) with the views that broadcast."""
        if not shape:  # a scalar is worked on as a vector of one
            yield Piece((), (1,), (), (1,))
            return
        spans = [spans_of(n, b) for n, b in zip(shape, self.blocks(shape), strict=True)]
        for span in itertools.product(*spans):
            yield Piece(
                tuple(s.elements for s in span),
                tuple(itertools.chain.from_iterable(s.shape for s in span)),
                tuple(s.blocks for s in span),
                tuple(itertools.chain.from_iterable(s.parameter_shape for s in span)),
            )


class Span(NamedTuple):
    """Consecutive blocks of equal length on one axis."""

    elements: slice
    blocks: slice
    shape: Shape
    parameter_shape: Shape


def spans_of(length: int, block: int) -> list[Span]:
    """An axis of ``length`` as its whole blocks and, where they do not divide it, the short last one."""
    count, rest = divmod(length, block)
    split, shared = ((count, block), (count, 1)) if count > 1 and block > 1 else ((count * block,), (count,))
    spans = [Span(slice(0, count * block), slice(0, count), split, shared)] if count else []
    if rest:
        spans.append(Span(slice(count * block, length), slice(count, count + 1), (rest,), (1,)))
    return spans


def pad(x: Array, shape: Shape) -> Same:
    """``x`` with zeros appended on each axis up to ``shape``; ``x`` itself when nothing is missing."""
    if tuple(x.shape) == shape:
        return x
    padded: Same = x.new_zeros(shape) if is_torch(x) else namespace(x).zeros_like(x, shape=shape)
    padded[tuple(slice(0, n) for n in x.shape)] = x
    return padded


def check_integer(name: str, value: object) -> None:
    """Raise for a field of a granularity that is no integer."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"the {name} of a granularity must be an integer, not {value!r}")


def normal_axis(axis: int, shape: Shape) -> int:
    """``axis`` counted from the front; an axis that ``shape`` does not have is an error."""
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(f"axis {axis} does not exist in a tensor of shape {tuple(shape)}")
    return axis % len(shape)


def whole(shape: Shape) -> Shape:
    """The lengths of all axes, as long blocks; an empty one has blocks of one element."""
    return tuple(max(n, 1) for n in shape)


@dataclass(frozen=True)
class Tensor(Granularity):
    """One parameter for the whole tensor."""

    def blocks(self, shape: Shape) -> Shape:
        """The whole of every axis."""
        return whole(shape)

    def parameter_shape(self, shape: Shape) -> Shape:
        """Always ()."""
        return ()

    def grid(self, shape: Shape) -> Shape:
        """One block, for an empty tensor too."""
        return (1,) * len(shape)

    def __str__(self) -> str:
        return "per tensor"


@dataclass(frozen=True)
class Channel(Granularity):
    """One parameter per index of ``axis``."""

    axis: int

    def __post_init__(self) -> None:
        check_integer("axis", self.axis)

    def blocks(self, shape: Shape) -> Shape:
        """1 on ``axis``, the whole of the others."""
        axis = normal_axis(self.axis, shape)
        return tuple(1 if k == axis else n for k, n in enumerate(whole(shape)))

    def parameter_shape(self, shape: Shape) -> Shape:
        """(C,)."""
        return (shape[normal_axis(self.axis, shape)],)

    def grid(self, shape: Shape) -> Shape:
        """C on ``axis``, 1 elsewhere."""
        axis = normal_axis(self.axis, shape)
        return tuple(n if k == axis else 1 for k, n in enumerate(shape))

    def __str__(self) -> str:
        return f"per channel (axis {self.axis})"


@dataclass(frozen=True)
class Group(Granularity):
    """One parameter per ``size`` consecutive elements along ``axis``; the last group may be shorter."""

    axis: int
    size: int

    def __post_init__(self) -> None:
        check_integer("axis", self.axis)
        check_integer("size", self.size)
        if self.size < 1:
            raise ConfigError(f"group size {self.size} must be 1 or more")

    def blocks(self, shape: Shape) -> Shape:
        """``size`` on ``axis`` (less when the axis is shorter), 1 elsewhere."""
        axis = normal_axis(self.axis, shape)
        return tuple(min(self.size, n) if k == axis else 1 for k, n in enumerate(whole(shape)))

    def __str__(self) -> str:
        whole = self.size == WHOLE
        return f"per whole axis {self.axis}" if whole else f"per group of {self.size} (axis {self.axis})"


@dataclass(frozen=True)
class Token(Granularity):
    """One parameter per vector of the last axis: all leading dimensions keep their own."""

    def blocks(self, shape: Shape) -> Shape:
        """1, but the whole of the last axis."""
        return (*[1] * (len(shape) - 1), *whole(shape)[-1:])

    def parameter_shape(self, shape: Shape) -> Shape:
        """shape[:-1]."""
        return tuple(shape[:-1])

    def grid(self, shape: Shape) -> Shape:
        """The leading dimensions, and 1."""
        return (*shape[:-1], *[1] * (len(shape) > 0))

    def __str__(self) -> str:
        return "per token"


@dataclass(frozen=True)
class Block2D(Granularity):
    """One parameter per ``rows`` x ``columns`` block of the last two axes; blocks at the edges may be smaller."""

    rows: int = 128
    columns: int = 128

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ConfigError(f"block of {self.rows} x {self.columns} must be 1 x 1 or more")

    def blocks(self, shape: Shape) -> Shape:
        """(1, .., rows, columns)."""
        if len(shape) < 2:
            raise ConfigError(f"a 2-D block needs two axes, and a tensor of shape {tuple(shape)} has {len(shape)}")
        rows, columns = whole(shape)[-2:]
        return (*[1] * (len(shape) - 2), min(self.rows, rows), min(self.columns, columns))

    def __str__(self) -> str:
        return f"per block of {self.rows} x {self.columns}"
