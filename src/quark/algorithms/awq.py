"""AWQ: activation-aware weight quantization (Lin et al. 2023), on the weights of linear layers that read one tensor.

    scales   s = mean|x|^a / max|w|^b, a in 0 .. 1, b in 0 .. 0.5: the best by |Q(W s) / s x - W x|
    clips    each group of a weight is clipped to 1, 0.95 .. 0.55 of its largest magnitude: the best by
             (dw) H_gg (dw)^T, with H_gg the block of the Hessian that belongs to the group

Clips are kept per group where they are better, and a row whose whole error does not fall keeps its weights. Query and
key projections are not clipped: their errors multiply. NumPy and torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product

from quark.algorithms.smoothquant import SMALLEST_WEIGHT
from quark.numerics.array import Array, Same, clip, float32, namespace
from quark.numerics.granularity import Group, pad

#: Exponents of the coarse grid, of activations and of weights.
GRID = ((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), (0.0, 0.25, 0.5))
FINER = 1  # times that a grid is halved around the best
CLIPS = 10
SHRINK = 0.05
UNCLIPPED = ("q_", "k_", "query", "key", "Wqkv", "qkv", "c_attn")
SMALLEST = 1e-4
Pair = tuple[float, float]
Rounded = Callable[[Array, Array], Iterable[Same]]  # a weight limited to each of some limits


def scale_of(inputs: Array, weights: Array, exponents: Pair) -> Same:
    """inputs^a / weights^b, so scaled that its largest and smallest value are reciprocal."""
    a, b = exponents
    xp = namespace(inputs)
    s = xp.clip(inputs, SMALLEST, None) ** a / xp.clip(weights, SMALLEST_WEIGHT, None) ** b
    return s / xp.sqrt(s.max() * s.min())


def best_exponents(errors: Callable[[list[Pair]], Sequence[float]], grid: Sequence[Sequence[float]] = GRID) -> Pair:
    """The exponents of least error: of the grid, then of the neighbours of the best at half the distance.

    Args:
        errors: of some pairs; asked once for each.
        grid: the values of both exponents, rising; the same value throughout: that one is fixed.
    """
    known: dict[Pair, float] = {}

    def best(pairs: Iterable[Pair]) -> Pair:
        listed = list(pairs)
        new = [pair for pair in dict.fromkeys(listed) if pair not in known]
        known.update(zip(new, errors(new), strict=True))
        return min(listed, key=lambda pair: (known[pair], pair))

    middle = best((a, b) for a, b in product(*grid))
    steps = [(values[1] - values[0]) if len(values) > 1 else 0.0 for values in grid]
    for _ in range(FINER):
        steps = [step / 2 for step in steps]
        middle = best(_around(middle, steps))
    return middle


def _around(middle: Pair, steps: Sequence[float]) -> Iterator[Pair]:
    """A pair of exponents and its neighbours that are not negative."""
    rows = ((value - step, value, value + step) for value, step in zip(middle, steps, strict=True))
    return ((a, b) for a, b in product(*rows) if a >= 0 and b >= 0)


def is_clipped(name: str) -> bool:
    """Whether a layer of this name (its last part) takes clips."""
    return not any(word in name for word in UNCLIPPED)


def clipped(weight: Array, steps: Array, size: int) -> Same:
    """Each group of ``size`` columns limited to ``1 - SHRINK * steps`` of its largest magnitude.

    Args:
        weight: [rows, columns].
        steps: [rows, groups].
    """
    return _limited(weight, amax_of(weight, size) * (1 - SHRINK * steps), size)


def best_clips(
    weight: Array,
    quantized: Callable[[Array], Same],
    hessian: Array,
    size: int,
    most: int | None = None,
    alone: Rounded | None = None,
) -> Same | None:
    """How far each group of a weight is best clipped, uint8 [rows, groups]; None where nothing is gained.

    Args:
        weight: [rows, columns].
        quantized: a weight as it will be rounded.
        hessian: of the layer's inputs, [columns, columns].
        size: columns that share a scale in a row.
        most: values that are searched together, where ``quantized`` rounds rows by themselves; None: all.
        alone: columns [rows, size] of one group, limited to each of [limits, rows, 1], as they will be rounded, where
            ``quantized`` rounds groups by themselves and ``size`` divides the columns; None: it does not.
    """
    xp, blocks, (height, width) = namespace(weight), diagonal_blocks(hessian, size), weight.shape

    def limited(values: Array, limits: Array) -> Iterator[Same]:
        return (quantized(_limited(values, limit, size)) for limit in limits)

    wide, rounded = (width, limited) if alone is None else (size, alone)
    high = height if most is None else max(1, most // wide)
    errors, kept = xp.empty_like(weight), xp.empty_like(weight)
    steps = 0 * amax_of(weight, size)
    for start, k in product(range(0, height, high), range(0, width, wide)):
        part, groups = (slice(start, start + high), slice(k, k + wide)), slice(k // size, -(-(k + wide) // size))
        steps[part[0], groups], errors[part], kept[part] = _best_of_groups(weight[part], rounded, blocks[groups], size)
    gained = (((errors - kept) @ float32(hessian)) * (errors + kept)).sum(1)[:, None]  # e H e - k H k, by one product
    if not bool((gained > 0).any()):
        return None
    return xp.asarray(xp.where(gained > 0, steps, 0 * steps), dtype=xp.uint8)


def _best_of_groups(weight: Array, rounded: Rounded, blocks: Array, size: int) -> tuple[Array, Array, Array]:
    """The best steps of each group by itself, and the errors of rounding without and with them."""
    xp, widest = namespace(weight), amax_of(weight, size)
    every = iter(rounded(weight, xp.stack([widest * (1 - SHRINK * step) for step in range(CLIPS)])))
    errors = next(every) - weight
    lowest, steps = group_losses(errors, blocks, size), xp.zeros_like(widest)
    for step, error in enumerate(every, 1):
        error -= weight
        losses = group_losses(error, blocks, size)
        better = losses < lowest
        lowest, steps = xp.where(better, losses, lowest), xp.where(better, xp.full_like(steps, step), steps)
    (best,) = rounded(weight, (widest * (1 - SHRINK * steps))[None])
    return steps, errors, best - weight


def tiles(x: Array, size: int) -> Same:
    """[rows, columns] as [rows, groups, size], padded with 0."""
    return Group(1, size).tile(x)


def amax_of(weight: Array, size: int) -> Same:
    """The largest magnitude per row and group, [rows, groups]."""
    return namespace(weight).amax(abs(tiles(weight, size)), -1)


def _limited(weight: Array, bound: Array, size: int) -> Same:
    """Each group of a weight limited to its bound."""
    limit = bound[..., None]
    return clip(tiles(weight, size), -limit, limit).reshape(len(weight), -1)[:, : weight.shape[1]]


def diagonal_blocks(hessian: Array, size: int) -> Same:
    """H_gg of each group, [groups, size, size], padded with 0."""
    starts = range(0, hessian.shape[0], size)
    blocks = (hessian[start : start + size, start : start + size] for start in starts)
    return namespace(hessian).stack([pad(block, (size, size)) for block in blocks])


def group_losses(error: Array, blocks: Array, size: int) -> Same:
    """e_g H_gg e_g^T per row and group, [rows, groups]."""
    parts = pad(error, (len(error), len(blocks) * size)).reshape(len(error), len(blocks), size).swapaxes(0, 1)
    return ((parts @ blocks) * parts).sum(-1).T
