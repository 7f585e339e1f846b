"""HQQ lowers its own objective, group by group."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quark.algorithms.hqq import HQQParameters, error, hqq
from quark.numerics.affine import Grid
from quark.numerics.formats import FORMATS

P = 0.7


def start(symmetric: bool, name: str) -> tuple[np.ndarray, HQQParameters]:
    tiles = np.random.default_rng(0).standard_t(4, (40, 64)).astype(np.float32)
    found = Grid(FORMATS[name], symmetric, narrow=False).parameters(tiles.min(-1), tiles.max(-1))
    return tiles, HQQParameters(*found)


def losses(tiles: np.ndarray, parameters: HQQParameters, name: str) -> np.ndarray:
    rows = HQQParameters(*(np.asarray(value, np.float32).reshape(-1, 1) for value in parameters))
    return error(tiles, rows, FORMATS[name], P)[:, 0]


@pytest.mark.parametrize(
    ("name", "symmetric", "move_scale"),
    [("uint4", False, False), ("uint4", False, True), ("int4", True, True), ("uint2", False, False)],
)
def test_every_group_gets_no_worse_and_most_get_better(name: str, symmetric: bool, move_scale: bool) -> None:
    tiles, first = start(symmetric, name)
    found = hqq(tiles, first, FORMATS[name], move_scale)
    before, after = losses(tiles, first, name), losses(tiles, found, name)
    assert (after <= before).all()
    assert (after < before).mean() > 0.5
    assert np.array_equal(found.zero if move_scale else found.scale, first.zero if move_scale else first.scale)


def test_scale_and_zero_together_beat_either_alone() -> None:
    tiles, first = start(False, "uint3")
    alone = [losses(tiles, hqq(tiles, first, FORMATS["uint3"], move), "uint3").sum() for move in (False, True)]
    both = hqq(tiles, first, FORMATS["uint3"], True, move_zero=True)
    assert losses(tiles, both, "uint3").sum() < 0.98 * min(alone)
    assert (losses(tiles, both, "uint3") <= losses(tiles, first, "uint3")).all()


def test_constant_groups_keep_finite_parameters() -> None:
    tiles = np.full((3, 8), 0.5, np.float32)
    found = hqq(
        tiles, HQQParameters(np.ones(3, np.float32), np.zeros(3, np.float32)), FORMATS["uint4"], True, move_zero=True
    )
    assert np.isfinite(found.scale).all() and np.isfinite(found.zero).all()


def test_numpy_and_torch_agree() -> None:
    tiles, first = start(False, "uint4")
    found = hqq(tiles, first, FORMATS["uint4"])
    other = hqq(torch.tensor(tiles), HQQParameters(*map(torch.tensor, first)), FORMATS["uint4"])
    assert np.allclose(other.zero.numpy(), found.zero, atol=1e-3)
