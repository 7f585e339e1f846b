"""Types of GGML: the bytes stand for the values that are computed with, whatever a row holds, and lose no more than
llama.cpp's own quantizer.

The judge of the bytes is the decoder of the ``gguf`` package. ``LLAMA_CPP`` are relative errors of ``normal()`` by
``ggml_quantize_chunk`` of xllamacpp 2026.10.11549 without importances; ``WITH_COLUMNS`` with them, weighted.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quark.errors import ConfigError
from quark.numerics.ggml import GGML, Ggml

gguf = pytest.importorskip("gguf")
LLAMA_CPP = {
    "Q4_0": 0.08623, "Q4_1": 0.0782, "Q5_0": 0.04278, "Q5_1": 0.03804, "Q8_0": 0.00537,
    "Q2_K": 0.29607, "Q3_K": 0.15149, "Q4_K": 0.07145, "Q5_K": 0.03628, "Q6_K": 0.0178,
}  # fmt: skip
WITH_COLUMNS = {
    "Q4_0": 0.10146, "Q4_1": 0.08307, "Q5_0": 0.05012, "Q5_1": 0.04035, "Q8_0": 0.007,
    "Q2_K": 0.30892, "Q3_K": 0.17586, "Q4_K": 0.0844, "Q5_K": 0.043, "Q6_K": 0.02121,
}  # fmt: skip
KINDS = pytest.mark.parametrize("row", GGML.values(), ids=lambda row: row.kind)
HUGE, SUBNORMAL, HALVES = 3e38, 1e-41, 65504.0


def normal() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32) * np.float32(0.02)


def columns() -> np.ndarray:
    return np.random.default_rng(3).lognormal(0, 1, 1024).astype(np.float32)


def decoded(row: Ggml, x: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    return gguf.quants.dequantize(row.data(x, importance), gguf.GGMLQuantizationType[row.kind]).reshape(x.shape)


def loss(found: np.ndarray, x: np.ndarray, w: np.ndarray | float = 1.0) -> float:
    return float(np.sqrt((w * np.square(found - x, dtype=np.float64)).sum()) / np.linalg.norm(x.astype(np.float64)))


def odd_rows() -> dict[str, np.ndarray]:
    """Rows that a weight may have."""
    draw = np.random.default_rng(1)
    plain = draw.standard_normal(512)
    spike, sparse, steps = plain * 1e-3, np.zeros(512), np.repeat(10.0 ** draw.uniform(-6, 1, 16), 32) * plain
    spike[100], sparse[7] = 50, -2
    rows = {
        "zeros": 0 * plain, "ones": 0 * plain + 1, "signs": np.sign(plain), "above": 3 + draw.random(512),
        "below": -3 - draw.random(512), "spike": spike, "sparse": sparse, "heavy": draw.standard_t(1.5, 512),
        "blocks": steps, "ramp": np.linspace(-1, 1, 512), "two": np.where(plain > 0, 1, -0.25),
    }  # fmt: skip
    return {name: values.astype(np.float32) for name, values in rows.items()}


@KINDS
def test_the_bytes_stand_for_the_values(row: Ggml) -> None:
    assert (row.size, row.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[row.kind]]
    rows = np.stack([*odd_rows().values()])
    for x in (rows, normal(), rows[None, :1], rows[:0]):
        np.testing.assert_array_equal(decoded(row, x) if x.size else row.data(x).reshape(x.shape), row.values(x))
    np.testing.assert_array_equal(decoded(row, normal(), columns()), row.values(normal(), columns()))


@KINDS
def test_no_more_is_lost_than_by_llama_cpp(row: Ggml) -> None:
    assert loss(decoded(row, normal()), normal()) <= LLAMA_CPP[row.kind] * 1.001
    weighted = loss(decoded(row, normal(), columns()), normal(), columns())
    assert weighted <= WITH_COLUMNS[row.kind] * 1.001
    assert row.kind == "Q8_0" or weighted < 0.99 * loss(decoded(row, normal()), normal(), columns())


@KINDS
@pytest.mark.parametrize("exponent", [-60, -30, -24, -20, -17, -14, 0, 16, 20, 24, 100])
def test_a_row_of_any_size_keeps_its_digits_or_is_not_rounded(row: Ggml, exponent: int) -> None:
    """The same row times a power of two loses the same, or float16 has not its scale and all of it stays."""
    for name, values in odd_rows().items():
        x, scaled = values[None], values[None] * np.float32(2.0**exponent)
        found = np.asarray(row.round(scaled))
        if row.held(scaled):
            here, there = (loss(np.asarray(row.round(one)), one) if one.any() else 0.0 for one in (scaled, x))
            assert np.isfinite(found).all() and here <= 1.05 * there + 2.0**-5, name  # of step and minimum
            assert scaled.any() or not found.any()
            continue
        np.testing.assert_array_equal(found, scaled)
        most = float(np.abs(scaled).max())
        above = most / row.units / (row.largest if row.signed else 1)  # minima are multiples of that
        assert most / (row.largest * row.units) < 2.0**-14 or above > HALVES, name  # else float16 has it


@KINDS
def test_rows_that_float16_cannot_scale_keep_their_tensor_whole(row: Ggml) -> None:
    plain = odd_rows()["heavy"]
    for odd in (plain * np.float32(1e-9), plain * 0 + SUBNORMAL, np.eye(1, 512, dtype=np.float32)[0] * HUGE):
        x = np.stack([plain, odd.astype(np.float32)])
        np.testing.assert_array_equal(row.round(x), x)
    assert not np.array_equal(row.round(plain[None]), plain[None])
    x = np.stack([plain, 0 * plain])  # a row of zeros is no small row
    assert not np.array_equal(row.round(x), x)


@KINDS
def test_rows_do_not_see_each_other(row: Ggml) -> None:
    x = normal()[:8]
    np.testing.assert_array_equal(np.concatenate([row.values(x[:3]), row.values(x[3:])]), row.values(x))


@KINDS
def test_blocks_lie_on_the_last_axis_and_divide_it(row: Ggml) -> None:
    with pytest.raises(ConfigError, match=rf"{row.kind} has blocks of {row.size} along the last axis"):
        row.round(np.zeros((4, row.size + 1), np.float32))
    with pytest.raises(ConfigError, match="along the last axis"):
        row.round(np.zeros((2, row.size, row.size), np.float32), axis=1)


@KINDS
def test_a_matrix_of_inputs_and_outputs_has_blocks_along_its_inputs(row: Ggml) -> None:
    x = normal()[:4, : row.size]
    for axis in (0, -2):
        np.testing.assert_array_equal(row.round(np.ascontiguousarray(x.T), axis=axis), row.round(x).T)
        assert torch.equal(row.round(torch.from_numpy(x.T.copy()), axis=axis), torch.from_numpy(row.round(x).T))
