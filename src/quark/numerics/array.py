"""The few places where NumPy and torch differ, so that the mathematics is written once.

A tensor brings its own namespace: torch is looked up in ``sys.modules`` (a torch tensor cannot exist before torch was
imported), never imported. Arithmetic is float32 on every device; exponents are read from the bits of the float32, so
nothing here depends on a logarithm.

Not handled: complex and string arrays, tensors on the meta device.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

#: What comes of arrays: an array of their library, whose own methods are there.
Same: TypeAlias = Any

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

    #: What is computed with.
    Array: TypeAlias = np.ndarray | torch.Tensor
    #: An array, or a number for all of its elements.
    Operand: TypeAlias = Array | float | np.number
else:  # torch is not imported for its name
    Array = Operand = Any

SIGN = -0x80000000  # the sign bit of a float32, as int32
INFINITY = 0x7F800000  # the exponent field of a float32, all ones: the bits of +inf
CLIP_SIZE = 1 << 12  # elements from which NumPy's clip, one pass but much ado, is faster than two passes
MAGNITUDE = 0x7FFFFFFF  # everything but the sign


def is_torch(x: Any) -> TypeIs[torch.Tensor]:
    """Whether ``x`` is a torch tensor (false, without importing torch, when torch is not loaded)."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def namespace(x: Any) -> Any:
    """The module whose functions work on ``x``: ``torch`` for its tensors, ``numpy`` for everything else."""
    return sys.modules["torch"] if is_torch(x) else np


def as_array(x: Any) -> Same:
    """``x`` itself (a tensor without its gradient) when it is an array; numbers, lists, NumPy scalars as an array."""
    return x.detach() if is_torch(x) else np.asarray(x)


def as_parameter(value: Any, x: Array | None) -> Same:
    """A scale or zero point as an array of the library and the device of ``x``; None: of NumPy."""
    if not is_torch(x):
        return np.asarray(value)
    return value.detach().to(x.device) if is_torch(value) else sys.modules["torch"].as_tensor(value, device=x.device)


def cast(x: Array, dtype: str) -> Same:
    """``x`` in the type that both libraries call ``dtype``; no copy when it has that type."""
    return x.to(getattr(sys.modules["torch"], dtype)) if is_torch(x) else x.astype(dtype, copy=False)


def float32(x: Array) -> Same:
    """``x`` as float32 (float64 is rounded, the 16-bit types are exact)."""
    return cast(x, "float32")


def cast_like(y: Same, x: Array) -> Same:
    """``y`` in the type of ``x``; integers and booleans, which cannot hold ``y``, stay float32."""
    if is_torch(x):
        return y.to(x.dtype) if x.dtype.is_floating_point else y
    return y if x.dtype.kind in "iub" else y.astype(x.dtype, copy=False)


def empty(shape: tuple[int, ...], dtype: str, like: Array) -> Same:
    """An uninitialized array of ``shape`` in the library and on the device of ``like``."""
    if not is_torch(like):
        return np.empty(shape, dtype)
    torch = sys.modules["torch"]
    if shares_memory(like):  # NumPy asks for large pages, which saves half of the time of a first touch
        return torch.from_numpy(np.empty(shape, dtype))
    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


def shares_memory(x: Array) -> bool:
    """Whether ``x`` is a tensor whose values NumPy can work on where they are: a plain one on the CPU."""
    if not is_torch(x):
        return False
    torch = sys.modules["torch"]
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided and x.device.type == "cpu"


def shared(x: Same) -> Same:
    """``x``, to be read or filled, as the array that the arithmetic works on.

    A tensor on the CPU becomes the NumPy array in the same memory (16-bit floats, to be read: in float32), whose
    functions cost half of torch's here; everything else stays as it is.
    """
    if not shares_memory(x):
        return x
    torch = sys.modules["torch"]
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x.detach()).numpy()


def arange(start: int, stop: int, like: Array) -> Same:
    """int64 start..stop-1 in the library and on the device of ``like``."""
    if is_torch(like):
        return sys.modules["torch"].arange(start, stop, device=like.device)
    return np.arange(start, stop, dtype=np.int64)


def to_bits(x: Array) -> Same:
    """The bits of float32 ``x`` as int32, sharing its memory."""
    return x.view(namespace(x).int32)


