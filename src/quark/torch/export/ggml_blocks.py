"""Blocks of GGML: rows of numbers as the bytes that llama.cpp reads. x = d (q - offset) + m  in blocks of 32.

    Q4_0   d, 16 bytes of nibbles             offset 8        Q8_0    d, 32 int8
    Q4_1   d, m, 16 bytes of nibbles                          MXFP4   E8M0 byte, 16 bytes of E2M1 nibbles
    Q5_0, Q5_1   as Q4_0, Q4_1 with 4 bytes of fifth bits between; offset 16
    Q2_K   256 numbers: 16 bytes of scale and minimum (4 bits each), 2-bit codes, d, dmin;        x = d s q - dmin m
    Q3_K   256 numbers: upper bits, lower two bits, 16 scales of 6 bits, d;                       x = d s (q - 4)
    Q4_K, Q5_K   256 numbers: d, dmin, 8 scales and 8 minima of 6 bits, nibbles (and fifth bits); x = d s q - dmin m
    Q6_K         256 numbers: low nibbles, upper two bits, 16 int8 scales, d;                     x = d s (q - 32)

d and m are float16. Nibble j of a block of 32 sits beside nibble j + 16. What has codes already (int4, uint4, int8,
MXFP4) keeps them; K-quants are rounded to nearest here, without an importance matrix.
"""

from __future__ import annotations

import numpy as np

from quark.errors import ConfigError, unknown
from quark.numerics.packing import halves, pack

BLOCK, SUPER = 32, 256
SCALE_MAX = 63
PAIRS = np.array([0, 2, 4, 6], np.uint8)[:, None]  # where the four pairs of bits of a byte begin


