"""Granularities against element-by-element loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quark.errors import ConfigError
from quark.numerics.chunks import chunks, merge
from quark.numerics.granularity import Block2D, Channel, Group, Tensor, Token

torch = pytest.importorskip("torch")

CASES = [
    (Tensor(), (2, 3, 4), ()),
    (Tensor(), (), ()),
    (Channel(0), (5, 3), (5,)),
    (Channel(-1), (5, 3), (3,)),
    (Channel(1), (2, 3, 4, 4), (3,)),
    (Group(-1, 32), (4, 64), (4, 2)),
    (Group(1, 5), (2, 7, 3), (2, 2, 3)),
    (Group(0, 100), (7,), (1,)),
    (Token(), (2, 3, 8), (2, 3)),
    (Token(), (8,), ()),
    (Block2D(2, 3), (5, 7), (3, 3)),
    (Block2D(128, 128), (3, 256, 130), (3, 2, 2)),
]


def owner(granularity, index: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Index of the parameter of an element, from the definition."""
    kind = type(granularity)
    if kind is Tensor:
        return ()
    if kind is Channel:
        return (index[granularity.axis],)
    if kind is Group:
        axis = granularity.axis % len(shape)
        return tuple(i // granularity.size if k == axis else i for k, i in enumerate(index))
    if kind is Token:
        return index[:-1]
    return (*index[:-2], index[-2] // granularity.rows, index[-1] // granularity.columns)


@pytest.mark.parametrize(("granularity", "shape", "expected"), CASES, ids=lambda v: str(v))
def test_parameter_shape(granularity, shape, expected):
    assert granularity.parameter_shape(shape) == expected


SMALL = [case[:2] for case in CASES if np.prod(case[1]) < 500]


@pytest.mark.parametrize(("granularity", "shape"), SMALL, ids=lambda v: str(v))
def test_tile_and_expand(granularity, shape):
    x = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    tiles = granularity.tile(x)
    parameter = tiles.max(axis=-1)
    assert tiles.shape[:-1] == granularity.parameter_shape(shape)
    rows: dict[tuple[int, ...], list[float]] = {}
    for index in np.ndindex(shape):
        rows.setdefault(owner(granularity, index, shape), []).append(float(x[index]))
    for key, values in rows.items():
        found = tiles[key]
        assert sorted(found[found != 0]) == sorted(values)  # the rest is padding
    expanded = granularity.expand(parameter, shape)
    for index in np.ndindex(shape):
        assert expanded[index] == max(rows[owner(granularity, index, shape)])
    np.testing.assert_array_equal(granularity.tile(torch.from_numpy(x)).numpy(), tiles)
    np.testing.assert_array_equal(granularity.expand(torch.from_numpy(np.asarray(parameter)), shape).numpy(), expanded)


@pytest.mark.parametrize(("granularity", "shape"), SMALL, ids=lambda v: str(v))
def test_pieces_pair_each_element_with_its_parameter(granularity, shape):
    """Every element is in exactly one piece, and broadcasts against its own parameter."""
    count = int(np.prod(granularity.grid(shape)))
    parameter = np.arange(count).reshape(granularity.grid(shape))
    own = np.array(granularity.expand(parameter.reshape(granularity.parameter_shape(shape)), shape))
    pieces = list(granularity.pieces(shape))
    seen = 0
    for piece in [*pieces, *map(merge, pieces[: len(pieces) == 1])]:
        part = own[piece.part].reshape(piece.shape) if piece.part else own.reshape(piece.shape)
        shared = parameter[piece.parameter_part] if piece.parameter_part else parameter
        assert (part == shared.reshape(piece.parameter_shape)).all()
        seen += part.size
    assert seen == own.size * (2 if len(pieces) == 1 else 1)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    size=st.integers(1, 60),
    whole=st.integers(0, 3),
)
def test_chunks_cover_once_and_keep_an_axis(shape, size, whole):
    seen = np.zeros(shape, int)
    for index in chunks(shape, size, whole):
        seen[index] += 1
        assert whole >= len(shape) or seen[index].shape[whole] == shape[whole]
        kept = shape[whole] if whole < len(shape) else 1
        assert seen[index].size <= max(size, kept)
    assert (seen == 1).all()


def test_refusals():
    with pytest.raises(ConfigError, match="axis 2 does not exist"):
        Channel(2).parameter_shape((3, 4))
    with pytest.raises(ConfigError, match="group size 0"):
        Group(-1, 0)
    with pytest.raises(ConfigError, match="needs two axes"):
        Block2D().parameter_shape((3,))
    with pytest.raises(ConfigError, match="1 x 1 or more"):
        Block2D(0, 4)


def test_names():
    assert [str(g) for g in (Tensor(), Channel(1), Group(-1, 32), Token())] == [
        "per tensor",
        "per channel (axis 1)",
        "per group of 32 (axis -1)",
        "per token",
    ]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 7), (7, 1)])
def test_blocks_of_one_row_or_column_are_blocks(rows: int, columns: int) -> None:
    assert Block2D(rows, columns).blocks((8, 9)) == (rows, columns)


@pytest.mark.parametrize(("rows", "columns"), [(0, 1), (1, 0), (-1, 4), (4, -1)])
def test_blocks_of_nothing_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(ConfigError, match="must be 1 x 1 or more"):
        Block2D(rows, columns)
