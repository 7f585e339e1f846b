"""Codes narrower than a byte, packed and unpacked; whole arrays at a time, on NumPy and torch.

Codes run along the last axis and form a stream of bits, cut into bytes:

    first = "low"    code i fills bits i*b .. i*b + b - 1 counted from the lowest bit of the first byte: ONNX INT4, INT2
                     and FLOAT4E2M1, MXFP4 and MXFP6 files, 3-bit weights (little endian)
    first = "high"   counted from the highest bit: 2-bit weights of the torch flow

``order`` permutes every run of ``len(order)`` codes: position k of a run takes code ``order[k]``. ``AWQ_ORDER`` is
the order of AWQ kernels in a 32-bit word, ``halves(n)`` that of GGUF blocks (byte j holds codes j and j + n/2). Missing
codes at the end of a row are zero; ``unpack`` takes the number of codes that were there.
"""

from __future__ import annotations

import sys
from math import lcm

import numpy as np

from quark.errors import ConfigError, check_name
from quark.numerics.array import Array, Same, as_array, cast, empty, is_torch, namespace, shared, shares_memory
from quark.numerics.granularity import pad

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CACHED = 1 << 17  # codes that are packed at a time


def halves(count: int) -> tuple[int, ...]:
    """The order that puts codes j and j + count/2 next to each other."""
    return tuple(j // 2 + (count // 2) * (j % 2) for j in range(count))


def pack(codes: Array, bits: int, first: str = "low", order: tuple[int, ...] | None = None, word: int = 1) -> Same:
    """``codes`` [.., n] as bytes [.., ceil(n * bits / 8)], each row filled up to whole words.

    Args:
        codes: integers; only their lowest ``bits`` count, so signed codes become two's complement.
        bits: width of a code, 1..8.
        first: where the first code of a byte lies, "low" or "high".
        order: permutation within each run of codes, or None.
        word: bytes that a row is a multiple of (4 for rows that are viewed as int32).

    Returns:
        uint8 array of the library and device of ``codes``.
    """
    codes = as_array(codes)
    run, size = group(bits, first)
    if first == "low" and (made := packed_by_eight(codes, bits, order, word)) is not None:
        return made
    count = codes.shape[-1]
    multiple = lcm(lcm(bits, 8 * word) // bits, len(order or (0,)))
    whole = -(-count // multiple) * multiple
    codes = permuted(pad(codes, (*codes.shape[:-1], whole)), order)
    stream = cast(codes, word_dtype(size)) & ((1 << bits) - 1)
    stream = stream.reshape((*stream.shape[:-1], whole // run, run))
    words = stream[..., 0] << position(0, run, bits, first)
    for k in range(1, run):
        words |= stream[..., k] << position(k, run, bits, first)
    out = empty((*words.shape, size), "uint8", words)
    for k in range(size):
        out[..., k] = words if size == 1 else cast((words >> position(k, size, 8, first)) & 0xFF, "uint8")
    out = out.reshape((*codes.shape[:-1], whole // run * size))
    kept = -(-count * bits // (8 * word)) * word
    return out if order is not None else out[..., :kept]


def packed_by_eight(codes: Array, bits: int, order: tuple[int, ...] | None, word: int) -> Same | None:
    """What ``pack`` makes of rows of whole words on the CPU, eight codes per operation; None: the codes are others.

    Eight bytes are an int64 whose fields move together in three steps; a few rows at a time, so that what is computed
    stays in the cache.
    """
    count = codes.shape[-1] if codes.ndim == 2 else 0
    known = order is None or (order == AWQ_ORDER and bits == 4)
    if not known or bits == 8 or not count or count % 8 or count * bits % (8 * word) or codes.dtype.itemsize != 1:
        return None
    if sys.byteorder != "little" or (is_torch(codes) and not shares_memory(codes)):
        return None
    values = shared(codes)
    if order is not None and values.T.flags.c_contiguous and not values.flags.c_contiguous:
        out = across_rows(values.T, order)
    else:
        out = np.empty((values.shape[0], count // 8, bits), np.uint8)
        step = max(1, CACHED // count)
        for k in range(0, len(out), step):
            words = np.ascontiguousarray(values[k : k + step]).view(np.int64)
            made = folded(words, bits, order)
            if bits == 4:  # halves of words are copied faster than bytes of them
                out[k : k + step, :, :].view(np.int32)[..., 0] = made.view(np.int32)[:, ::2]
            else:
                out[k : k + step] = made.view(np.uint8).reshape(-1, count // 8, 8)[..., :bits]
    out = out.reshape(values.shape[0], count * bits // 8)
    return namespace(codes).from_numpy(out) if is_torch(codes) else out


def folded(words: np.ndarray, bits: int, order: tuple[int, ...] | None) -> np.ndarray:
    """int64 words of eight bytes with the lowest ``bits`` of each next to each other, in ``order``."""
    if order is not None:
        return joined(words) | joined(words >> 8) << 16
    for lane in (8, 16, 32):
        width = bits * lane // 8
        even = sum(((1 << width) - 1) << at for at in range(0, 64, 2 * lane))
        words = (words & even) | ((words >> lane - width) & (even << width))
    return words


def across_rows(columns: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """The words of a matrix whose transpose [8 n, m] lies in memory, as bytes [m, 4 n]: only words are transposed."""
    groups = columns.reshape(-1, 8, columns.shape[1])
    words = np.empty((groups.shape[0], columns.shape[1]), np.int32)
    step = max(1, CACHED // (8 * columns.shape[1]))
    for k in range(0, len(words), step):
        part, octets = groups[k : k + step], words[k : k + step].view(np.uint8).reshape(-1, columns.shape[1], 4)
        for low, high, place in zip(order[::2], order[1::2], range(4), strict=True):
            octets[..., place] = (part[:, low] & 0xF).view(np.uint8) | part[:, high].view(np.uint8) << 4
    return np.ascontiguousarray(words.T).view(np.uint8)


def joined(words: np.ndarray) -> np.ndarray:
    """The low nibbles of bytes 0, 2, 4 and 6 of int64 words, as 16 bits."""
    words = words & 0x000F000F000F000F
    words = (words | words >> 12) & 0x000000FF000000FF
    return (words | words >> 24) & 0xFFFF


def unpack(
    packed: Array, bits: int, count: int, first: str = "low", order: tuple[int, ...] | None = None, signed: bool = False
) -> Same:
    """The ``count`` codes per row that ``pack`` was given, as int8 (``signed``) or uint8.

    Args:
        packed: uint8 [.., m] as ``pack`` returned it.
        bits, first, order: as given to ``pack``.
        count: codes per row.
        signed: the highest bit of a code is its sign.

    Raises:
        ConfigError: a row has too few bytes for ``count`` codes.
    """
    packed = as_array(packed)
    run, size = group(bits, first)
    if packed.shape[-1] * 8 < count * bits:
        raise ConfigError(f"{packed.shape[-1]} bytes do not hold {count} codes of {bits} bits")
    if first == "low" and (made := unpacked_by_eight(packed, bits, count, order, signed)) is not None:
        return made
    words_per_row = -(-packed.shape[-1] // size)
    packed = cast(pad(packed, (*packed.shape[:-1], words_per_row * size)), word_dtype(size))
    packed = packed.reshape((*packed.shape[:-1], words_per_row, size))
    words = packed[..., 0] << position(0, size, 8, first)
    for k in range(1, size):
        words |= packed[..., k] << position(k, size, 8, first)
    codes = empty((*words.shape, run), "uint8", words)
    for k in range(run):
        codes[..., k] = cast((words >> position(k, run, bits, first)) & ((1 << bits) - 1), "uint8")
    codes = codes.reshape((*words.shape[:-1], words_per_row * run))
    codes = permuted(codes, inverse(order))[..., :count]
    return sign_extended(codes, bits) if signed else codes


def unpacked_by_eight(packed: Array, bits: int, count: int, order: tuple[int, ...] | None, signed: bool) -> Same | None:
    """What ``unpack`` makes of rows of whole words on the CPU, the way back of ``packed_by_eight``; None: others."""
    known = order is None or (order == AWQ_ORDER and bits == 4)
    if not known or bits == 8 or packed.ndim != 2 or not packed.shape[0] or packed.shape[1] * 8 != count * bits:
        return None
    if count % 8 or not count or sys.byteorder != "little" or (is_torch(packed) and not shares_memory(packed)):
        return None
    values = np.ascontiguousarray(shared(packed)).reshape(-1, bits)
    out = np.empty((len(values), 8), np.uint8)
    for k in range(0, len(out), CACHED // 8):
        part = out[k : k + CACHED // 8]
        part.view(np.int64)[:, 0] = unfolded(widened(values[k : k + len(part)]), bits, order)
        if signed:
            part ^= 1 << bits - 1
            part -= 1 << bits - 1
    codes = out.view(np.int8 if signed else np.uint8).reshape(-1, count)
    return namespace(packed).from_numpy(codes) if is_torch(packed) else codes


def widened(values: np.ndarray) -> np.ndarray:
    """Rows of up to eight bytes as int64 words, whose other bytes are not defined or zero."""
    if values.shape[1] == 4:  # halves of words are copied faster than bytes of them
        return values.view(np.int32)[:, 0].astype(np.int64)
    words = np.zeros((len(values), 8), np.uint8)
    words[:, : values.shape[1]] = values
    return words.view(np.int64)[:, 0]


def unfolded(words: np.ndarray, bits: int, order: tuple[int, ...] | None) -> np.ndarray:
    """int64 words whose eight bytes are the fields of ``bits`` that ``folded`` joined."""
    if order is not None:
        return parted(words) | parted(words >> 16) << 8
    for lane in (32, 16, 8):
        width = bits * lane // 8
        even = sum(((1 << width) - 1) << at for at in range(0, 64, 2 * lane))
        words = (words & even) | ((words << lane - width) & (even << lane))
    return words


def parted(words: np.ndarray) -> np.ndarray:
    """The nibbles of the lowest 16 bits of int64 words in bytes 0, 2, 4 and 6: the way back of ``joined``."""
    words = words & 0xFFFF
    words = (words | words << 24) & 0x000000FF000000FF
    return (words | words << 12) & 0x000F000F000F000F


def group(bits: int, first: str) -> tuple[int, int]:
    """The shortest run of codes that fills whole bytes, and how many bytes."""
    if not 1 <= bits <= 8:
        raise ConfigError(f"codes of {bits} bits cannot be packed into bytes; 1 to 8 can")
    check_name("place of the first code", first, ("low", "high"))
    total = lcm(bits, 8)
    return total // bits, total // 8


def word_dtype(size: int) -> str:
    """An integer type that holds ``size`` bytes."""
    return "uint8" if size == 1 else "int32" if size < 4 else "int64"


def position(k: int, count: int, width: int, first: str) -> int:
    """The lowest bit of the k-th of ``count`` fields of ``width`` bits in a word."""
    return width * (k if first == "low" else count - 1 - k)


def permuted(codes: Array, order: tuple[int, ...] | None) -> Same:
    """Every run of ``len(order)`` codes of a row in ``order``."""
    if order is None:
        return codes
    runs = codes.reshape(-1, len(order))
    return namespace(codes).stack([runs[..., k] for k in order], -1).reshape(codes.shape)  # faster than an index


def inverse(order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The permutation that undoes ``order``."""
    return None if order is None else tuple(order.index(k) for k in range(len(order)))


def sign_extended(codes: Array, bits: int) -> Same:
    """uint8 ``codes`` of ``bits`` bits in two's complement as int8."""
    half = 1 << bits - 1
    return cast((cast(codes, "int16") ^ half) - half, "int8")