def simple_block(kind: str, codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None = None) -> np.ndarray:
    """Rows [n, 32 k] of codes that are unsigned (int8 for Q8_0), with ``scale`` and ``minimum`` [n, k], as bytes."""
    rows, columns = codes.shape
    blocks = codes.reshape(rows, columns // BLOCK, BLOCK)
    fields = [half(scale)] + ([half(minimum)] if minimum is not None else [])
    if kind == "Q8_0":
        fields.append(blocks.astype(np.int8).view(np.uint8))
    else:
        fields.append(pack(blocks.astype(np.uint8), 4, order=halves(BLOCK)))
    return np.concatenate(fields, axis=-1).reshape(rows, -1)


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


def k_block(kind: str, values: np.ndarray) -> np.ndarray:
    """Rows [n, 256 k] of float32 values as bytes.

    Raises:
        ConfigError: no such type.
    """
    if kind not in K_QUANTS:
        raise ConfigError(unknown("K-quant", kind, K_QUANTS))
    rows = values.shape[0]
    return K_QUANTS[kind](values.astype(np.float32).reshape(-1, SUPER)).reshape(rows, -1)


def q2_k(x: np.ndarray) -> np.ndarray:
    """Super-blocks [n, 256] as 84 bytes each."""
    d, dmin, (scales, minima), codes = affine_codes(x, 3, 16, 15)
    return np.concatenate([scales | minima << 4, two_bits(codes), half(d), half(dmin)], axis=-1)


def q3_k(x: np.ndarray) -> np.ndarray:
    """Super-blocks [n, 256] as 110 bytes each."""
    d, scales, codes = signed_codes(x, 4, 32)
    upper = np.bitwise_or.reduce((codes.reshape(-1, 8, 32) >> 2) << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    shifted = (scales + 32).astype(np.uint8)
    low = shifted[:, :8] & 15 | (shifted[:, 8:] & 15) << 4
    high = np.bitwise_or.reduce((shifted >> 4).reshape(-1, 4, 4) << PAIRS, axis=1)
    return np.concatenate([upper, two_bits(codes & 3), low, high, half(d)], axis=-1)


def two_bits(codes: np.ndarray) -> np.ndarray:
    """256 codes of 2 bits in 64 bytes: code j of 128 sits above codes j + 32, j + 64 and j + 96."""
    return np.bitwise_or.reduce(codes.reshape(-1, 2, 4, 32) << PAIRS, axis=2).reshape(len(codes), -1)


def q4_k(x: np.ndarray) -> np.ndarray:
    """Super-blocks [n, 256] as 144 bytes each."""
    d, dmin, scales, codes = affine_codes(x, 15)
    return np.concatenate([half(d), half(dmin), six_bits(*scales), nibble_pairs(codes)], axis=-1)


def q5_k(x: np.ndarray) -> np.ndarray:
    """Super-blocks [n, 256] as 176 bytes each."""
    d, dmin, scales, codes = affine_codes(x, 31)
    fifth = (codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]
    high = np.bitwise_or.reduce(fifth, axis=1)
    return np.concatenate([half(d), half(dmin), six_bits(*scales), high, nibble_pairs(codes & 15)], axis=-1)


def affine_codes(
    x: np.ndarray, largest: int, size: int = BLOCK, scale_max: int = SCALE_MAX
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray]:
    """d, dmin [n]; scales and minima [n, 256 / size] up to ``scale_max``; codes [n, .., size] to ``largest``."""
    blocks = x.reshape(-1, SUPER // size, size)
    low = np.minimum(blocks.min(-1), 0)
    step = (np.maximum(blocks.max(-1), 0) - low) / largest
    d, dmin = stored(step.max(-1) / scale_max), stored(-low.min(-1) / scale_max)
    scales = np.clip(np.rint(divided(step, d[:, None])), 0, scale_max)
    minima = np.clip(np.rint(divided(-low, dmin[:, None])), 0, scale_max)
    unit, offset = (d[:, None] * scales)[..., None], (dmin[:, None] * minima)[..., None]
    codes = np.clip(np.rint(divided(blocks + offset, unit)), 0, largest).astype(np.uint8)
    return d, dmin, (scales.astype(np.uint8), minima.astype(np.uint8)), codes


def stored(scale: np.ndarray) -> np.ndarray:
    """A scale as float16 holds it."""
    return scale.astype(np.float16).astype(np.float32)


def divided(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    """``x / by``, 0 where ``by`` is."""
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape), np.float32), where=by != 0)


def six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Eight scales and eight minima of 6 bits in 12 bytes; the upper bits of the last four lie above the first."""
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    third = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    return np.concatenate([first, second, third], axis=-1)


def nibble_pairs(codes: np.ndarray) -> np.ndarray:
    """[n, 8, 32] codes of 4 bits: sub-blocks two by two, the first in the low nibbles."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(len(codes), -1)


def q6_k(x: np.ndarray) -> np.ndarray:
    """Super-blocks [n, 256] as 210 bytes each."""
    d, scales, codes = signed_codes(x, 32, 128)
    codes = codes.reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    fields = [low.reshape(len(x), -1), two_bits(codes >> 4), scales.astype(np.int8).view(np.uint8), half(d)]
    return np.concatenate(fields, axis=-1)


def signed_codes(x: np.ndarray, middle: int, scale_middle: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """d [n]; signed scales [n, 16]; codes [n, 16, 16] from 0 to 2 ``middle`` - 1, of which ``middle`` means 0."""
    blocks = x.reshape(-1, 16, 16)
    step = -extreme(blocks) / middle
    d = stored(-extreme(step) / scale_middle)
    scales = np.clip(np.rint(divided(step, d[:, None])), -scale_middle, scale_middle - 1)
    unit = (d[:, None] * scales)[..., None]
    codes = (np.clip(np.rint(divided(blocks, unit)), -middle, middle - 1) + middle).astype(np.uint8)
    return d, scales, codes


def extreme(x: np.ndarray) -> np.ndarray:
    """The value of largest magnitude on the last axis, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]


K_QUANTS = {"Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k}
