"""The few places where NumPy and torch differ, so that the mathematics is written once.

A tensor brings its own namespace: torch is looked up in ``sys.modules`` (a torch tensor cannot exist before torch was
imported), never imported. Arithmetic is float32 on every device; exponents are read from the bits of the float32, so
nothing here depends on a logarithm. Work goes through arrays in chunks whose temporaries stay in the cache.

Not handled: complex and string arrays, tensors on the meta device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor: one source, so one name

CHUNK = 1 << 16  # elements whose float32 temporaries stay in a core's cache

Index = tuple[slice, ...]


def is_torch(x: Any) -> bool:
    """Whether ``x`` is a torch tensor (false, without importing torch, when torch is not loaded)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def namespace(x: Any) -> Any:
    """The module whose functions work on ``x``: ``torch`` for its tensors, ``numpy`` for everything else."""
    return sys.modules["torch"] if is_torch(x) else np


def as_array(x: Any) -> Array:
    """``x`` itself when it is an array or a tensor; numbers, lists and NumPy scalars as an array."""
    return x if is_torch(x) else np.asarray(x)


def as_parameter(value: Any, x: Array) -> Array:
    """A scale or zero point as an array of the library and the device of ``x``."""
    if not is_torch(x):
        return np.asarray(value)
    return value.to(x.device) if is_torch(value) else sys.modules["torch"].as_tensor(value, device=x.device)


def cast(x: Array, dtype: str) -> Array:
    """``x`` in the type that both libraries call ``dtype``; no copy when it has that type."""
    return x.to(getattr(sys.modules["torch"], dtype)) if is_torch(x) else x.astype(dtype, copy=False)


def float32(x: Array) -> Array:
    """``x`` as float32 (float64 is rounded, the 16-bit types are exact)."""
    return cast(x, "float32")


def cast_like(y: Array, x: Array) -> Array:
    """``y`` in the type of ``x``; integers and booleans, which cannot hold ``y``, stay float32."""
    if is_torch(x):
        return y.to(x.dtype) if x.dtype.is_floating_point else y
    return y if x.dtype.kind in "iub" else y.astype(x.dtype, copy=False)


def empty(shape: tuple[int, ...], dtype: str, like: Array) -> Array:
    """An uninitialized array of ``shape`` in the library and on the device of ``like``."""
    if is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    return np.empty(shape, dtype)


def to_bits(x: Array) -> Array:
    """The bits of float32 ``x`` as int32, sharing its memory."""
    return x.view(namespace(x).int32)


def from_bits(bits: Array) -> Array:
    """The float32 whose bits are the int32 ``bits``, sharing their memory."""
    return bits.view(namespace(bits).float32)


def repeat(x: Array, count: int, axis: int) -> Array:
    """Every element of ``x`` ``count`` times in a row along ``axis``."""
    return x.repeat_interleave(count, dim=axis) if is_torch(x) else np.repeat(x, count, axis=axis)


def permute(x: Array, order: tuple[int, ...]) -> Array:
    """``x`` with its axes in ``order``, as a view."""
    return x.permute(order) if is_torch(x) else x.transpose(order)


def chunks(shape: tuple[int, ...], size: int = CHUNK) -> Iterator[Index]:
    """Indices that cut an array of ``shape`` into pieces of about ``size`` elements, leading axes first."""
    count = int(np.prod(shape, dtype=np.int64))
    axis = next((k for k, n in enumerate(shape) if n > 1), None)
    if axis is None or count <= size:
        yield (slice(None),) * len(shape)
        return
    row = count // shape[axis]
    step = max(1, size // row)
    for start in range(0, shape[axis], step):
        head = (*[slice(None)] * axis, slice(start, start + step))
        for tail in chunks(shape[axis + 1 :], size) if step == 1 else [(slice(None),) * (len(shape) - axis - 1)]:
            yield head + tail


def take(x: Array, index: Index) -> Array:
    """``x[index]``, where axes of length 1 (which broadcast) are kept whole."""
    return x[tuple(slice(None) if n == 1 else part for n, part in zip(x.shape, index, strict=True))]