def from_bits(bits: Array) -> Same:
    """The float32 whose bits are the int32 ``bits``, sharing their memory."""
    return bits.view(namespace(bits).float32)


def chunk_size(x: Same) -> int:
    """Elements to work on at a time: temporaries stay in the cache, torch stays in one thread, a GPU takes all."""
    if on_gpu(x):
        return max(x.numel(), 1)
    if is_torch(x) and not shares_memory(x):
        return (1 << 15) - 1  # torch shares 2**15 elements among threads, which then wait
    return 1 << 16


def clip(x: Array, lo: Operand, hi: Operand, out: Same | None = None) -> Same:
    """``x`` limited to [lo, hi], which may be numbers or arrays; NaN stays NaN. ``out``: where to; it may be ``x``."""
    if is_torch(lo):  # torch's own clip is not vectorised for bounds that are tensors
        torch = sys.modules["torch"]
        above = torch.maximum(x, lo, out=out)
        return torch.minimum(above, hi, out=out)
    if not is_torch(x) and (x.size < CLIP_SIZE or np.size(lo) > 1):  # nor is NumPy's
        above = np.maximum(x, lo, out=out)
        return np.minimum(above, hi, out=above) if np.shape(above) else np.minimum(above, hi)
    return namespace(x).clip(x, lo, hi, out=out)


def has_nan(x: Array) -> bool:
    """Whether float ``x`` (any shape) has a NaN: its least value is NaN then, which is one pass and no mask."""
    if is_torch(x):
        return bool(x.isnan().any())
    return bool(np.isnan(np.min(x, initial=0.0)))


def pow2(exponent: Array) -> Same:
    """2.0**exponent as float32, exactly, for int32 exponents -149..128 (below: 0; 128: infinity)."""
    xp = namespace(exponent)
    normal = (exponent + 127) << 23
    subnormal = xp.ones_like(exponent) << clip(exponent + 149, 0, 23)
    subnormal *= cast(exponent >= -149, "int32")
    return from_bits(xp.where(exponent >= -126, normal, subnormal))


def on_gpu(x: Array) -> bool:
    """Whether ``x`` lives on another device than the CPU."""
    return is_torch(x) and x.device.type != "cpu"


def maybe(mask: Same) -> bool:
    """Whether any element of ``mask`` is set; on a GPU, where asking would wait for the device, always true."""
    return on_gpu(mask) or bool(mask.any())


def reaches(x: Array, limit: int) -> bool:
    """Whether an element of int32 ``x`` may be ``limit`` or more; on a GPU, which one would wait for, always true."""
    return on_gpu(x) or bool((x >= limit).any())


def block_max(x: Array, axis: int) -> Same:
    """The maximum along ``axis``, which stays with length 1."""
    if is_torch(x):
        return x.amax(dim=axis, keepdim=True)
    if axis not in (-1, x.ndim - 1):
        return x.max(axis=axis, keepdims=True)
    while x.shape[-1] and x.shape[-1] % 2 == 0:  # halves are vectorised, NumPy's reduction of short rows is not
        x = np.maximum(x[..., 0::2], x[..., 1::2])
    return x.max(axis=-1, keepdims=True)


def spread(parameter: Array, shape: tuple[int, ...]) -> Same:
    """``parameter``, which broadcasts to ``shape``, written out along a short last axis (NumPy loops over those)."""
    if is_torch(parameter) or parameter.shape[-1] != 1 or not 1 < shape[-1] <= 64 or parameter.size == 1:
        return parameter
    return np.repeat(parameter, shape[-1], axis=-1)


def repeat(x: Array, count: int, axis: int) -> Same:
    """Every element of ``x`` ``count`` times in a row along ``axis``."""
    if is_torch(x):
        return x.repeat_interleave(count, dim=axis)
    if count > 4:
        return np.repeat(x, count, axis=axis)
    out = np.empty((*x.shape[: axis + 1], count, *x.shape[axis + 1 :]), x.dtype)
    for k in range(count):  # a few strided copies are faster than many short runs
        out[(slice(None),) * (axis + 1) + (k,)] = x
    return out.reshape((*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :]))


def permute(x: Array, order: tuple[int, ...]) -> Same:
    """``x`` with its axes in ``order``, as a view."""
    return x.permute(order) if is_torch(x) else x.transpose(order)
