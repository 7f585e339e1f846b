"""A model file read and written weight by weight: the protobuf in memory has none of them.

Protobuf's parser reads a file whole and copies every weight, which is most of the time of whoever only wants to know
the nodes, or the files that a model names. Here the fields of the messages that may hold weights are walked (graphs,
their nodes and subgraphs), and of a tensor whose data fit its shape and type the data become a place in the file:
external data, whose file is a name that no stranger can guess. Everything else goes to the parser as it is.

Written, the same fields get their data where a place stands, each made and freed in turn: the bytes are those of
protobuf's own serializer, which would hold every weight twice.

What is unusual (a field given twice, data that do not fit, a broken file) stays as it is, for the parser to judge.
Not handled: data that are neither raw nor packed floats; files above 2 GiB, which the parser refuses.
"""

from __future__ import annotations

import math
import mmap
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import EncodeError

from quark.errors import ModelError
from quark.ir.in_file import InFile
from quark.ir.surgery import shape_of
from quark.onnx.graph.budget import NODES

#: Message -> its fields (by their numbers in onnx.proto) that hold nodes or tensors, or messages that do.
INSIDE = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 11: "graph"},
    "tensor": {},
}
#: Bytes from which a node may hold a subgraph that counts.
HOLDS = 1 << 10
#: Fields of a TensorProto whose data may be passed over: dims, data_type, name, doc_string, data_location; its data.
PLAIN = frozenset((1, 2, 8, 12, 14))
#: Fields with data as they lie in memory -> the only type that they are of, where there is one: raw_data, float_data,
#: double_data.
DATA = {9: None, 4: onnx.TensorProto.FLOAT, 10: onnx.TensorProto.DOUBLE}
RAW = 9
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
#: Bytes of data that are worth it, and of files.
LARGE, LARGE_FILE, LIMIT = 1 << 12, 1 << 20, (1 << 31) - 1

Field = tuple[int, int, int, int]


class Weights:
    """The weights that a model's protobuf was read without.

    Args:
        path: the model file.
        state: what ``os.fstat`` said of it.

    Attributes:
        token: what stands for the file in the protobuf.
    """

    def __init__(self, path: Path, state: os.stat_result) -> None:
        self.token, self._said, self._state = uuid.uuid4().hex, path, _identity(state)
        self._path = path.resolve()  # the folder that the process is in may be another one when they are read

    def array(self, tensor: ir.ExternalTensor) -> np.ndarray:
        """The values of one of them, in memory of their own.

        Raises:
            ModelError: the file is another one by now, or has changed.
        """
        array = np.empty(tensor.shape.numpy(), tensor.dtype.numpy())
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(tensor.offset or 0)
                found = file.readinto(array.reshape(-1).view(np.uint8).data)
                same = found == array.nbytes and _identity(os.fstat(file.fileno())) == self._state
        except OSError as error:
            raise self._changed() from error
        if not same:
            raise self._changed()
        return array

    def check(self) -> None:
        """Raise ``ModelError`` where the file is another one by now, or has changed."""
        try:
            same = _identity(self._path.stat()) == self._state
        except OSError as error:
            raise self._changed() from error
        if not same:
            raise self._changed()

    def _changed(self) -> ModelError:
        return ModelError(f"the model file {str(self._said)!r} was changed while it was read: start again")

    def read(self, tensor: ir.ExternalTensor, name: str) -> ir.Tensor:
        """One of them, in memory; errors of ``array``."""
        return ir.Tensor(self.array(tensor), dtype=tensor.dtype, shape=shape_of(tensor), name=name)

    def place(self, tensor: ir.ExternalTensor, name: str) -> InFile:
        """The same, left in the file."""
        return InFile(self, self._path, tensor, name)


