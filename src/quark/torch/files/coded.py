"""A float tensor that a folder holds in parts: codes, scales, zero points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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
