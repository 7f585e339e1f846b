"""The values that the codes of other programs' formats stand for, by the rules of the formats and nothing of ours.

fp8                  codes times scales of the tensor, rows or blocks
gptq, awq            scale (code - zero point); version 1 of GPTQ lowers zero points by one
compressed-tensors   decoded by the library
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from quark.config.tensor import TensorSpec
from quark.dataclass import dataclass
from quark.numerics.affine import Coding
from quark.numerics.blocks import FP4
from quark.numerics.granularity import Block2D
from quark.numerics.packing import AWQ_ORDER, unpack
from quark.numerics.scales import SCALE_RULES

Parts = dict[str, torch.Tensor]
Decoder = Callable[[Parts], torch.Tensor]
ROUNDED = 2.0**-7
"""Of a value: a step of bfloat16. The library divides where we multiply, so that a product half-way between two values
of bfloat16 may go to either; scales of blocks and codes that are wrong move values by 2^-4 and more."""
BIAS = 127  # of E8M0
#: What ``QuantizationArgs`` have no field for, and what is evaluated depends on, in their ``observer_kwargs``.
OWN, OWN_FIELDS = "quark", ("scale_rule", "narrow")
COMPRESSED = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape")


def strategy_of(found: Any) -> str:
    """The name of the strategy of ``QuantizationArgs``, or of what says the same."""
    return str(getattr(found.strategy, "value", found.strategy))


@dataclass(frozen=True)
class Windows:
    """Some rows of a tensor, as runs (first, number); one run of all of them is the whole tensor.

    Attributes:
        rows: of the tensor.
        runs: ordered.
    """

    rows: int
    runs: tuple[tuple[int, int], ...]

    @cached_property
    def count(self) -> int:
        """Rows in all runs."""
        return sum(count for _, count in self.runs)

    def cut(self, value: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """What belongs to the rows, of a tensor whose ``axis`` runs along them, in any step."""
        return value if self.count == self.rows else torch.cat(self.views(value, axis), axis)

    def views(self, value: torch.Tensor, axis: int = 0) -> list[torch.Tensor]:
        """The same in parts, which share the memory of ``value``."""
        if self.count == self.rows:
            return [value]
        length = value.shape[axis]
        runs = ((length * start // self.rows, max(1, length * count // self.rows)) for start, count in self.runs)
        return [value.narrow(axis, start, count) for start, count in runs]


@dataclass(frozen=True)
class Foreign:
    """A weight in a format of another program.

    Attributes:
        parts: names of its stored tensors, by their role.
        decode: makes float32 values [rows, columns] of them.
        cut: (parts, rows) → the parts of these rows.
        exact: bit for bit; else but for ``ROUNDED`` (the library decodes NVFP4 to bfloat16).
        index: of a weight that lies in stacked tensors: its place on their first axis.
    """

    parts: Mapping[str, str]
    decode: Decoder
    cut: Callable[[Parts, Windows], Parts]
    exact: bool = True
    index: int | None = None


def fp4_values(packed: torch.Tensor) -> torch.Tensor:
    """float32 values of FP4 codes, two in a byte, the low half first."""
    stream = packed.contiguous().view(torch.uint8)
    values: torch.Tensor = FP4.decode(unpack(stream, 4, 2 * stream.shape[-1], "low")).float()
    return values


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """float32 values of E8M0 bytes."""
    return torch.exp2(exponents.view(torch.uint8).float() - BIAS)


def fp8_decoder(blocks: tuple[int, ...] | None) -> Decoder:
    """Codes times scales."""

    def decode(parts: Parts) -> torch.Tensor:
        weight, scale = parts["weight"].float(), parts["scale"].float()
        if blocks is not None and scale.dim() == weight.dim() == 2:
            return weight * Block2D(*blocks).expand(scale, tuple(weight.shape))
        return weight * scale.reshape(-1, *[1] * (weight.dim() - 1))

    return decode


def awq_values(parts: Parts) -> torch.Tensor:
    """4-bit codes in the order of AWQ."""
    count = parts["scales"].shape[1]
    words = (parts[key].contiguous().view(torch.uint8) for key in ("qweight", "qzeros"))
    codes, zeros = (unpack(word, 4, count, "low", AWQ_ORDER) for word in words)
    groups = codes.float().reshape(len(zeros), -1, count)
    return ((groups - zeros[:, None]) * parts["scales"].float()[:, None]).reshape(codes.shape).T


def gptq_decoder(bits: int, lowered: int) -> Decoder:
    """Codes of 2 to 8 bits as a stream along the inputs."""

    def decode(parts: Parts) -> torch.Tensor:
        rows, columns = parts["scales"].shape[1], parts["g_idx"].shape[0]
        words = parts["qweight"].T.contiguous()
        codes = unpack(words.view(torch.uint8), bits, columns, "low")
        zeros = unpack(parts["qzeros"].contiguous().view(torch.uint8), bits, rows, "low").to(torch.int32) + lowered
        index = parts["g_idx"].long()
        return (codes.float() - zeros.T.float()[:, index]) * parts["scales"].float().T[:, index]

    return decode


def decompressor(scheme: Any, format: str) -> Decoder:
    """The library's own decoding, in float32 where it does not fix the type."""

    def decode(parts: Parts) -> torch.Tensor:
        from compressed_tensors.compressors import BaseCompressor

        kind = scheme.format or format
        compressor: Any = BaseCompressor.get_value_from_registry(str(getattr(kind, "value", kind)))
        scale = parts["weight_scale"]
        widened = scale.float() if scale.dtype in (torch.float16, torch.bfloat16) else scale
        values: torch.Tensor = compressor.decompress({**parts, "weight_scale": widened}, scheme)["weight"]
        return values

    return decode


def in_kernels(decode: Decoder, spec: TensorSpec) -> Decoder:
    """What kernels compute with, of what the library decodes: some rules of scales round products again."""
    if SCALE_RULES[spec.grid.scale_rule].parts is None:
        return decode

    coding = Coding(spec.row, spec.granularity, narrow=spec.narrow_codes, scale_rule=spec.grid.scale_rule)

    def rounded(parts: Parts) -> torch.Tensor:
        scale = parts["weight_scale"].float()
        zeros = torch.zeros_like(scale, dtype=torch.int32)
        made: torch.Tensor = coding.fake_quantize(decode(parts), scale, zeros)
        return made

    return rounded


# ---- rows of large tensors -------------------------------------------------------------------------------------------


def columns_cut(parts: Parts, windows: Windows) -> Parts:
    """Of tensors [.., out], or of streams of codes along the outputs."""
    return {role: value if value.dim() < 2 else windows.cut(value, 1) for role, value in parts.items()}


def rows_cut(parts: Parts, windows: Windows) -> Parts:
    """Of tensors [out, ..], or of one that has fewer rows."""
    made = {}
    for role, value in parts.items():
        if role == "weight_shape":
            made[role] = torch.tensor([windows.count, int(value[1])], dtype=value.dtype)
        else:  # a vector is a scale per row, or one of a whole tensor
            whole = value.shape != (windows.rows,) if value.dim() < 2 else value.shape[0] == 1
            made[role] = value if whole else windows.cut(value)
    return made
