"""``BlockDequantize`` and ``PackedDequantize`` (org.openquark, version 1): weights in their real width.

``BlockDequantize`` reads a weight of a block format:

    y = element(codes) * (scale(scales) * unit [* tensor_scale] [* 2**-shift])         float32

``codes``   uint8 [bytes]: the element codes in C order as one stream of bits, code i in bits i*b .. i*b + b - 1 counted
            from the lowest bit of the first byte (the order of ONNX INT4)
``scales``  uint8, the shape of y with the axis divided by the block size and rounded up: E8M0, E4M3 or E5M3 codes
``shifts``  uint8 [bytes], two-level formats only: the shifts of the sub-blocks, packed like the codes
``tensor_scale``  float32 scalar, NVFP4 only

``block_size`` is there where blocks have another length than those of the format's row.
``length`` is the axis of y where that is no multiple of the block (the last block is short), else 0; ``shifts`` always
fill the last block.

``PackedDequantize`` reads a weight of an element format that has no ONNX type, y = (element(codes) - zero_point) *
scale: ``codes`` as above, ``scale`` float32 and ``zero_point`` int32 (one value, or one per index of ``axis``),
``shape`` int64.

Functions made of Gather (tables of 256 values instead of Casts: ONNX Runtime folds those, and fails to fold a Cast of
E8M0), Reshape and Mul; ONNX Runtime computes them once, when it loads the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm

import numpy as np

from quark.dataclass import dataclass
from quark.errors import ConfigError
from quark.numerics.blocks import BLOCKS, Block, Encoded, named
from quark.numerics.elements import ELEMENTS, Element, Int
from quark.numerics.granularity import pad
from quark.numerics.packing import pack, sign_extended
from quark.operators.affine import beside
from quark.operators.blockwise import block_of, format_attributes
from quark.operators.body import Body
from quark.operators.views import NodeFacts

BLOCK_ATTRIBUTES: dict[str, int | str] = {"format": "mxfp4", "axis": -1, "length": 0}
BLOCK_INPUTS = ("codes", "scales", "shifts", "tensor_scale")
PACKED_ATTRIBUTES: dict[str, int | str] = {"format": "fp6_e2m3", "axis": 0}
PACKED_INPUTS = ("codes", "scale", "zero_point", "shape")


def packed_formats() -> tuple[str, ...]:
    """Names of the formats of PackedDequantize: elements of a byte or less."""
    return tuple(name for name, row in ELEMENTS.items() if row.bits <= 8)


def block_formats() -> tuple[str, ...]:
    """Names of the formats of BlockDequantize."""
    return tuple(BLOCKS)


@dataclass(frozen=True)
class StoredWeight:
    """The constants of one weight, and the attributes of the node that reads them.

    Attributes:
        tensors: input name -> array, in the order of the inputs.
        attributes: of ``BlockDequantize``.
    """

    tensors: dict[str, np.ndarray]
    attributes: dict[str, int | str]


def stored(encoded: Encoded, format: Block, axis: int, tensor_scale: np.ndarray | float | None = None) -> StoredWeight:
    """What a file keeps of a weight.

    Args:
        encoded: codes of a weight of any rank above 0, blocks along ``axis`` (NumPy).
        format: a row of ``BLOCKS``, or one with blocks of another length.
        axis: as given to ``format.encode``.
        tensor_scale: the scale above the block scales of a format that has one.

    Raises:
        ConfigError: a tensor scale is missing, or given to a format that has none.
    """
    if (tensor_scale is not None) != format.tensor_scale:
        raise ConfigError(f"{format.name} {'needs' if format.tensor_scale else 'has no'} tensor scale")
    shape = encoded.codes.shape
    axis = axis % len(shape)
    format = _no_longer(format, shape[axis])
    length, blocks = shape[axis], encoded.scale.shape[axis]
    tensors = {
        "codes": stream(encoded.codes, int(format.element.bits)),
        "scales": np.ascontiguousarray(encoded.scale),
    }
    if encoded.shift is not None:
        runs = blocks * (format.size // format.sub_block)
        full = pad(encoded.shift, (*shape[:axis], runs, *shape[axis + 1 :]))
        tensors["shifts"] = stream(full, format.shift_bits)
    if tensor_scale is not None:
        tensors["tensor_scale"] = np.asarray(tensor_scale, np.float32).reshape(())
    ragged = 0 if length == blocks * format.size else length
    kind = format_attributes(format)
    return StoredWeight(tensors, {"format": kind.pop("format"), "axis": axis - len(shape), "length": ragged, **kind})


def _no_longer(format: Block, length: int) -> Block:
    """``format`` with blocks of an own length cut to an axis that is shorter than one of them."""
    if format.size <= length or format.size == named(format).size:
        return format
    step = format.sub_block or 1
    return replace(format, size=max(-(-length // step) * step, step))


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """``codes`` (integers, any shape) as the packed bytes that the operators here read."""
    return pack(codes.reshape(-1), bits)


def block_variant(attributes: Mapping, facts: NodeFacts) -> str:
    """One body serves every facts; the axis must be counted from the back, because the function knows no rank."""
    if attributes["axis"] >= 0:
        raise ConfigError(f"axis of BlockDequantize is {attributes['axis']}; it is counted from the back: -1, -2 ..")
    return ""


def write_block(body: Body, attributes: Mapping, label: str) -> str:
    """The body of ``BlockDequantize`` on ``codes``, ``scales``, ``shifts``, ``tensor_scale``."""
    block, axis, length = block_of(attributes), attributes["axis"], attributes["length"]
    runs = block.size // block.sub_block if block.sub_block else 1
    outer, before = body.dimensions("scales", 0, axis), body.dimensions("scales", 0, axis + 1 or None)
    after = [] if axis == -1 else [body.dimensions("scales", axis + 1)]
    values = _decoded(body, "codes", _table(block.element))
    if length:
        values = _filled(body, values, body.concat(outer, body.ints(length), *after), axis, -length % block.size)
    blocks = body.op("Reshape", values, body.concat(before, body.ints(runs, block.size // runs), *after))
    y = body.op("Mul", blocks, _step(body, block, before, after, runs))
    y = body.op("Reshape", y, body.concat(outer, body.ints(-1), *after))
    return body.op("Slice", y, body.ints(0), body.ints(length), body.ints(axis)) if length else y


def _filled(body: Body, values: str, shape: str, axis: int, missing: int) -> str:
    """The first of the flat ``values`` in ``shape``, ``missing`` zeros appended along ``axis``."""
    rows = body.op("Reshape", _first(body, values, shape), shape)
    rank = body.op("Shape", shape)
    end = body.op("Pad", body.ints(missing), body.concat(body.op("Add", rank, body.ints(axis)), body.ints(-axis - 1)))
    return body.op("Pad", rows, body.concat(body.op("Expand", np.array([0], np.int64), rank), end))


def _first(body: Body, values: str, shape: str) -> str:
    """As many of the flat ``values`` as ``shape`` has elements; the last byte may hold more codes."""
    count = body.op("ReduceProd", shape, attributes={"keepdims": 1})
    return body.op("Slice", values, body.ints(0), count, body.ints(0))


def _step(body: Body, block: Block, before: str, after: list[str], runs: int) -> str:
    """The value of the element 1 in every (sub-)block, as [.., blocks, runs or 1, 1, after..]."""
    table = block.storage.decode(_codes(8), 0).astype(np.float32) * np.float32(block.unit)
    step = body.op("Gather", table, body.cast("scales", "INT32"))
    if block.tensor_scale:
        step = body.op("Mul", step, "tensor_scale")
    step = body.op("Reshape", step, body.concat(before, body.ints(1, 1), *after))
    if not block.sub_block:
        return step
    factors = _decoded(body, "shifts", 2.0 ** -_codes(block.shift_bits).astype(np.float32))
    return body.op("Mul", step, body.op("Reshape", factors, body.concat(before, body.ints(runs, 1), *after)))


def packed_variant(attributes: Mapping, facts: NodeFacts) -> str:
    """The overload of a node at ``facts``: granularity."""
    return "axis" if facts.per_axis else "tensor"


def write_packed(body: Body, attributes: Mapping, label: str) -> str:
    """The body of ``PackedDequantize`` on ``codes``, ``scale``, ``zero_point``, ``shape``."""
    values = _decoded(body, "codes", _table(ELEMENTS[attributes["format"]]))
    x = body.op("Reshape", _first(body, values, "shape"), "shape")
    zero_point = body.cast(beside(body, "zero_point", x, label, attributes["axis"]), "FLOAT")
    return body.op("Mul", body.op("Sub", x, zero_point), beside(body, "scale", x, label, attributes["axis"]))


def _table(element: Element) -> np.ndarray:
    """The values of all codes of ``element``, float32."""
    codes = _codes(int(element.bits))
    signed = isinstance(element, Int) and element.signed
    return element.decode(sign_extended(codes, element.bits) if signed else codes, 0)


def _codes(bits: int) -> np.ndarray:
    return np.arange(1 << bits, dtype=np.uint8)


def _decoded(body: Body, packed: str, table: np.ndarray) -> str:
    """The stream of bits ``packed`` (uint8 [bytes]) through ``table``, one float32 per code, flat."""
    bits = int(table.size).bit_length() - 1
    table = table.astype(np.float32)
    wide = body.cast(packed, "INT32")
    if 8 % bits == 0:
        places = np.arange(0, 8, bits)
        several = table[(np.arange(256)[:, None] >> places) & ((1 << bits) - 1)]
        return body.op("Reshape", body.op("Gather", several, wide), body.ints(-1))
    size = lcm(bits, 8) // 8
    start = np.arange(size * 8 // bits) * bits
    missing = body.op("Mod", body.op("Neg", body.dimensions(packed)), np.array([size], np.int64))
    full = body.op("Pad", wide, body.concat(body.ints(0), missing))  # the last group may lack bytes
    groups = body.op("Reshape", full, body.ints(-1, size))
    low = _columns(body, groups, start // 8)
    high = _columns(body, groups, np.minimum(start // 8 + 1, size - 1))
    words = body.op("Add", low, body.op("Mul", high, np.array(256, np.int32)))
    shifted = body.op("Div", words, (1 << start % 8).astype(np.int32))
    values = body.op("Gather", table, body.op("Mod", shifted, np.array(1 << bits, np.int32)))
    return body.op("Reshape", values, body.ints(-1))


def _columns(body: Body, groups: str, index: np.ndarray) -> str:
    return body.op("Gather", groups, index.astype(np.int64), attributes={"axis": 1})
