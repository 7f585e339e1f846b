"""Quantization written out once more, slowly: NumPy loops over the elements that share a scale, casts by ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

BITS = {"int2": 2, "int3": 3, "int4": 4, "int8": 8, "int16": 16, "uint2": 2, "uint4": 4, "uint8": 8, "uint16": 16}
FLOATS = {
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "fp8_e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "fp6_e3m2": (ml_dtypes.float6_e3m2fn, 28.0),
    "fp6_e2m3": (ml_dtypes.float6_e2m3fn, 7.5),
    "fp4": (ml_dtypes.float4_e2m1fn, 6.0),
}
CASTS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

Part = tuple[slice, ...]


def tensor(shape: tuple[int, ...]) -> Iterator[Part]:
    yield tuple(slice(None) for _ in shape)


def channel(axis: int) -> Callable[[tuple[int, ...]], Iterator[Part]]:
    def parts(shape: tuple[int, ...]) -> Iterator[Part]:
        for k in range(shape[axis]):
            yield tuple(slice(k, k + 1) if i == axis % len(shape) else slice(None) for i in range(len(shape)))

    return parts


def token(shape: tuple[int, ...]) -> Iterator[Part]:
    for index in np.ndindex(*shape[:-1]):
        yield (*(slice(k, k + 1) for k in index), slice(None))


def group(axis: int, size: int) -> Callable[[tuple[int, ...]], Iterator[Part]]:
    def parts(shape: tuple[int, ...]) -> Iterator[Part]:
        along = axis % len(shape)
        for index in np.ndindex(*(n for i, n in enumerate(shape) if i != along)):
            for start in range(0, shape[along], size):
                rest = iter(index)
                yield tuple(
                    slice(start, start + size) if i == along else slice(k := next(rest), k + 1)
                    for i in range(len(shape))
                )

    return parts


def block(rows: int, columns: int) -> Callable[[tuple[int, ...]], Iterator[Part]]:
    def parts(shape: tuple[int, ...]) -> Iterator[Part]:
        for r in range(0, shape[0], rows):
            for c in range(0, shape[1], columns):
                yield slice(r, r + rows), slice(c, c + columns)

    return parts


def quantized(
    x: np.ndarray, parts: Callable[[tuple[int, ...]], Iterator[Part]], one: Callable[[np.ndarray], np.ndarray]
):
    """``x`` where every set of elements that share a scale went through ``one``."""
    out = np.empty_like(x)
    for part in parts(x.shape):
        out[part] = one(x[part])
    return out


SNAPS: dict[str, Callable[[float], float]] = {  # what a scale type leaves of a scale
    "float": float,
    "float16": lambda scale: float(np.float16(scale)),
    "bfloat16": lambda scale: float(np.float32(scale).astype(ml_dtypes.bfloat16)),
    "pof2": lambda scale: 2.0 ** np.rint(np.log2(scale)),
}


def integer(name: str, symmetric: bool, scale_type: str = "float") -> Callable[[np.ndarray], np.ndarray]:
    """s = amax / ((qmax - qmin) / 2), or (max - min) / (qmax - qmin) and the zero point of s as it was before snap."""
    bits, signed = BITS[name], not name.startswith("u")
    lowest, highest = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    snap = SNAPS[scale_type]

    def one(x: np.ndarray) -> np.ndarray:
        lo, hi = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
        if symmetric:
            scale = snap(max(-lo, hi) / ((highest - lowest) / 2))
            zero = 0 if signed else 2 ** (bits - 1)
        else:
            exact = (hi - lo) / (highest - lowest)
            scale = snap(exact)
            zero = int(np.clip(np.rint(lowest - lo / exact), lowest, highest)) if exact else 0
        s = np.float32(scale or 1.0)
        codes = np.clip(np.rint(x / s) + zero, lowest, highest)
        return ((codes - zero) * s).astype(np.float32)

    return one


def floating(name: str, scale_type: str = "float") -> Callable[[np.ndarray], np.ndarray]:
    """s = amax / largest value."""
    dtype, largest = FLOATS[name]

    def one(x: np.ndarray) -> np.ndarray:
        s = np.float32(SNAPS[scale_type](float(np.abs(x).max()) / largest) or 1.0)
        return np.clip(x / s, -largest, largest).astype(dtype).astype(np.float32) * s

    return one


def cast(name: str) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x.astype(CASTS[name]).astype(np.float32)


def shared_exponent(name: str, bits: int, mode: str = "even") -> Callable[[np.ndarray], np.ndarray]:
    """OCP MX: 2^(floor(log2 amax) - emax); ``even`` rounds amax to the mantissa bits of the elements first."""
    dtype, largest = FLOATS[name]

    def one(x: np.ndarray) -> np.ndarray:
        amax = float(np.abs(x).max())
        if not amax:
            return x
        exponent = np.floor(np.log2(amax))
        if mode == "even" and amax / 2**exponent >= 2 - 2.0 ** (-bits - 1):
            exponent += 1
        if mode == "ceil":
            exponent = np.ceil(np.log2(amax))
        s = np.float32(2.0 ** (exponent - np.floor(np.log2(largest))))
        return np.clip(x / s, -largest, largest).astype(dtype).astype(np.float32) * s

    return one


def mxint8(x: np.ndarray) -> np.ndarray:
    """OCP MXINT8: 64ths of the shared exponent's power of two."""
    amax = float(np.abs(x).max())
    s = np.float32(2.0 ** (np.floor(np.log2(amax)) - 6)) if amax else np.float32(1)
    return np.clip(np.rint(x / s), -128, 127).astype(np.float32) * s


