"""Hadamard matrices are what they claim to be, and rotations turn without stretching."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch

from quark.algorithms.hadamard import block_size, factors, jacobsthal, kernel, paley, rotation
from quark.errors import ConfigError

SIZES = (11008, 14336, 13824, 5120, 3072, 896, 18944, 4864, 704, 256, 1, 2)  # of real models, and the smallest


@pytest.mark.parametrize("order", [1, 2, 4, 8, 12, 20, 24, 28, 36, 44, 52, 60, 68, 76, 84, 108, 140, 148, 344, 128])
def test_hadamard(order: int) -> None:
    matrix = reduce(np.kron, map(kernel, factors(order) or ()), np.ones((1, 1), np.int64))
    assert set(np.unique(matrix)) <= {-1, 1}
    assert np.array_equal(matrix @ matrix.T, order * np.eye(order))


@pytest.mark.parametrize("q", [3, 5, 9, 25, 27])
def test_jacobsthal(q: int) -> None:
    matrix = jacobsthal(q).astype(np.int64)
    assert np.array_equal(matrix @ matrix.T, q * np.eye(q) - np.ones((q, q)))
    assert np.array_equal(matrix, matrix.T if q % 4 == 1 else -matrix.T)


def test_both_constructions_of_paley_are_used() -> None:
    assert {order: paley(order) for order in (12, 28, 36, 148, 344, 92)} == {
        12: 1, 28: 1, 36: 2, 148: 2, 344: 1, 92: 0,
    }  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_sizes_of_real_models_are_turned_whole(size: int) -> None:
    turned = rotation(size)
    assert block_size(turned) == size == np.prod(turned.orders)
    x = np.random.default_rng(0).standard_normal((3, size))
    y = turned.apply(x)
    assert np.allclose((y**2).sum(-1), (x**2).sum(-1))
    assert np.allclose(turned.apply_transposed(y), x)
    spread = turned.apply(np.eye(1, size, size // 2))
    assert np.allclose(np.abs(spread), size**-0.5)


@pytest.mark.parametrize(("size", "block"), [(92, 4), (6, 6), (7, 7), (260, 52), (1, 1)])
def test_other_sizes(size: int, block: int) -> None:
    turned = rotation(size)
    matrix = turned.matrix()
    assert block_size(turned) == block
    assert np.allclose(matrix @ matrix.T, np.eye(size))
    if size > 1:
        assert np.count_nonzero(np.abs(matrix) > 1e-9) >= size * (block - 1)


def test_blocks_and_signs() -> None:
    turned = rotation(96, 32, seed=3)
    matrix = turned.matrix()
    assert np.allclose(matrix[:32, 32:], 0) and np.allclose(np.abs(matrix[:32, :32]), 32**-0.5)
    assert not np.allclose(matrix, rotation(96, 32).matrix()) and np.allclose(matrix @ matrix.T, np.eye(96))
    assert np.array_equal(matrix, rotation(96, 32, seed=3).matrix())


def test_numpy_and_torch_agree() -> None:
    x = np.random.default_rng(1).standard_normal((2, 5, 344 * 2)).astype(np.float32)
    turned = rotation(344 * 2, seed=1)
    assert np.allclose(turned.apply(torch.tensor(x)).numpy(), turned.apply(x), atol=1e-5)
    assert turned.apply(torch.tensor(x).bfloat16()).dtype == torch.bfloat16
    assert np.allclose(turned.apply(x), x @ turned.matrix().astype(np.float32), atol=1e-4)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="20 does not divide 64; 8, 16, 32"):
        rotation(64, 20)
    with pytest.raises(ConfigError, match="order 92"):
        rotation(184, 92)
    with pytest.raises(ConfigError, match="vectors of 5"):
        rotation(4).apply(np.ones(5))
    assert factors(92) is None and factors(6) is None and factors(3) is None
    assert kernel(4).dtype == np.int8
