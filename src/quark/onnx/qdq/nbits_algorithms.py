"""How a weight becomes codes of few bits in groups: one row of ``ALGORITHMS`` per value of ``Algorithm``.

    w ≈ scale (code - zero point),   a scale and a zero point for every ``GroupSize`` elements of a row

DEFAULT rounds to nearest. A symmetric group has its zero in the middle of the codes, 2^(b-1); of two scales the one of
least squared error is taken: the element of largest magnitude on the lowest code (all codes are used), or that
magnitude on the highest code. Otherwise the group's range, with 0 in it, is spread over all codes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quark.config.nbits import NBits
from quark.dataclass import dataclass
from quark.numerics.elements import Element
from quark.numerics.formats import get_format

#: Elements that are rounded at a time.
CHUNK = 1 << 20


@dataclass(frozen=True)
class WeightGroups:
    """A weight in groups.

    Attributes:
        codes: uint8 [rows, groups, group size], 0 .. 2^bits - 1; elements beyond the row's end stand for 0.
        scales: float32 [rows, groups].
        zero_points: uint8 [rows, groups]; ``None``: 2^(bits-1) everywhere.
    """

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None


@dataclass(frozen=True)
class NBitsAlgorithm:
    """One algorithm.

    Attributes:
        run: (weight float32 [rows, columns], parameters) -> blocks.
        needs_data: whether the weights are put on a grid before they are written, from calibration data
            (``quark.onnx.algorithms.nbits``); ``run`` is then for those that have no data.
    """

    run: Callable[[np.ndarray, NBits], WeightGroups]
    needs_data: bool = False


def nearest(weight: np.ndarray, nbits: NBits) -> WeightGroups:
    """Round to nearest."""
    rows, columns = weight.shape
    groups = -(-columns // nbits.GroupSize)
    codes = np.empty((rows, groups, nbits.GroupSize), np.uint8)
    scales = np.empty((rows, groups), np.float32)
    zero_points = None if nbits.Symmetric else np.empty((rows, groups), np.uint8)
    step = max(1, CHUNK // max(columns, 1))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        tiled = _tiled(weight[part], groups, nbits.GroupSize)
        if zero_points is None:
            codes[part], scales[part] = _symmetric(tiled, nbits.Bits)
        else:
            codes[part], scales[part], zero_points[part] = _asymmetric(tiled, nbits.Bits)
    return WeightGroups(codes, scales, zero_points)


def _tiled(weight: np.ndarray, groups: int, size: int) -> np.ndarray:
    """[rows, groups, size] float32, filled up with zeros."""
    tiled = np.zeros((len(weight), groups * size), np.float32)
    tiled[:, : weight.shape[1]] = weight
    return tiled.reshape(len(weight), groups, size)


def _symmetric(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    half = 1 << (bits - 1)
    place = np.abs(x).argmax(-1)[..., None]
    extreme = np.take_along_axis(x, place, -1)[..., 0]
    first, second = (_rounded(x, scale, half) for scale in (-extreme / half, np.abs(extreme) / (half - 1)))
    better = second[2] < first[2]
    codes, scales = np.where(better[..., None], second[0], first[0]), np.where(better, second[1], first[1])
    return (codes + half).astype(np.uint8), scales


def _rounded(x: np.ndarray, scale: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signed codes, scales and squared errors under one scale per group."""
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    codes = np.clip(np.rint(x / scale[..., None]), -half, half - 1)
    return codes, scale, np.square(codes * scale[..., None] - x).sum(-1)


def _asymmetric(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    most = (1 << bits) - 1
    low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    scale = ((high - low) / most).astype(np.float32)
    scale = np.where(scale == 0, np.float32(1), scale)
    zero_point = np.minimum(np.rint(-low / scale), most)
    codes = np.clip(np.rint(x / scale[..., None]) + zero_point[..., None], 0, most)
    return codes.astype(np.uint8), scale, zero_point.astype(np.uint8)


def half_quadratic(weight: np.ndarray, nbits: NBits) -> WeightGroups:
    """HQQ: the zero points of rounding to nearest (the runtime takes integers), scales moved for outliers' sake."""
    from quark.algorithms.hqq import HQQParameters, hqq  # few models ask for it

    found, kind = nearest(weight, nbits), get_format(f"uint{nbits.Bits}")
    tiles = _tiled(weight, found.scales.shape[1], nbits.GroupSize).reshape(-1, nbits.GroupSize)
    half = np.full(found.scales.shape, 1 << (nbits.Bits - 1), np.uint8)
    zero = half if found.zero_points is None else found.zero_points
    sign = np.sign(np.asarray(found.scales, np.float32)).reshape(-1)  # none is 0
    if not isinstance(kind, Element):
        raise TypeError(f"{kind.name} has no codes")
    scale = np.asarray(found.scales, np.float32).reshape(-1) * sign  # negative ones are positive for mirrored weights
    moved = hqq(tiles * sign[:, None], HQQParameters(scale, zero.reshape(-1)), kind, True, False).scale
    scale = (np.asarray(moved) * sign).reshape(found.scales.shape)
    return WeightGroups(on_grid(weight, nbits, scale, zero), scale, found.zero_points)


def on_grid(weight: np.ndarray, nbits: NBits, scales: np.ndarray, zero_points: np.ndarray) -> np.ndarray:
    """The codes of a weight under given parameters, [rows, groups, group size]."""
    tiled = _tiled(np.asarray(weight, np.float32), scales.shape[1], nbits.GroupSize)
    codes = np.rint(tiled / scales[..., None]) + zero_points[..., None].astype(np.float32)
    return np.asarray(np.clip(codes, 0, (1 << nbits.Bits) - 1), np.uint8)


def values_of(blocks: WeightGroups, bits: int, columns: int) -> np.ndarray:
    """The weight [rows, columns] that blocks stand for, float32."""
    middle = np.float32(1 << (bits - 1))
    zero = middle if blocks.zero_points is None else blocks.zero_points[..., None].astype(np.float32)
    values = (blocks.codes.astype(np.float32) - zero) * blocks.scales[..., None]
    return values.reshape(len(values), -1)[:, :columns]


ALGORITHMS: dict[str, NBitsAlgorithm] = {
    "DEFAULT": NBitsAlgorithm(nearest),
    "GPTQ": NBitsAlgorithm(nearest, needs_data=True),
    "HQQ": NBitsAlgorithm(half_quadratic),
}
