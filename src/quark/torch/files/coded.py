"""A float tensor that a folder holds in parts: codes, scales, zero points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quark.torch.export.decoded import Decoder
from quark.torch.files.skeleton import StoredSource


@dataclass(frozen=True)
class Coded:
    """A float tensor that is stored in parts.

    Attributes:
        shape: of the float tensor.
        parts: names of the stored tensors, by their role.
        decode: makes the float32 tensor of them.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, str]
    decode: Decoder


Found = dict[str, Coded]
Tensors = Mapping[str, StoredSource]
