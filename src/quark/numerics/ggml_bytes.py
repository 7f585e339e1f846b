"""Blocks of GGML: codes and scales as the bytes that llama.cpp reads. x = d (q - offset) + m  in blocks of 32.

    Q4_0   d, 16 bytes of nibbles             offset 8        Q8_0    d, 32 int8
    Q4_1   d, m, 16 bytes of nibbles                          MXFP4   E8M0 byte, 16 bytes of E2M1 nibbles
    Q5_0, Q5_1   as Q4_0, Q4_1 with 4 bytes of fifth bits between; offset 16
    Q2_K   256 numbers: 16 bytes of scale and minimum (4 bits each), 2-bit codes, d, dmin;        x = d s q - dmin m
    Q3_K   256 numbers: upper bits, lower two bits, 16 scales of 6 bits, d;                       x = d s (q - 4)
    Q4_K, Q5_K   256 numbers: d, dmin, 8 scales and 8 minima of 6 bits, nibbles (and fifth bits); x = d s q - dmin m
    Q6_K         256 numbers: low nibbles, upper two bits, 16 int8 scales, d;                     x = d s (q - 32)

d and m are float16. Nibble j of a block of 32 sits beside nibble j + 16. How values become codes: ``ggml``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from quark.errors import ConfigError
from quark.numerics.packing import halves, pack

BLOCK, SUPER = 32, 256
PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]  # where the four pairs of bits of a byte begin


class Fields(NamedTuple):
    """What blocks hold, [n, ..], as float32 whole numbers but for the first two.

    Attributes:
        d, dmin: float16 values, [n].
        scales, minima: multiples of them, [n, sub-blocks]; x = d s q - dmin m. Blocks of 32 have 1 and -1.
        codes: [n, sub-blocks, numbers], from 0; around 0 where the type's are signed.
    """

    d: np.ndarray
    dmin: np.ndarray
    scales: np.ndarray
    minima: np.ndarray
    codes: np.ndarray


def mxfp4_block(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Rows of E2M1 codes with E8M0 exponents [n, k] as bytes."""
    rows, columns = codes.shape
    nibbles = pack(codes.reshape(rows, columns // BLOCK, BLOCK), 4, order=halves(BLOCK))
    return np.concatenate([exponents.astype(np.uint8)[..., None], nibbles], axis=-1).reshape(rows, -1)


def half(values: np.ndarray) -> np.ndarray:
    """float16 as bytes, on a new last axis.

    Raises:
        ConfigError: a value that float16 cannot hold.
    """
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise ConfigError(f"GGUF scales are float16, and one is {float(np.abs(values).max()):g}")
    return rounded[..., None].view(np.uint8)


def q4_0(found: Fields) -> np.ndarray:
    """Blocks of 32 as 18 bytes each."""
    return np.concatenate([half(found.d), nibbles(whole(found.codes) + 8)], axis=-1)


def q4_1(found: Fields) -> np.ndarray:
    """Blocks of 32 as 20 bytes each."""
    return np.concatenate([half(found.d), half(found.dmin), nibbles(whole(found.codes))], axis=-1)


def q5_0(found: Fields) -> np.ndarray:
    """Blocks of 32 as 22 bytes each."""
    return np.concatenate([half(found.d), *fifth_bits(whole(found.codes) + 16)], axis=-1)


def q5_1(found: Fields) -> np.ndarray:
    """Blocks of 32 as 24 bytes each."""
    return np.concatenate([half(found.d), half(found.dmin), *fifth_bits(whole(found.codes))], axis=-1)


def q8_0(found: Fields) -> np.ndarray:
    """Blocks of 32 as 34 bytes each."""
    return np.concatenate([half(found.d), whole(found.codes).astype(np.int8).view(np.uint8)], axis=-1)


def q2_k(found: Fields) -> np.ndarray:
    """Super-blocks [n, 256] as 84 bytes each."""
    scales = (whole(found.scales) | whole(found.minima) << 4).astype(np.uint8)
    return np.concatenate([scales, two_bits(packed(found.codes)), half(found.d), half(found.dmin)], axis=-1)


def q3_k(found: Fields) -> np.ndarray:
    """Super-blocks [n, 256] as 110 bytes each."""
    codes, shifted = packed(found.codes + 4), packed(found.scales + 32)
    upper = np.bitwise_or.reduce((codes.reshape(-1, 8, 32) >> 2) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    low = shifted[:, :8] & 15 | (shifted[:, 8:] & 15) << 4
    high = np.bitwise_or.reduce((shifted >> 4).reshape(-1, 4, 4) << PAIRS, axis=1)
    return np.concatenate([upper, two_bits(codes & 3), low, high, half(found.d)], axis=-1)


def q4_k(found: Fields) -> np.ndarray:
    """Super-blocks [n, 256] as 144 bytes each."""
    scales = six_bits(packed(found.scales), packed(found.minima))
    return np.concatenate([half(found.d), half(found.dmin), scales, nibble_pairs(packed(found.codes))], axis=-1)


def q5_k(found: Fields) -> np.ndarray:
    """Super-blocks [n, 256] as 176 bytes each."""
    codes, scales = packed(found.codes), six_bits(packed(found.scales), packed(found.minima))
    high = np.bitwise_or.reduce((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([half(found.d), half(found.dmin), scales, high, nibble_pairs(codes & 15)], axis=-1)


def q6_k(found: Fields) -> np.ndarray:
    """Super-blocks [n, 256] as 210 bytes each."""
    codes = packed(found.codes + 32).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    scales = whole(found.scales).astype(np.int8).view(np.uint8)
    return np.concatenate([low.reshape(len(codes), -1), two_bits(codes >> 4), scales, half(found.d)], axis=-1)


def whole(codes: np.ndarray) -> np.ndarray:
    """Codes as integers, [n, all]."""
    return codes.reshape(len(codes), -1).astype(np.int16)


def packed(codes: np.ndarray) -> np.ndarray:
    """Codes that are not below 0 as bytes, in their shape."""
    return codes.astype(np.uint8)


def nibbles(codes: np.ndarray) -> np.ndarray:
    """32 codes of 4 bits in 16 bytes."""
    return np.asarray(pack(codes.astype(np.uint8), 4, order=halves(BLOCK)))


def fifth_bits(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """32 codes of 5 bits: the fifth bits in 4 bytes, the others in 16."""
    return np.packbits(codes >= 16, axis=-1, bitorder="little"), nibbles(codes & 15)


def two_bits(codes: np.ndarray) -> np.ndarray:
    """256 codes of 2 bits in 64 bytes: code j of 128 sits above codes j + 32, j + 64 and j + 96."""
    return np.bitwise_or.reduce(codes.reshape(-1, 2, 4, 32) << PAIRS, axis=2).reshape(len(codes), -1)


def six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Eight scales and eight minima of 6 bits in 12 bytes; the upper bits of the last four lie above the first."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    third = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=-1)


def nibble_pairs(codes: np.ndarray) -> np.ndarray:
    """[n, 8, 32] codes of 4 bits: sub-blocks two by two, the first in the low nibbles."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(len(codes), -1)
