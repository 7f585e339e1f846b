"""Damage to samples: .npy, .npz, PNG and JPEG files, read as ``--data`` reads them."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from tests.fuzz.causes import Cause, Finding

from quark.cli.sources import find_samples
from quark.onnx.data import ModelInput, checked

INPUT = ModelInput("x", (None, 3, 4, 5), np.dtype(np.float32))
VALUES = np.arange(2 * 60, dtype=np.float32).reshape(2, 3, 4, 5) / 64
HUGE = 10**15
Content = bytes


def read(folder: Path) -> None:
    """Read all samples; those that are accepted are finite float32 of the input's shape.

    Raises:
        Finding: a sample that is not.
    """
    named = [folder / name for name in ("d.npy", "d.npz")]
    path = next((one for one in named if os.path.lexists(one)), folder)
    for feed in checked(find_samples(path, [INPUT]), [INPUT]):
        array = feed["x"]
        if array.dtype != np.float32 or array.shape[1:] != (3, 4, 5) or not np.isfinite(array).all():
            raise Finding(f"accepted {array.dtype} {array.shape}")


NPY: list[Cause] = []
NPZ: list[Cause] = []
IMAGE: list[Cause] = []


def put(causes: list[Cause], reader: str, name: str, field: str, damage: str, content: Content) -> None:
    def make(folder: Path) -> None:
        (folder / name).write_bytes(content)

    causes.append(Cause(reader, field, damage, make))


# ---- .npy ------------------------------------------------------------------------------------------------------------


def npy(array: np.ndarray = VALUES) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def headed(text: str, version: tuple[int, int] = (1, 0), body: bytes = VALUES.tobytes()) -> bytes:
    """A .npy file with any header."""
    header = text.encode("latin-1")
    size = struct.pack("<H" if version[0] == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + size + header + body


def header(descr: str = "'<f4'", fortran: str = "False", shape: str = "(2, 3, 4, 5)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n"


GOOD = npy()
FILES = {
    ("file", "as it should be"): GOOD,
    ("file", "empty"): b"",
    ("file", "text"): b"1, 2, 3",
    ("file", "pickle"): b"\x80\x04K\x01.",
    ("file", "zip"): b"PK\x03\x04" + bytes(60),
    ("file", "with a tail"): GOOD + b"tail",
    ("file", "twice"): GOOD * 2,
    ("magic", "one letter off"): b"\x93NUMPX" + GOOD[6:],
    ("version", "0.0"): GOOD[:6] + b"\0\0" + GOOD[8:],
    ("version", "9.9"): GOOD[:6] + b"\x09\x09" + GOOD[8:],
    ("version", "2.0"): headed(header(), (2, 0)),
    ("version", "3.0"): headed(header(), (3, 0)),
    ("version", "2.0 with a length of 1.0"): GOOD[:6] + b"\2\0" + GOOD[8:],
    ("length of the header", "0"): GOOD[:8] + b"\0\0" + GOOD[10:],
    ("length of the header", "65535"): GOOD[:8] + b"\xff\xff" + GOOD[10:],
    ("length of the header", "4 GiB"): GOOD[:6] + b"\2\0" + b"\xff\xff\xff\xff" + GOOD[12:],
    ("header", "empty"): headed(""),
    ("header", "code"): headed("__import__('os').system('true')\n"),
    ("header", "a list"): headed("[]\n"),
    ("header", "nested"): headed("(" * 5000 + ")" * 5000),
    ("header", "not closed"): headed("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3"),
    ("header", "double quotes"): headed('{"descr": "<f4", "fortran_order": False, "shape": (2, 3, 4, 5)}'),
    ("header", "a key twice"): headed(header().replace("}", "'shape': (1,), }")),
    ("header", "a key too much"): headed(header().replace("}", "'more': 1, }")),
    ("header", "no shape"): headed("{'descr': '<f4', 'fortran_order': False, }\n"),
    ("header", "no descr"): headed("{'fortran_order': False, 'shape': (2, 3, 4, 5), }\n"),
    ("header", "Latin-1"): headed(header().replace("\n", " é\n")),
    ("header", "of Python 2"): headed(header(shape="(2L, 3L, 4L, 5L)")),
    ("values", "cut"): GOOD[:-4],
    ("values", "cut at half"): GOOD[: len(GOOD) // 2],
    ("values", "none"): headed(header(), body=b""),
    ("values", "NaN"): npy(np.where(VALUES > 1, np.nan, VALUES).astype(np.float32)),
    ("values", "infinite"): npy(np.where(VALUES > 1, np.inf, VALUES).astype(np.float32)),
    ("values", "beyond float32"): npy(VALUES.astype(np.float64) * 1e300),
    ("values", "no samples"): npy(np.zeros((0, 3, 4, 5), np.float32)),
    ("values", "without batch axis"): npy(VALUES[0]),
    ("values", "one number"): npy(np.float32(3)),  # type: ignore[arg-type]
    ("values", "in Fortran order"): npy(np.asfortranarray(VALUES)),
}
for damage in (
    "object",
    "complex64",
    "complex128",
    "bool",
    "U4",
    "S4",
    "datetime64[s]",
    "float16",
    "float64",
    "longdouble",
):
    FILES["type of the values", damage] = npy(np.zeros((2, 3, 4, 5)).astype(damage))
for damage in ("int8", "uint8", "int64", "uint64", ">f4", ">f8"):
    FILES["type of the values", damage] = npy((VALUES * 64).astype(damage))
FILES["type of the values", "a structure"] = npy(np.zeros(2, [("a", "f4"), ("b", "i4")]))
FILES["type of the values", "int64 beyond float32"] = npy(np.full((2, 3, 4, 5), 2**62 + 1))
for damage in ("'<f3'", "'<f99999'", "'O'", "'|V4'", "None", "'x'", "''", "'<f4,<f4'", "{'a': 1}", "'(2,)<f4'", "1"):
    FILES["descr", damage] = headed(header(descr=damage))
for damage in ("None", "1", "'True'", "[]"):
    FILES["fortran_order", damage] = headed(header(fortran=damage))
for damage in (
    *("(-2, 3, 4, 5)", f"({HUGE},)", f"({HUGE}, {HUGE}, {HUGE})", "(4294967296, 4294967296)", "(2.0, 3, 4, 5)", "'x'"),
    *("None", "(2, 3, 4, None)", "(2, 3, 4, 5, 2)", "(" + "1, " * 40 + ")", "(" + "9" * 5000 + ",)", "2", "()", "(0,)"),
):
    FILES["shape", damage[:40]] = headed(header(shape=damage))
for (field, damage), content in FILES.items():
    put(NPY, "npy", "d.npy", field, damage, content)


def special(kind: str, folder: Path) -> None:
    target = folder / "d.npy"
    if kind == "a pipe":
        os.mkfifo(target)
    elif kind == "a folder":
        target.mkdir()
        (target / "notes.txt").write_text("x")
    else:
        target.symlink_to({"a link to nothing": "nowhere", "a circle of links": "d.npy", "a device": "/dev/zero"}[kind])


for kind in (
    "a folder",
    "a link to nothing",
    "a circle of links",
    *(("a pipe", "a device") if os.name == "posix" else ()),
):
    NPY.append(Cause("npy", "file", kind, partial(special, kind)))

# ---- .npz ------------------------------------------------------------------------------------------------------------


def npz(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def patched(content: bytes, signature: bytes, offset: int, new: bytes) -> bytes:
    """A zip file with other bytes at an offset behind the first record of a kind."""
    at = content.index(signature) + offset
    return content[:at] + new + content[at + len(new) :]


STORED, DEFLATED = npz({"x.npy": GOOD}), npz({"x.npy": GOOD}, zipfile.ZIP_DEFLATED)
LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
BIG = headed(header(shape="(1000000000,)"), body=b"")
ARCHIVES = {
    ("file", "as it should be"): STORED,
    ("file", "compressed"): DEFLATED,
    ("file", "empty"): b"",
    ("file", "a .npy file"): GOOD,
    ("file", "text"): b"x = 1",
    ("file", "an archive of nothing"): npz({}),
    ("file", "with a tail"): STORED + b"tail",
    ("file", "behind other bytes"): b"#!/bin/sh\n" + STORED,
    ("compression", "bzip2"): npz({"x.npy": GOOD}, zipfile.ZIP_BZIP2),
    ("compression", "LZMA"): npz({"x.npy": GOOD}, zipfile.ZIP_LZMA),
    ("member", "no array"): npz({"x.npy": b"hello"}),
    ("member", "empty"): npz({"x.npy": b""}),
    ("member", "a text"): npz({"x.txt": b"hello"}),
    ("member", "named without .npy"): npz({"x": GOOD}),
    ("member", "of another name, alone"): npz({"z.npy": GOOD}),
    ("member", "of other names"): npz({"y.npy": GOOD, "z.npy": GOOD}),
    ("member", "named like a path"): npz({"../../x.npy": GOOD}),
    ("member", "x and x.npy"): npz({"x.npy": GOOD, "x": GOOD}),
    ("member", "an archive"): npz({"x.npy": STORED}),
    ("member", "with a tail"): npz({"x.npy": GOOD + b"tail"}),
    ("member", "values cut"): npz({"x.npy": GOOD[:-4]}),
    ("member", "huge shape"): npz({"x.npy": BIG}),
    ("member", "objects"): npz({"x.npy": npy(np.array([{}]))}),
    ("member", "beside 1,000 others"): npz({**{f"a{k}.npy": GOOD for k in range(1000)}, "x.npy": GOOD}),
    ("member beside", "broken"): npz({"x.npy": GOOD, "labels.npy": b"no array"}),
}
for name in ("crc", "sizes", "time"):
    offset = {"crc": 16, "sizes": 20, "time": 12}[name]
    for damage, new in (("zero", bytes(4)), ("ones", b"\xff" * 4), ("seven", struct.pack("<I", 7))):
        ARCHIVES[f"{name} in the directory", damage] = patched(STORED, CENTRAL, offset, new)
        ARCHIVES[f"{name} in the directory, compressed", damage] = patched(DEFLATED, CENTRAL, offset, new)
for damage, new in (("encrypted", b"\x01\0"), ("patched data", b"\x20\0"), ("all flags", b"\xff\xff")):
    ARCHIVES["flags", damage] = patched(patched(STORED, CENTRAL, 8, new), LOCAL, 6, new)
for damage, new in (("99", b"\x63\0"), ("deflate64", b"\x09\0"), ("deflated, and is not", b"\x08\0")):
    ARCHIVES["method", damage] = patched(patched(STORED, CENTRAL, 10, new), LOCAL, 8, new)
for damage, new in (
    ("beyond the end", b"\xff\xff\xff\x7f"),
    ("into the directory", struct.pack("<I", len(STORED) - 60)),
):
    ARCHIVES["offset of the member", damage] = patched(STORED, CENTRAL, 42, new)
    ARCHIVES["offset of the directory", damage] = patched(STORED, END, 16, new)
for damage, new in (("0", b"\0\0"), ("65535", b"\xff\xff")):
    ARCHIVES["number of members", damage] = patched(STORED, END, 10, new)
    ARCHIVES["length of the name", damage] = patched(STORED, CENTRAL, 28, new)
    ARCHIVES["length of the extra field", damage] = patched(STORED, CENTRAL, 30, new)
    ARCHIVES["length of the local name", damage] = patched(STORED, LOCAL, 26, new)
    ARCHIVES["length of the comment", damage] = patched(STORED, END, 20, new)
for share in (0.1, 0.3, 0.5, 0.9, 0.99):
    ARCHIVES["file", f"cut at {share}"] = STORED[: int(len(STORED) * share)]
    ARCHIVES["file, compressed", f"cut at {share}"] = DEFLATED[: int(len(DEFLATED) * share)]
for place in (40, 60, 100, 300):
    ARCHIVES["stored bytes", f"flipped at {place}"] = patched(STORED, LOCAL, place, b"\xa5")
    ARCHIVES["compressed bytes", f"flipped at {place}"] = patched(
        DEFLATED, LOCAL, min(place, 150), bytes([place % 251])
    )
for (field, damage), content in ARCHIVES.items():
    put(NPZ, "npz", "d.npz", field, damage, content)


def bomb(name: str, folder: Path) -> None:
    """An array of 256 MB of zeros in 256 kB."""
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    head, block, crc, size = headed(header(shape="(67108864,)"), body=b""), bytes(1 << 20), 0, 0
    packed = io.BytesIO()
    for part in (head, *[block] * 256):
        crc, size = zlib.crc32(part, crc), size + len(part)
        packed.write(packer.compress(part))
    packed.write(packer.flush())
    data, text = packed.getvalue(), name.encode()
    common = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 0, crc, len(data), size, len(text), 0)
    local = LOCAL + common + text + data
    good = npz({"y.npy" if name == "x.npy" else "x.npy": GOOD})
    start = good.index(CENTRAL)
    directory = CENTRAL + b"\x14\0" + common + bytes(10) + struct.pack("<I", start) + text
    old = good[start : good.index(END)]
    end = struct.pack("<HHHHIIH", 0, 0, 2, 2, len(old) + len(directory), start + len(local), 0)
    (folder / "d.npz").write_bytes(good[:start] + local + old + directory + END + end)


NPZ.append(Cause("npz", "member beside", "that unpacks to 256 MB", partial(bomb, "labels.npy")))

# ---- images ----------------------------------------------------------------------------------------------------------


def image(kind: str, mode: str = "RGB", size: tuple[int, int] = (9, 8)) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, size, 77 if mode in ("L", "P", "1", "I", "I;16") else None).save(file, kind)
    return file.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(
    width: int = 9, height: int = 8, depth: int = 8, color: int = 2, more: bytes = b"", data: bytes | None = None
) -> bytes:
    rows = data if data is not None else zlib.compress(bytes((3 * min(width, 99) + 1) * min(height, 99)))
    first = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + first + more + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def late(kind: str, mode: str) -> Callable[[], bytes]:
    return lambda: image(kind, mode)


PICTURES: dict[tuple[str, str], bytes | Callable[[], bytes]] = {
    ("file", "PNG as it should be"): late("PNG", "RGB"),
    ("file", "JPEG as it should be"): late("JPEG", "RGB"),
    ("file", "empty"): b"",
    ("file", "text"): b"a picture",
    ("file", "GIF"): late("GIF", "P"),
    ("file", "TIFF"): late("TIFF", "RGB"),
    ("file", "BMP"): late("BMP", "RGB"),
    ("file", "EPS"): b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n",
    ("file", "SVG"): b"<svg/>",
    ("file", "zip"): npz({"a": b"b"}),
    ("file", "PNG with a tail"): lambda: image("PNG") + b"tail",
    ("file", "JPEG with a tail"): lambda: image("JPEG") + b"tail",
}
for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
    PICTURES["pixels of PNG", mode] = late("PNG", mode)
for mode in ("L", "CMYK"):
    PICTURES["pixels of JPEG", mode] = late("JPEG", mode)
for share in (0.05, 0.3, 0.6, 0.9, 0.98):
    PICTURES["PNG", f"cut at {share}"] = lambda share=share: (lambda all: all[: int(len(all) * share)])(image("PNG"))
    PICTURES["JPEG", f"cut at {share}"] = lambda share=share: (lambda all: all[: int(len(all) * share)])(image("JPEG"))
for width, height in (
    (0, 8),
    (9, 0),
    (2**31 - 1, 2**31 - 1),
    (2**32 - 1, 1),
    (60000, 60000),
    (20000, 20000),
    (9, 2**30),
):
    PICTURES["size in IHDR", f"{width} x {height}"] = png(width, height)
for depth, color in ((0, 2), (16, 2), (16, 0), (3, 2), (8, 7), (8, 3), (255, 255), (4, 2)):
    PICTURES["depth and color", f"{depth}, {color}"] = png(depth=depth, color=color)
EXTRA = {
    ("iCCP", "no text"): b"\xff" * 9,
    ("iCCP", "bomb"): b"p\0\0" + zlib.compress(bytes(1 << 26)),
    ("zTXt", "bomb"): b"k\0\0" + zlib.compress(bytes(1 << 26)),
    ("iTXt", "cut"): b"k",
    ("tEXt", "empty"): b"",
    ("tRNS", "too long"): bytes(999),
    ("PLTE", "empty"): b"",
    ("PLTE", "seven bytes"): bytes(7),
    ("gAMA", "empty"): b"",
    ("pHYs", "cut"): b"\1",
    ("eXIf", "no EXIF"): b"\xff" * 40,
    ("cHRM", "cut"): b"\1\2",
    ("acTL", "4 billion frames"): b"\xff" * 8,
    ("fcTL", "cut"): b"\1",
    ("IHDR", "a second one"): struct.pack(">IIBBBBB", 5, 5, 8, 2, 0, 0, 0),
    ("zzzz", "unknown"): b"x",
    ("ZZZZ", "unknown and critical"): b"x",
}
for (name, damage), content in EXTRA.items():
    PICTURES[f"chunk {name}", damage] = png(more=chunk(name.encode(), content))
for damage, data in {
    "none": b"",
    "no zlib": b"x" * 99,
    "too few rows": zlib.compress(bytes(20)),
    "filter 9": zlib.compress(b"\x09" * 224),
}.items():
    PICTURES["IDAT", damage] = png(data=data)
PICTURES["chunk length", "4 GiB"] = png().replace(struct.pack(">I", 13) + b"IHDR", b"\xff\xff\xff\xffIHDR")
PICTURES["chunk length", "0"] = png().replace(struct.pack(">I", 13) + b"IHDR", bytes(4) + b"IHDR")
PICTURES["check sum", "of IHDR"] = png().replace(chunk(b"IEND", b""), b"\0\0\0\0IEND\0\0\0\0")
for marker in (0xC0, 0xC4, 0xDB, 0xDA, 0xE0, 0xDD):
    for damage, new in (("length 0", b"\0\0"), ("length 65535", b"\xff\xff"), ("length 2", b"\0\2")):

        def made(marker: int = marker, new: bytes = new) -> bytes:
            all = image("JPEG")
            at = all.find(bytes([0xFF, marker]))
            return all if at < 0 else all[: at + 2] + new + all[at + 4 :]

        PICTURES[f"JPEG segment {marker:X}", damage] = made


def paint(content: bytes | Callable[[], bytes], folder: Path) -> None:
    (folder / "a.png").write_bytes(content if isinstance(content, bytes) else content())


for (field, damage), picture in PICTURES.items():
    IMAGE.append(Cause("image", field, damage, partial(paint, picture)))
