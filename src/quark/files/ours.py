"""Whether a file is a result of this package, which a command may replace without being told to.

A model says so in its ``producer_name`` or metadata; pages, plans and other text hold ``MARK``. At most ``LOOKED_AT``
bytes are read, whatever the size of the file: of a protobuf only the first ``FIELDS`` fields of its outermost message,
whose graph is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NAME = "openquark"
MARK = f"written by {NAME}"
LOOKED_AT = 1 << 22
FIELDS = 10_000
VARINT_BYTES = 10
#: Fields of onnx.ModelProto: producer_name, metadata_props; and of its entries: key.
PRODUCER, METADATA, KEY = 2, 14, 1
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers


def is_ours(path: Path, kind: str) -> bool:
    """Whether the file at ``path`` is a result of ours of a kind: "model", or "text" for everything else.

    Files that cannot be read or are something else are not ours.
    """
    try:
        with path.open("rb") as file:
            if kind == "model":
                return any(value.startswith(NAME.encode()) for value in _names(file))
            head = file.read(LOOKED_AT)
    except (OSError, ValueError):
        return False
    return MARK.encode() in head


def _names(file: BinaryIO) -> Iterator[bytes]:
    """The producer and the metadata keys of a model.

    Raises:
        ValueError: the file is not a protocol buffer.
    """
    for _ in range(FIELDS):
        tag = _varint(file)
        if tag is None:
            return
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            _varint(file)
        elif wire in (FIXED32, FIXED64):
            file.seek(4 if wire == FIXED32 else 8, 1)
        elif wire == BYTES:
            size = _varint(file)
            if size is None:
                raise ValueError("cut off")
            if number in (PRODUCER, METADATA) and size <= LOOKED_AT:
                content = file.read(size)
                yield content if number == PRODUCER else _key(content)
            else:
                file.seek(size, 1)
        else:
            raise ValueError("no protocol buffer")


def _key(entry: bytes) -> bytes:
    """The key of a metadata entry, where it comes first, as every writer has it."""
    return entry[2 : 2 + entry[1]] if len(entry) > 1 and entry[0] == KEY << 3 | BYTES else b""


def _varint(file: BinaryIO) -> int | None:
    """The next number; ``None`` at the end.

    Raises:
        ValueError: it has more bytes than a number has.
    """
    value = 0
    for place in range(VARINT_BYTES):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 127) << 7 * place
        if byte[0] < 128:
            return value
    raise ValueError("no protocol buffer")
