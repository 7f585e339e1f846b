"""Arrays of numbers in .npy and .npz files, read with care: a header is believed only where the file bears it out.

A .npy file is mapped, so that only what is used is read. Of a .npz file only the arrays that are asked for are
unpacked, and none that says to be larger than it is. Objects, texts and structures are never loaded.

Not handled: arrays of more than :data:`WHOLE` bytes inside a .npz file (a .npy file is mapped and may be of any size).
"""

from __future__ import annotations

import lzma
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from quark.errors import DataError, QuarkError
from quark.reading import reason_of, regular_file

WHOLE = 2**33
"""Bytes that one array of a .npz file may take in memory: 8 GiB."""
LENGTHS = {1: 2, 2: 4, 3: 4}
"""Version of the .npy format -> bytes that the length of its header takes."""
LONGEST_HEADER = 2**16
MOST_AXES = 32
FIELDS = {
    "descr": re.compile(r"""['"]descr['"]\s*:\s*['"]([<>|=]?[biuf][1248]|[|]?b1|[?])['"]"""),
    "fortran_order": re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)"""),
    "shape": re.compile(r"""['"]shape['"]\s*:\s*\(([\d, L]*)\)"""),
}
"""The header: a Python dictionary of three entries. Types are numbers of 1 to 8 bytes, and truth values."""
_TEXT = re.compile(r"""['"]descr['"]\s*:\s*['"]([<>|=]?[USO][0-9]*)['"]""")
_DAMAGED = (ValueError, TypeError, OverflowError, MemoryError, OSError, EOFError)
_BROKEN_ZIP = (
    *(*_DAMAGED, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(NotImplementedError, RuntimeError, KeyError, IndexError),
)
"""What ``zipfile`` raises: unknown compression, encryption, records that point outside."""


def load_array(path: str | os.PathLike[str], kind: type[QuarkError] = DataError) -> np.ndarray:
    """The array of a .npy file, mapped: read-only.

    Raises:
        kind: no regular file, no .npy file, shorter than its header says, or not an array of numbers.
    """
    size = regular_file(path, kind)
    with _said(path, kind, _DAMAGED), open(path, "rb") as file:
        shape, order, dtype = _header(file)
        start = file.tell()
        needed = math.prod(shape) * dtype.itemsize
        if start + needed > size:
            raise ValueError(f"its header promises {needed} bytes of values, and {size - start} are there")
        if not needed:
            return np.empty(shape, dtype)
        return np.memmap(path, dtype, "r", start, shape, order)


class ArrayArchive(Mapping[str, np.ndarray]):
    """The arrays of a .npz file by name; each is unpacked when it is asked for.

    Raises:
        kind: no regular file, no archive of .npy files, or a name that is there twice.
    """

    def __init__(self, path: str | os.PathLike[str], kind: type[QuarkError] = DataError) -> None:
        self._path, self._kind = Path(path), kind
        regular_file(path, kind)
        with self._opened() as archive:
            entries = archive.infolist()
            self._members = {entry.filename.removesuffix(".npy"): entry.filename for entry in entries}
            if len(self._members) < len(entries):
                raise ValueError("two of its arrays have one name")

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> np.ndarray:
        member = self._members[name]
        with self._opened(name) as archive, archive.open(member) as file:
            return _unpacked(file)

    @contextmanager
    def _opened(self, name: str = "") -> Iterator[zipfile.ZipFile]:
        with _said(self._path, self._kind, _BROKEN_ZIP, name), zipfile.ZipFile(self._path) as archive:
            yield archive


def _unpacked(file: IO[bytes]) -> np.ndarray:
    """The array of one member."""
    shape, order, dtype = _header(file)
    needed = math.prod(shape) * dtype.itemsize
    if needed > WHOLE:
        raise ValueError(f"it takes {needed} bytes, and at most {WHOLE} are unpacked: store it as a .npy file")
    values = file.read(needed)
    if len(values) < needed or file.read(1):  # reading to the end compares the check sum
        raise ValueError(f"its header promises {needed} bytes of values, and the archive has another number")
    return np.frombuffer(values, dtype).reshape(shape, order=order)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], Any, np.dtype]:
    """Shape, order ("C" or "F") and type of what follows.

    Read here and not by NumPy, which hands the text to Python's own parser: that fails in many ways, and in threads
    that read at once (cpython issue 106905).
    """
    start = file.read(8)
    if start[:6] != b"\x93NUMPY" or len(start) < 8 or start[6] not in LENGTHS:
        raise ValueError("it does not begin like a .npy file of version 1, 2 or 3")
    size = int.from_bytes(file.read(LENGTHS[start[6]]), "little")
    text = file.read(min(size, LONGEST_HEADER)).decode("latin-1")
    found = {name: pattern.findall(text) for name, pattern in FIELDS.items()}
    if not found["descr"] and (words := _TEXT.findall(text)):
        way = "samples with text go into the Python functions, as NumPy arrays"
        raise ValueError(f"it holds text or objects (type {words[0]:.20}), and files are read for numbers: {way}")
    if len(text) < size or any(len(values) != 1 for values in found.values()):
        raise ValueError(f"its header {text:.80} does not say what type and shape of numbers follow")
    sizes = [digits for digits in re.split(r"[, L]+", found["shape"][0]) if digits]
    if len(sizes) > MOST_AXES or any(len(digits) > 18 for digits in sizes):
        raise ValueError(f"its shape ({found['shape'][0]:.80}) is not valid")
    shape, dtype = tuple(map(int, sizes)), np.dtype(found["descr"][0])
    if math.prod(shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"its shape {shape} is not valid")
    return shape, "F" if found["fortran_order"][0] == "True" else "C", dtype


@contextmanager
def _said(path: object, kind: type[QuarkError], damages: tuple[type[Exception], ...], name: str = "") -> Iterator[None]:
    """Whatever a damaged file raises, as one sentence about it."""
    try:
        yield
    except damages as error:
        suffix = Path(str(path)).suffix or "array"
        which = f" (array {name!r:.80})" if name else ""
        raise kind(f"{str(path)!r}{which} cannot be read as {suffix} data: {reason_of(error)}") from error
