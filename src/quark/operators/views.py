"""Where an operator stands: what is known there about its tensors, and the view of a tensor as blocks along one axis.

A body may be cheaper where more is known (whole blocks need no padding, blocks along the last axis no transposition),
so the function of a node depends on its ``NodeFacts``; the differences are part of the function's overload name.

Blocks along axis k of [.., n, inner..] are seen as [-1, size, inner..]: a Reshape, never a Transpose. Any axis may be
of length 0 when the model runs (an empty cache), where -1 beside a 0 says nothing: the count is computed then.
"""

from __future__ import annotations

import re
from math import prod

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ModelError
from quark.operators.body import Body

_ZERO_IS_A_LENGTH = 14


@dataclass(frozen=True)
class NodeFacts:
    """What is known about the tensors of one node; every default means "not known" or "the usual".

    Attributes:
        shape: of the first input, None for an unknown dimension; None when not even the rank is known.
        elem_type: ``TensorProto`` type of the first input.
        per_axis: the scale of an affine operator has one value per index of an axis, not one for the tensor.
        code_type: ``TensorProto`` type of the zero point of ``ExtendedQuantizeLinear`` and its inverse.
        finite: the first input is a constant without infinity and NaN. Its body has no branch, which ONNX Runtime would
            run for every inference, while it computes plain nodes of constants once, when it loads the model.
    """

    shape: tuple[int | None, ...] | None = None
    elem_type: str = "FLOAT"
    per_axis: bool = False
    code_type: str = "UINT8"
    finite: bool = False


@dataclass(frozen=True)
class View:
    """How a tensor is cut into blocks.

    Attributes:
        kind: ``one`` (at most one element: passed on as it is), ``whole`` (the axis is a multiple of the block) or
            ``ragged`` (it may not be: padded with zeros, cut again).
        axis: counted from the back where the rank is known.
        elem_type: ``TensorProto`` type of the tensor.
        finite: it is a constant without infinity and NaN.
    """

    kind: str
    axis: int
    elem_type: str
    finite: bool = False

    @property
    def label(self) -> str:
        """The view as text, for a function's overload name."""
        return f"{self.kind}{self.axis}.{self.elem_type}" + ".finite" * self.finite

    @staticmethod
    def parse(label: str) -> View:
        """The view that ``label`` names."""
        found = re.fullmatch(r"(one|whole|ragged)(-?\d+)\.(\w+)(\.finite)?", label)
        if found is None:
            raise ModelError(f"{label!r} does not name a view: kind, axis and type, as in 'whole-3.FLOAT'")
        return View(found[1], int(found[2]), found[3], found[4] is not None)


def view_of(facts: NodeFacts, axis: int, size: int) -> View:
    """The cheapest view of the tensor at ``facts`` as blocks of ``size`` along ``axis``.

    Raises:
        ModelError: the tensor has no such axis.
    """
    if facts.shape is None:
        return View("ragged", axis, facts.elem_type, facts.finite)
    rank = len(facts.shape)
    known = [n for n in facts.shape if n is not None]
    if rank == 0 or 0 in known or (len(known) == rank and prod(known) == 1):
        return View("one", -1, facts.elem_type)
    if rank == 1:  # whatever its axis says, a vector has one
        axis = -1
    if not -rank <= axis < rank:
        raise ModelError(f"axis {axis} does not exist in a tensor of shape {tuple(facts.shape)}")
    from_back = axis if axis < 0 else axis - rank
    length = facts.shape[from_back]
    whole = length is not None and length % size == 0
    return View("whole" if whole else "ragged", from_back, facts.elem_type, facts.finite)


def to_blocks(body: Body, x: str, view: View, *lengths: int) -> str:
    """``x`` as [-1, *lengths, inner..]; the product of ``lengths`` is the block size."""
    inner = _inner(body, x, view)
    size, axis = prod(lengths), view.axis
    if view.kind == "ragged":
        (x, inner), axis = _padded(body, x, view, size, inner), 1
    if not inner:
        return _reshape(body, x, body.ints(-1, *lengths))
    count = body.op("Div", _product(body, body.dimensions(x, 0, axis + 1)), body.ints(size))
    return _reshape(body, x, body.concat(count, body.ints(*lengths), *inner))


def from_blocks(body: Body, blocks: str, x: str, view: View, size: int) -> str:
    """``blocks`` in the shape of ``x``: the inverse of ``to_blocks``."""
    if view.kind == "ragged":
        length = _length(body, x, view)
        inner = [_product(body, name) for name in _inner(body, x, view)]
        padded = body.op("Add", length, _missing(body, length, size))
        rows = _reshape(body, blocks, body.concat(_outer(body, x, view), padded, *inner))
        blocks = body.op("Slice", rows, body.ints(0), length, body.ints(1))
    return _reshape(body, blocks, body.dimensions(x))


def _padded(body: Body, x: str, view: View, size: int, inner: list[str]) -> tuple[str, list[str]]:
    """``x`` as [-1, n, (inner)] with n a multiple of ``size``, and its inner dimensions (one, or none)."""
    length = _length(body, x, view)
    inner = [_product(body, name) for name in inner]
    rows = _reshape(body, x, body.concat(_outer(body, x, view), length, *inner))
    begins, ends = body.ints(*[0] * (3 + len(inner))), [_missing(body, length, size), *[body.ints(0)] * len(inner)]
    return body.op("Pad", rows, body.concat(begins, *ends)), inner


def _length(body: Body, x: str, view: View) -> str:
    """The length of the axis as a vector of one; where the rank is unknown, a vector's only axis, 1 for a scalar."""
    if view.axis < 0:
        return body.dimensions(x, view.axis, view.axis + 1 or None)
    return body.op("Gather", body.concat(body.ints(1), body.dimensions(x, 0, view.axis + 1)), body.ints(-1))


def _inner(body: Body, x: str, view: View) -> list[str]:
    """The dimensions after the axis, as a list of at most one vector."""
    return [] if view.axis == -1 else [body.dimensions(x, view.axis + 1)]


def _outer(body: Body, x: str, view: View) -> str:
    """The product of the dimensions before the axis; -1 where the rank is unknown, as a vector has its axis there."""
    return body.ints(-1) if view.axis >= 0 else _product(body, body.dimensions(x, 0, view.axis))


def _reshape(body: Body, x: str, shape: str) -> str:
    """``x`` in ``shape``, whose zeros are zeros; before opset 14 they are lengths of ``x``."""
    return body.op("Reshape", x, shape, attributes={"allowzero": 1} if body.opset >= _ZERO_IS_A_LENGTH else {})


def _product(body: Body, dimensions: str) -> str:
    return body.op("ReduceProd", dimensions, attributes={"keepdims": 1})


def _missing(body: Body, length: str, size: int) -> str:
    """How many elements fill the last block: -length mod size."""
    return body.op("Mod", body.op("Neg", length), np.array([size], np.int64))


def to_float(body: Body, x: str, elem_type: str) -> str:
    """``x`` as float32."""
    return x if elem_type == "FLOAT" else body.cast(x, "FLOAT")


def from_float(body: Body, values: str, elem_type: str) -> str:
    """float32 ``values`` as ``elem_type``."""
    return values if elem_type == "FLOAT" else body.cast(values, elem_type)