def bfp16(x: np.ndarray) -> np.ndarray:
    """Eight elements of 8 bits under an exponent that grows by one where the largest would round beyond 127."""
    amax = float(np.abs(x).max())
    s = np.float32(2.0 ** (np.floor(np.log2(amax)) - 6)) if amax else np.float32(1)
    s = s * 2 if np.abs(np.rint(x / s)).max() > 127 else s
    return np.rint(x / s).astype(np.float32) * s


def microexponent(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """MX6, MX9: pairs below half of the block's exponent use the exponent below; ``bits`` with the sign."""

    def one(x: np.ndarray) -> np.ndarray:
        exponent = np.floor(np.log2(np.abs(x).max()))
        out = np.empty_like(x)
        flat, result = x.reshape(-1), out.reshape(-1)
        for start in range(0, flat.size, 2):
            pair = flat[start : start + 2]
            own = exponent if np.abs(pair).max() >= 2.0**exponent else exponent - 1
            step, most = np.float32(2.0 ** (own - bits + 2)), 2 ** (bits - 1) - 1
            result[start : start + 2] = np.clip(np.rint(pair / step), -most, most) * step
        return out

    return one


def e4m3(scale: np.float32) -> np.float32:
    return np.float32(np.clip(scale, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn))


def e5m3(scale: np.float32) -> np.float32:
    """Unsigned, 3 mantissa bits, smallest normal value 2^-14."""
    step = 2.0 ** (max(np.floor(np.log2(scale)), -14) - 3)
    return np.float32(np.clip(np.rint(scale / step) * step, 2.0**-17, 114688))


def two_level(
    largest: float, snap: Callable[[np.float32], np.float32], size: int = 16
) -> Callable[[np.ndarray], np.ndarray]:
    """FP4 in blocks along the last axis; 8-bit block scales under one float32 scale of the whole tensor."""

    def whole(x: np.ndarray) -> np.ndarray:
        above = np.float32(float(np.abs(x).max()) / (largest * 6))

        def one(part: np.ndarray) -> np.ndarray:
            step = np.float32(snap(np.float32(np.abs(part).max()) / (np.float32(6) * above)) * above)
            return np.clip(part / step, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * step

        return quantized(x, group(-1, size), one)

    return whole


nvfp4 = two_level(448.0, e4m3)
