"""Bytes of tensors in a GGUF file, from how they are quantized: the type that holds them, and float16 for the rest."""

from __future__ import annotations

from math import prod

from quark.numerics.formats import Block
from quark.numerics.ggml import GGML, Ggml
from quark.torch.stage import Stages

MXFP4_BITS = 4.25


def type_of(stages: Stages) -> str:
    """The GGML type that holds integers: a scale in each 32, and a minimum where codes are not symmetric."""
    spec = stages[-1].spec
    return "Q8_0" if stages[-1].format.bits == 8 else "Q4_0" if spec.symmetric else "Q4_1"


def bytes_of(shape: tuple[int, ...], stages: Stages) -> float:
    """Bytes of a parameter; ``stages``: none where it stays float, which is float16 in matrices."""
    count = prod(shape)
    if not stages:
        return count * (2.0 if len(shape) > 1 else 4.0)
    row = stages[-1].format
    if not isinstance(row, Ggml):
        if isinstance(row, Block):
            return count * MXFP4_BITS / 8
        row = GGML[type_of(stages).lower()]
    return count * row.bits / 8
