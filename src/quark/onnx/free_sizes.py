"""What free sizes are where samples are generated: small ones that models run on, the same wherever the name is.

    indices   [N, T]           1, 16
    sound     [T], [N, 1, T]   4096 values, more than the first layers of a model reach over; [N, T]: 512
    features  [N, 80, T]       64 steps
    pictures  [N, C, H, W]     3 channels, 32 x 32; [N, C, T, H, W]: 8 of them

A batch is 1, and so is whatever else is free. Sizes that are given hold for their names in other inputs, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

_INDICES, _VALUES, _SOUND, _STEPS = 16, 512, 4096, 64
#: More channels than a sound has.
_CHANNELS = 2


def usual_shapes(values: Sequence[ir.Value], given: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """A shape for every input whose rank is known.

    Args:
        values: the inputs.
        given: shapes of some of them.
    """
    named: dict[str, int] = {}
    for value in values:
        for dim, size in zip(value.shape or (), given.get(str(value.name), ()), strict=False):
            if _name(dim) is not None:
                named[str(_name(dim))] = size
    found = {}
    for value in sorted(values, key=_is_number):  # tables of places, which indices choose from, are short
        if value.shape is not None:
            defaults = _defaults(value, [one for one in values if one is not value])
            found[str(value.name)] = tuple(
                _size(dim, size, named) for dim, size in zip(value.shape, defaults, strict=True)
            )
    return found


def _name(dim: int | ir.SymbolicDim) -> str | None:
    return None if isinstance(dim, int) else dim.value


def _size(dim: int | ir.SymbolicDim, default: int, named: dict[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    return default if dim.value is None else named.setdefault(dim.value, default)


def _is_number(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _defaults(value: ir.Value, others: Sequence[ir.Value]) -> tuple[int, ...]:
    """What free sizes of an input are where nothing names them."""
    axes, number = tuple(value.shape or ()), _is_number(value)
    if len(axes) == 1:  # of several samples, a figure each
        batched = any(one.shape is not None and len(one.shape) and not isinstance(one.shape[0], int) for one in others)
        return (_SOUND if number and not batched else 1,)
    if len(axes) == 3:
        return (1, *_steps(axes, number))
    usual = {2: (1, _VALUES if number else _INDICES), 4: (1, 3, 32, 32), 5: (1, 3, 8, 32, 32)}
    return usual.get(len(axes), (1,) * len(axes))


def _steps(axes: Sequence[int | ir.SymbolicDim], number: bool) -> tuple[int, int]:
    """The last two of three sizes: features in a row, a sound, or states (layers, batch, features)."""
    if not number:
        return 1, _INDICES
    if isinstance(axes[0], int) and axes[0] != 1 and not isinstance(axes[1], int):
        return 1, 1
    sound = any(isinstance(size, int) and size <= _CHANNELS for size in axes[1:])
    return _SOUND if sound else _STEPS, _SOUND if sound else _STEPS
