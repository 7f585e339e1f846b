"""``MatMulNBitsParams``: how the weights of MatMul are stored in few bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from quark.errors import ConfigError, check_names

#: Widths and the smallest block that ONNX Runtime has kernels for; blocks are powers of two.
BITS = (2, 4, 8)
SMALLEST_BLOCK = 16


class NBits(BaseModel):
    """The validated parameters.

    Attributes:
        Algorithm: a row of ``quark.onnx.qdq.nbits_algorithms.ALGORITHMS``.
        GroupSize: elements along the summed axis that share a scale; a power of two from 16 on.
        Symmetric: zero stands in the middle of the codes; otherwise every group has a zero point.
        Bits: width of a code.
        AccuracyLevel: what ONNX Runtime computes in: 0 as it likes, 1 float32, 2 float16, 3 bfloat16, 4 int8.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    Algorithm: Literal["DEFAULT", "GPTQ", "HQQ"] = "DEFAULT"
    GroupSize: int = 128
    Symmetric: bool = True
    Bits: int = 4
    AccuracyLevel: int = Field(0, ge=0, le=4)

    @field_validator("Bits")
    @classmethod
    def _runnable(cls, bits: int) -> int:
        if bits not in BITS:
            raise ValueError(f"ONNX Runtime runs {', '.join(map(str, BITS))} bits")
        return bits

    @field_validator("GroupSize")
    @classmethod
    def _block(cls, size: int) -> int:
        if size < SMALLEST_BLOCK or size & (size - 1):
            raise ValueError(f"ONNX Runtime takes powers of two from {SMALLEST_BLOCK} on")
        return size


def parse_nbits(given: Mapping[str, Any]) -> NBits:
    """Validate ``MatMulNBitsParams``.

    Raises:
        ConfigError: an unknown name (the nearest one is shown) or a bad value.
    """
    check_names("parameter in MatMulNBitsParams", given, NBits.model_fields)
    try:
        return NBits(**given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        why = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"MatMulNBitsParams: {place} cannot be {first['input']!r}: {why}") from error
