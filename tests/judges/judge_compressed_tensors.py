"""compressed-tensors' tests of its compressors, with codes packed and unpacked by this package.

What its files hold (words of 4-bit weights, pairs of FP4 codes, strings of FP6 codes) is made here by
``quark.numerics``, which writes the same files in ``export_compressed_tensors``; the tests of the layouts stay theirs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from compressed_tensors.compressors.mxfp6 import helpers as fp6
from compressed_tensors.compressors.nvfp4 import helpers as fp4
from compressed_tensors.compressors.pack_quantized import helpers as words
from judge_reached import counted

from quark.numerics import packing
from quark.numerics.elements import ELEMENTS


def pack_to_int32(value: torch.Tensor, num_bits: int, packed_dim: int = 1) -> torch.Tensor:
    """Theirs: signed codes, moved to unsigned ones, in words along an axis."""
    if value.dtype is not torch.int8:
        raise ValueError("Tensor must be quantized to torch.int8 before packing")
    if not 1 <= num_bits <= 8:
        raise ValueError("Packing is only supported for 1 to 8 bits")
    codes = (value.to(torch.int16) + (1 << num_bits - 1)).to(torch.uint8)
    codes = codes if packed_dim == 1 else codes.transpose(-1, -2).contiguous()
    packed = packing.pack(codes, num_bits, word=4).contiguous().view(torch.int32)
    return packed if packed_dim == 1 else packed.transpose(-1, -2)


def unpack_from_int32(value: torch.Tensor, num_bits: int, shape: torch.Size, packed_dim: int = 1) -> torch.Tensor:
    """Theirs, and back."""
    if value.dtype is not torch.int32:
        raise ValueError(f"Expected {torch.int32} but got {value.dtype}, Aborting unpack.")
    if not 1 <= num_bits <= 8:
        raise ValueError("Unpacking is only supported for 1 to 8 bits")
    if value.ndim > 2:
        return torch.stack([unpack_from_int32(one, num_bits, shape[1:], packed_dim) for one in value])
    packed = (value if packed_dim == 1 else value.transpose(0, 1)).contiguous().view(torch.uint8)
    if sys.byteorder == "big":
        packed = packed.view(len(packed), -1, 4).flip(-1).view(len(packed), -1)
    codes = packing.unpack(packed, num_bits, shape[packed_dim])
    signed = (codes.to(torch.int16) - (1 << num_bits - 1)).to(torch.int8)
    return signed if packed_dim == 1 else signed.transpose(0, 1)


def small_float(name: str) -> tuple[Any, Any]:
    """Packing and unpacking of a small float format."""
    row = ELEMENTS[name]

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] * row.bits % 8:
            raise ValueError(f"{x.shape[-1]} codes of {row.bits} bits fill no whole bytes")
        return packing.pack(row.encode(x.float().contiguous()), row.bits)

    def unpack(a: torch.Tensor, m: int, n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return row.decode(packing.unpack(a.reshape(m, -1), row.bits, n), 0).to(dtype)

    return pack, unpack


def pytest_configure(config: Any) -> None:
    """In every module that has imported a name already."""
    (pack4, unpack4), (pack6, unpack6) = small_float("fp4_e2m1"), small_float("fp6_e2m3")
    ours = {
        words.pack_to_int32: pack_to_int32,
        words.unpack_from_int32: unpack_from_int32,
        fp4.pack_fp4_to_uint8: pack4,
        fp4.unpack_fp4_from_uint8: unpack4,
        fp6.pack_fp6_to_uint8: pack6,
        fp6.unpack_fp6_from_uint8: unpack6,
    }
    for module in [one for name, one in sys.modules.items() if name.startswith("compressed_tensors")]:
        for name, value in list(vars(module).items()):
            for theirs, function in ours.items():
                if value is theirs:
                    setattr(module, name, counted(function))
