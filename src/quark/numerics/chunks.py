"""Work in pieces whose temporaries stay in the cache.

``elementwise`` and ``blockwise`` call a function on chunks of some 32 to 64 thousand elements, each with its own
parameters and its own rounding rule, and collect the results in one new array. Tensors on the CPU are worked on by
NumPy in their own memory. On a GPU, where a chunk would be a kernel launch, the whole tensor is one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np

from quark.numerics.array import (
    Array,
    Same,
    as_array,
    cast_like,
    chunk_size,
    empty,
    is_torch,
    namespace,
    on_gpu,
    shared,
    spread,
)
from quark.numerics.granularity import Granularity, Piece, Tensor
from quark.numerics.rounding import RULES, Rounding, Rule, noise_of, rule_of

Index: TypeAlias = tuple[slice, ...]
#: Elements of an array that is worked on in one piece.
SMALL = 1 << 14


def chunks(shape: tuple[int, ...], size: int, whole: int | None = None) -> Iterator[Index]:
    """Indices that cut an array of ``shape`` into pieces of about ``size`` elements, leading axes first.

    Axis ``whole`` is never cut.
    """
    count = int(np.prod(shape, dtype=np.int64))
    axis = next((k for k, n in enumerate(shape) if n > 1 and k != whole), None)
    if axis is None or count <= size:
        yield (slice(None),) * len(shape)
        return
    step = max(1, size // (count // shape[axis]))
    rest = tuple(1 if k <= axis and k != whole else n for k, n in enumerate(shape))
    inner = list(chunks(rest, size, whole)) if step == 1 else [(slice(None),) * len(shape)]
    for start in range(0, shape[axis], step):
        for index in inner:
            yield (*index[:axis], slice(start, start + step), *index[axis + 1 :])


def take(x: Array, index: Index) -> Same:
    """``x[index]``, where axes of length 1 (which broadcast) are kept whole."""
    return x[tuple(slice(None) if n == 1 else part for n, part in zip(x.shape, index, strict=True))]


def quiet() -> Any:
    """Silence for the overflows and NaNs that the arithmetic is built to carry."""
    return np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")


def blockwise(
    function: Callable[..., None],
    x: Array,
    parameters: tuple[Array, ...],
    granularity: Granularity,
    rounding: Rounding,
    dtype: str,
) -> Same:
    """``function(part of x, its parameters.., rule, out)`` over chunks of ``x``.

    Args:
        function: fills ``out``, a view of the shape of its first argument; it must not change the others.
        x: any shape.
        parameters: arrays of ``granularity.parameter_shape(x.shape)`` each, or with that many elements.
        granularity: which elements of ``x`` share a parameter.
        rounding: gives each chunk its rule.
        dtype: of the result.
    """
    shape = tuple(x.shape)
    if 0 < prod(shape) <= SMALL and rounding in RULES and not on_gpu(x):
        pieces = pieces_of(granularity, shape)
        values = shared(x)
        if len(pieces) == 1 and isinstance(values, np.ndarray):
            made = _at_once(function, values, tuple(map(shared, parameters)), pieces[0], RULES[str(rounding)], dtype)
            return namespace(x).from_numpy(made) if is_torch(x) else made
    out = empty(shape, dtype, x)
    noise = noise_of(rounding, shape, x)
    grids = [collapsed(shared(parameter).reshape(granularity.grid(shape))) for parameter in parameters]
    with quiet():
        for piece in pieces_of(granularity, shape):
            source, target = view(x, piece), view(out, piece)
            dither = None if noise is None else view(noise, piece)
            mine = [view_parameter(grid, piece) for grid in grids]
            for index in chunks(piece.shape, chunk_size(x)):
                rule = rule_of(rounding, None if dither is None else shared(dither[index]))
                part = shared(source[index])
                function(part, *(spread(take(p, index), part.shape) for p in mine), rule, shared(target[index]))
    return out


def collapsed(grid: Array) -> Same:
    """``grid`` (NumPy) as a single value of as many axes, where all are equal: that of symmetric zero points.

    An operation with one value takes a third to a sixth of the time of one that goes through an array.
    """
    if not isinstance(grid, np.ndarray) or grid.size < 2:
        return grid
    first = grid[(slice(0, 1),) * grid.ndim]
    return first if (grid == first).all() else grid


def _at_once(
    function: Callable[..., None],
    x: np.ndarray,
    parameters: tuple[Same, ...],
    piece: Piece,
    rule: Rule,
    dtype: str,
) -> np.ndarray:
    """The same for a small array of one piece, of which a graph may have thousands."""
    out = np.empty(piece.shape, dtype)
    mine = [spread(parameter.reshape(piece.parameter_shape), piece.shape) for parameter in parameters]
    with quiet():
        function(x.reshape(piece.shape), *mine, rule, out)
    return out.reshape(x.shape)


@lru_cache(maxsize=256)
def pieces_of(granularity: Granularity, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """The pieces of a tensor of ``shape``, with as few axes as possible; kept, because shapes come again."""
    pieces = tuple(granularity.pieces(shape))
    return (merge(pieces[0]),) if len(pieces) == 1 else pieces


def elementwise(function: Callable[[Array, Rule], Same], x: Array, rounding: Rounding) -> Same:
    """``function(part of x, rule)`` over chunks of ``x``, as float32."""

    def fill(part: Array, rule: Rule, out: Array) -> None:
        out[...] = function(part, rule)

    x = as_array(x)
    return blockwise(fill, x.reshape(-1), (), Tensor(), rounding, "float32").reshape(tuple(x.shape))


def like_input(y: Array, x: Array) -> Same:
    """``y`` in the floating type of ``x``; a NumPy scalar stays an array."""
    return cast_like(y, as_array(x))


def merge(piece: Piece) -> Piece:
    """``piece`` of a whole tensor with neighbouring axes joined where both share, or both own, their parameters."""
    sizes: list[int] = []
    shares: list[int] = []
    for size, share in zip(piece.shape, piece.parameter_shape, strict=True):
        if sizes and size == 1:
            continue
        if sizes and (sizes[-1] == 1 or (share == 1) == (shares[-1] == 1)):
            sizes[-1], shares[-1] = sizes[-1] * size, shares[-1] * share
        else:
            sizes, shares = [*sizes, size], [*shares, share]
    return piece._replace(shape=tuple(sizes), parameter_shape=tuple(shares))


def view(array: Array, piece: Piece) -> Same:
    """The part of ``array`` that ``piece`` names, in its split shape, sharing memory."""
    return (array[piece.part] if piece.part else array).reshape(piece.shape)


def view_parameter(array: Array, piece: Piece) -> Same:
    """The parameters of ``piece``, in the shape that broadcasts against it."""
    if isinstance(array, np.ndarray) and array.size == 1:
        return array.reshape((1,) * len(piece.parameter_shape))
    return (array[piece.parameter_part] if piece.parameter_part else array).reshape(piece.parameter_shape)