def read(path: Path) -> tuple[onnx.ModelProto, Weights | None]:
    """The protobuf of a model file, without its external data, and the weights that were passed over, if any were.

    Raises:
        OSError: the file cannot be read.
        google.protobuf.message.DecodeError, ValueError: it is damaged.
        ModelError: it has too many nodes, told before the parser makes objects of all of them.
    """
    if LARGE_FILE <= path.stat().st_size <= LIMIT:
        with suppress(_Broken), path.open("rb") as file:
            weights = Weights(path, os.fstat(file.fileno()))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole, memoryview(whole) as view:
                _check_nodes(view, path)
                pieces = _light(view, 0, len(view), "model", weights.token)
                light = b"".join(one if isinstance(one, bytes) else view[one.start : one.stop] for one in pieces)
                return onnx.ModelProto.FromString(light), weights
    return onnx.load(path, format="protobuf", load_external_data=False), None


def write(path: Path, proto: onnx.ModelProto, token: str, tensors: Sequence[ir.TensorProtocol]) -> None:
    """Write a protobuf with weights that it was made without.

    Args:
        path: the file.
        proto: where it has external data in the file ``token``, the tensor goes whose number its offset is.
        token: a name that no file has.
        tensors: the weights.

    Raises:
        OSError: the file cannot be written.
        google.protobuf.message.EncodeError: it would be larger than a protobuf may be.
    """
    view = memoryview(proto.SerializeToString())
    pieces = _filled(view, 0, len(view), "model", token, tensors)
    if _size(pieces) > LIMIT:
        raise EncodeError(f"{_size(pieces)} bytes; a protobuf holds at most {LIMIT}")
    with path.open("wb") as file:
        for piece in pieces:
            if isinstance(piece, memoryview):
                file.write(piece)
            else:
                cast(Any, piece).tofile(file)  # every tensor of onnx_ir has it; its protocol does not say so


def _identity(state: os.stat_result) -> tuple[int, ...]:
    """What tells a file from itself with another content; some mounts of remote storage number files anew."""
    return state.st_size, state.st_mtime_ns


class _Broken(ValueError):
    """The fields of a file cannot be walked."""


def _check_nodes(view: memoryview, path: Path) -> None:
    """Refuse a file of too many nodes before the parser makes an object of each."""
    if next(islice(_nodes(view, 0, len(view), "model"), NODES, None), None) is not None:
        raise ModelError(f"{str(path)!r} has more than {NODES} nodes; at most so many are taken")


def _nodes(view: memoryview, start: int, end: int, message: str) -> Iterator[Field]:
    """The nodes of a message, at any depth; small ones are not looked into."""
    for field in _fields(view, start, end):
        inner = INSIDE[message].get(field[0])
        if inner == "node":
            yield field
        if inner not in (None, "tensor") and (inner != "node" or field[3] - field[2] >= HOLDS):
            yield from _nodes(view, field[2], field[3], inner)


def _light(view: memoryview, start: int, end: int, message: str, token: str) -> list[range | bytes]:
    """A message whose large weights are places in the file: places of it, and bytes in between.

    What is small is not looked into. Places are no views: those of a traceback would keep the file mapped.
    """
    made: list[range | bytes] = []
    for number, begin, content, stop in _fields(view, start, end):
        inner = INSIDE[message].get(number)
        if inner is None or stop - content < LARGE or view[begin] & 7 != BYTES:
            made.append(range(begin, stop))
        elif inner == "tensor":
            placed = _placed(view, content, stop, token)
            made += [range(begin, stop)] if placed is None else [_head(number, len(placed)), placed]
        else:
            pieces = _light(view, content, stop, inner, token)
            made += [_head(number, sum(map(len, pieces))), *pieces]
    return made


