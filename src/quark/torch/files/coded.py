"""A float tensor that a folder holds in parts: codes, scales, zero points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from quark.dataclass import dataclass
from quark.errors import ModelError, QuarkError
from quark.reading import reason_of
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


FOREIGN = (KeyError, IndexError, AssertionError, ValueError, TypeError, AttributeError, RuntimeError, ArithmeticError)
"""What torch, pydantic and the libraries of formats raise where parts do not fit, or a description is damaged."""


@contextmanager
def decoding(what: str) -> Iterator[None]:
    """Errors of the block in one sentence about ``what``, which somebody else has written.

    Raises:
        ModelError: any of ``FOREIGN``.
    """
    try:
        yield
    except QuarkError:
        raise
    except FOREIGN as error:
        raise ModelError(f"{what} cannot be decoded: {type(error).__name__}, {reason_of(error)}") from error


Found = dict[str, Coded]
Tensors = Mapping[str, StoredSource]


def check_types(tensors: Tensors, types: Mapping[str, tuple[torch.dtype, ...]]) -> None:
    """Tensors hold codes: of another type their bytes, or their values, would be other numbers without a word.

    Args:
        tensors: what is stored, by name.
        types: those that each of some tensors may have.

    Raises:
        ModelError: a tensor of another type; it is named.
    """
    for name, allowed in types.items():
        if tensors[name].dtype not in allowed:
            own, *others = (str(one).removeprefix("torch.") for one in (tensors[name].dtype, *allowed))
            raise ModelError(f"{name!r} is {own}, and such codes are {' or '.join(others)}")
