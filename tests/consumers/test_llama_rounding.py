"""The arithmetic that llama.cpp's answers are held to, against the ``gguf`` package, which is llama.cpp's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.consumers.llama_rounding import q8_0, q8_k

gguf = pytest.importorskip("gguf")


def test_blocks_of_32_are_those_of_the_gguf_package() -> None:
    values = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 64)[:, None]
    values[0, :32] = 0
    kind = gguf.GGMLQuantizationType.Q8_0
    wanted = gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), kind), kind)
    assert (q8_0(values).numpy() != wanted).mean() < 1e-4  # where a number lies between two codes


def test_blocks_of_256_keep_the_largest_and_round_to_half_a_step() -> None:
    values = torch.randn(16, 512, generator=torch.Generator().manual_seed(1))
    values[0, :256] = 0
    found, largest = q8_k(values).unflatten(-1, (-1, 256)), values.unflatten(-1, (-1, 256)).abs().amax(-1)
    torch.testing.assert_close(found.abs().amax(-1), largest)
    apart = (found - values.unflatten(-1, (-1, 256))).abs().amax(-1)
    assert (apart <= largest / 127 * 1.0001 / 2).all()
    assert np.unique((found[1] / largest[1, :, None] * 127).round(decimals=3)).size <= 255