def _placed(view: memoryview, start: int, end: int, token: str) -> bytes | None:
    """The bytes of a tensor whose data are a place in the file; ``None`` where they have to stay."""
    fields = list(_fields(view, start, end))
    data = [one for one in fields if one[0] in DATA]
    if len(data) != 1 or any(one[0] not in PLAIN for one in fields if one is not data[0]):
        return None
    number, _, place, stop = data[0]
    tensor = onnx.TensorProto.FromString(b"".join(view[one[1] : one[3]] for one in fields if one is not data[0]))
    fits = stop - place >= LARGE and stop - place == _bytes_of(tensor)
    if not fits or DATA[number] not in (None, tensor.data_type) or tensor.data_location:
        return None
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", token), ("offset", place), ("length", stop - place)):
        tensor.external_data.add(key=key, value=str(value))
    return bytes(tensor.SerializeToString())


def _filled(
    view: memoryview, start: int, end: int, message: str, token: str, tensors: Sequence[ir.TensorProtocol]
) -> list[memoryview | ir.TensorProtocol]:
    """A model or its graph with tensors in their places."""
    made: list[memoryview | ir.TensorProtocol] = []
    for number, begin, content, stop in _fields(view, start, end):
        inner, pieces = INSIDE[message].get(number), None
        if inner == "graph":
            pieces = _filled(view, content, stop, inner, token, tensors)
        elif inner == "tensor":
            pieces = _inserted(view[content:stop], token, tensors)
        made += [view[begin:stop]] if pieces is None else [memoryview(_head(number, _size(pieces))), *pieces]
    return made


def _inserted(
    view: memoryview, token: str, tensors: Sequence[ir.TensorProtocol]
) -> list[memoryview | ir.TensorProtocol] | None:
    """The fields of a tensor with its data, by their numbers; ``None`` where nothing stands for them."""
    tensor = onnx.TensorProto.FromString(view)
    place = {entry.key: entry.value for entry in tensor.external_data}
    if place.get("location") != token:
        return None
    for field in ("external_data", "data_location"):
        tensor.ClearField(field)
    plain, data = memoryview(tensor.SerializeToString()), tensors[int(place["offset"])]
    later = next((begin for number, begin, _, _ in _fields(plain, 0, len(plain)) if number > RAW), len(plain))
    return [plain[:later], memoryview(_head(RAW, data.nbytes)), data, plain[later:]]


def _size(pieces: Sequence[memoryview | ir.TensorProtocol]) -> int:
    return sum(piece.nbytes for piece in pieces)


def _bytes_of(tensor: onnx.TensorProto) -> int:
    """Bytes of the data of a tensor of whole bytes; -1 for any other."""
    try:
        dtype = ir.DataType(tensor.data_type)
        whole = dtype.bitwidth % 8 == 0 and all(size >= 0 for size in tensor.dims)
    except (ValueError, TypeError):  # no type, or one without a width
        return -1
    return math.prod(tensor.dims) * dtype.bitwidth // 8 if whole else -1


def _fields(view: memoryview, start: int, end: int) -> Iterator[Field]:
    """Number, begin, begin of the content and end of every field."""
    place = start
    while place < end:
        key, content = _varint(view, place, end)
        kind = key & 7
        if kind == BYTES:
            length, content = _varint(view, content, end)
            stop = content + length
        elif kind == VARINT:
            stop = _varint(view, content, end)[1]
        elif kind in (FIXED64, FIXED32):
            stop = content + (8 if kind == FIXED64 else 4)
        else:
            raise _Broken
        if stop > end or not key >> 3:
            raise _Broken
        yield key >> 3, place, content, stop
        place = stop


def _varint(view: memoryview, place: int, end: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = 0
    for at in range(place, min(place + 10, end)):
        byte = view[at]
        value |= (byte & 127) << 7 * (at - place)
        if byte < 128:
            return value, at + 1
    raise _Broken


def _head(number: int, length: int) -> bytes:
    """What stands before the content of a field of bytes."""
    head = bytearray()
    for rest in (number << 3 | BYTES, length):
        while rest > 127:
            head.append(rest & 127 | 128)
            rest >>= 7
        head.append(rest)
    return bytes(head)
