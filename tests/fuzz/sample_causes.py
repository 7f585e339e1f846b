"""Damage to samples that are not arrays or pictures, and to what is known of them: sounds, lists of files, labels."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.causes import Cause, Finding
from tests.fuzz.config_causes import VALUES
from tests.fuzz.data_causes import INPUT, npy
from tests.fuzz.torch_causes import LONG, TEXTS

from quark.cli.sources import find_samples
from quark.onnx.data import ModelInput, checked
from quark.onnx.labels import LabelSource, boxes_of, classes_of, mask_of, masks_of
from quark.onnx.preprocessing import Preprocessing

SOUND_INPUT = ModelInput("x", (1, None), np.dtype(np.float32))
FRAMES = 48
NAMES = ("a.png", "b.png")


def read(folder: Path) -> None:
    """Read sounds, what a list names, or labels, as commands do.

    Raises:
        Finding: frames outside -1..1, or labels that are none.
    """
    if os.path.lexists(folder / "d.wav"):
        for feed in checked(find_samples(folder, [SOUND_INPUT]), [SOUND_INPUT]):
            if not feed["x"].size or not np.abs(feed["x"]).max() <= 1:
                raise Finding("frames that no file holds")
        return
    if os.path.lexists(folder / "list.txt"):
        for feed in checked(find_samples(folder / "list.txt", [INPUT]), [INPUT]):
            if feed["x"].shape[1:] != (3, 4, 5):
                raise Finding(f"accepted {feed['x'].shape}")
        return
    path = next(one for one in sorted(folder.iterdir()) if one.name.startswith("labels"))
    labels(LabelSource(folder / "m.onnx", path, [folder / name for name in NAMES]))


def labels(given: LabelSource) -> None:
    name = str(given.labels)
    if name.endswith(".json"):
        for boxes in boxes_of(given):
            for resize in ("stretch", "letterbox"):
                there = LabelSource(given.model, given.labels, given.files, Preprocessing(resize=resize))
                if not np.isfinite(there.seen(boxes, (8, 8), False)).all():
                    raise Finding("a box without numbers")
    elif "masks" in name:
        for mask in masks_of(given):
            if mask_of(mask, (4, 5), given.settings).shape != (4, 5):
                raise Finding("a mask of another size")
    elif any(type(one) is not int or one < 0 for one in classes_of(given)):
        raise Finding("a class that is none")


def put(name: str, content: bytes, folder: Path) -> None:
    (folder / name).write_bytes(content)


# ---- sounds ----------------------------------------------------------------------------------------------------------

SOUNDS: list[Cause] = []
FIELDS: dict[str, tuple[str, int]] = {
    "format": ("H", 1), "channels": ("H", 1), "rate": ("I", 16000), "bytes a second": ("I", 32000),
    "bytes a frame": ("H", 2), "bits": ("H", 16),
}  # fmt: skip
BODY = (np.sin(np.arange(FRAMES)) * 30000).astype("<i2").tobytes()


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(content) if size is None else size % 2**32) + content


def form(**values: int) -> bytes:
    named = {key.replace(" ", "_"): row for key, row in FIELDS.items()}
    return b"".join(struct.pack(f"<{kind}", values.get(key, good)) for key, (kind, good) in named.items())


def wav(*chunks: bytes, size: int | None = None, kind: bytes = b"WAVE") -> bytes:
    return chunk(b"RIFF", kind + b"".join(chunks), size)


GOOD = wav(chunk(b"fmt ", form()), chunk(b"data", BODY))
WAVS: dict[tuple[str, str], bytes] = {
    ("file", "as it should be"): GOOD,
    ("file", "empty"): b"",
    ("file", "text"): b"la la la",
    ("file", "MP3"): b"ID3\x04" + bytes(60),
    ("file", "FLAC"): b"fLaC" + bytes(60),
    ("file", "RIFX"): b"RIFX" + GOOD[4:],
    ("file", "twice"): GOOD * 2,
    ("file", "with a tail"): GOOD + b"tail",
    ("kind", "AVI"): wav(chunk(b"fmt ", form()), chunk(b"data", BODY), kind=b"AVI "),
    ("chunks", "none"): wav(),
    ("chunks", "no fmt"): wav(chunk(b"data", BODY)),
    ("chunks", "no data"): wav(chunk(b"fmt ", form())),
    ("chunks", "data before fmt"): wav(chunk(b"data", BODY), chunk(b"fmt ", form())),
    ("chunks", "fmt twice"): wav(chunk(b"fmt ", form()), chunk(b"fmt ", form(channels=9)), chunk(b"data", BODY)),
    ("chunks", "data twice"): wav(chunk(b"fmt ", form()), chunk(b"data", BODY), chunk(b"data", BODY)),
    ("chunks", "a stranger"): wav(chunk(b"LIST", b"INFO"), chunk(b"fmt ", form()), chunk(b"data", BODY)),
    ("chunks", "a stranger of odd length"): wav(chunk(b"LIST", b"INFOx"), chunk(b"fmt ", form()), chunk(b"data", BODY)),
    ("data", "empty"): wav(chunk(b"fmt ", form()), chunk(b"data", b"")),
    ("data", "one byte"): wav(chunk(b"fmt ", form()), chunk(b"data", b"x")),
    ("data", "an odd number of bytes"): wav(chunk(b"fmt ", form()), chunk(b"data", BODY[:-1])),
    ("fmt", "empty"): wav(chunk(b"fmt ", b""), chunk(b"data", BODY)),
    ("fmt", "a byte short"): wav(chunk(b"fmt ", form()[:-1]), chunk(b"data", BODY)),
    ("fmt", "longer"): wav(chunk(b"fmt ", form() + bytes(24)), chunk(b"data", BODY)),
}
for size in (0, 1, 4, 36, 2**31 - 1, 2**31, 2**32 - 1):
    WAVS["size of the file", str(size)] = wav(chunk(b"fmt ", form()), chunk(b"data", BODY), size=size)
    WAVS["size of fmt", str(size)] = wav(chunk(b"fmt ", form(), size), chunk(b"data", BODY))
    WAVS["size of data", str(size)] = wav(chunk(b"fmt ", form()), chunk(b"data", BODY, size))
for field, (kind, _) in FIELDS.items():
    most = 2 ** (8 * struct.calcsize(kind)) - 1
    for value in {0, 1, 2, 3, 7, 8, 24, 32, 33, 64, 65534, most // 2, most}:
        changed = form(**{field.replace(" ", "_"): value})
        WAVS[field, str(value)] = wav(chunk(b"fmt ", changed), chunk(b"data", BODY))
for share in (0.1, 0.2, 0.3, 0.5, 0.9):
    WAVS["file", f"cut at {share}"] = GOOD[: int(len(GOOD) * share)]
for (field, damage), content in WAVS.items():
    SOUNDS.append(Cause("sound", field, damage, partial(put, "d.wav", content)))

# ---- lists -----------------------------------------------------------------------------------------------------------

LISTS: list[Cause] = []
SAMPLE = npy(np.ones((1, 3, 4, 5), np.float32))


def listed(text: bytes, folder: Path) -> None:
    """A list, and beside it what its lines may name."""
    (folder / "a.npy").write_bytes(SAMPLE)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.npy").write_bytes(SAMPLE)
    (folder / "notes.md").write_text("x")
    (folder / "a.npy.lnk").symlink_to("a.npy")
    (folder / "circle.npy").symlink_to("circle.npy")
    if os.name == "posix":
        os.mkfifo(folder / "pipe.npy")
    (folder / "list.txt").write_bytes(text)


LINES = {
    "empty": b"", "a blank line": b"\n\n", "comments": b"# a\n#b\n", "as it should be": b"a.npy\nsub/b.npy\n",
    "comments between": b"a.npy\n# x\nsub/b.npy", "Windows ends": b"a.npy\r\nsub/b.npy\r\n",
    "old Mac ends": b"a.npy\ra.npy",
    "spaces around": b"  a.npy  \n", "a name twice": b"a.npy\na.npy\n", "BOM": b"\xef\xbb\xbfa.npy\n",
    "tabs": b"\ta.npy\n",
    "not UTF-8": b"\xff\xfe\n", "UTF-16": "a.npy\n".encode("utf-16"), "NUL": b"a\0b\n", "NUL behind": b"a.npy\0\n",
    "a folder": b"sub\n", "itself": b"list.txt\n", "a pipe": b"pipe.npy\n", "a circle of links": b"circle.npy\n",
    "a device": b"/dev/zero\n", "null": b"/dev/null\n", "nowhere": b"nowhere.npy\n", "absolute": b"/nowhere/x.npy\n",
    "above": b"../nowhere.npy\n", "home": b"~/nowhere.npy\n", "variable": b"$HOME/x.npy\n", "glob": b"*.npy\n",
    "root": b"/\n", "point": b".\n", "two points": b"..\n", "a URL": b"https://example.org/a.npy\n",
    "quotes": b'"a.npy"\n',
    "a name of 300 signs": b"n" * 300 + b".npy\n", "a name of 100,000 signs": LONG.encode() + b"\n",
    "deep path": b"a/" * 3000 + b"a.npy\n", "10,000 lines": b"a.npy\n" * 10000, "a link": b"a.npy.lnk\n",
    "labels behind": b"a.npy 3\n", "CSV": b"a.npy,3\n", "JSON": b'["a.npy"]\n', "another kind": b"notes.md\n",
    "kinds mixed": b"notes.md\na.npy\n", "backslashes": b"sub\\b.npy\n", "form feed": b"a.npy\x0ca.npy\n",
    "line separator": "a.npy\u2028a.npy\n".encode(), "next line": "a.npy\x85sub/b.npy\n".encode(),
    "vertical tab": b"a.npy\x0bsub/b.npy", "upper case": b"A.NPY\n", "trailing slash": b"a.npy/\n",
    "a stream": b"a.npy:stream\n", "percent": b"a%2Enpy\n", "emoji": "🦆.npy\n".encode(), "escape": b"\x1b[31ma.npy\n",
    "a surrogate": b"\xed\xa0\x80.npy\n", "overlong": b"\xc0\xae.npy\n", "inf": b"inf\n", "a number": b"7\n",
    "reserved": b"con\n", "dash": b"-\n", "dashes": b"--data\n", "semicolon": b"a.npy;a.npy\n", "hidden": b".a.npy\n",
    "double slash": b"sub//b.npy\n", "through a file": b"a.npy/../sub/b.npy\n", "through above": b"sub/../a.npy\n",
}  # fmt: skip
for damage, content in LINES.items():
    LISTS.append(Cause("list", "line", damage, partial(listed, content)))
for damage, content in TEXTS.items():
    LISTS.append(Cause("list", "text", damage, partial(listed, content)))

# ---- labels ----------------------------------------------------------------------------------------------------------

LABELS: list[Cause] = []
COCO: dict[str, Any] = {
    "images": [{"id": 1, "file_name": "a.png", "width": 9, "height": 8}, {"id": 2, "file_name": "b.png", "width": 9,
    "height": 8}],
    "annotations": [{"image_id": 1, "category_id": 5, "bbox": [1, 2, 3.5, 4], "iscrowd": 0}],
    "categories": [{"id": 5, "name": "duck"}],
}  # fmt: skip


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from fields(inner, (*path, key))


def coco(path: tuple[Any, ...], change: Any) -> bytes:
    made = json.loads(json.dumps(COCO))
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if change is GONE:
        del inner[path[-1]]
    elif path:
        inner[path[-1]] = change
    return json.dumps(made).encode()


GONE = object()
for number, path in enumerate(fields(COCO)):
    name = ".".join(map(str, path))
    for index, value in enumerate((*VALUES, float("nan"), float("inf"), 1e308)):
        if (number + index) % 3 == 0:
            LABELS.append(
                Cause("labels", name, f"{index}: {value!r:.20}", partial(put, "labels.json", coco(path, value)))
            )
    LABELS.append(Cause("labels", name, "gone", partial(put, "labels.json", coco(path, GONE))))
for damage, content in TEXTS.items():
    for name in ("labels.json", "labels.txt", "labels.csv", "labels.npy"):
        LABELS.append(Cause("labels", name, damage, partial(put, name, content)))
CLASSES = {
    "as it should be": b"1\n2\n", "negative": b"-1\n2\n", "a fraction": b"1.5\n2\n", "words": b"duck\ngoose\n",
    "too few": b"1\n", "too many": b"1\n2\n3\n", "digits": b"9" * 5000 + b"\n2\n", "superscript": "²\n3\n".encode(),
    "Arabic digits": "٣\n٤\n".encode(), "roman": "Ⅳ\n1\n".encode(), "hexadecimal": b"0x1\n2\n", "spaces": b" 1 \n 2 \n",
    "a named file": b"a.png,1\nb.png,2\n", "another file": b"z.png,1\nb.png,2\n",
    "a head": b"file,class\na.png,1\nb.png,2\n",
    "three columns": b"a.png,1,2\nb.png,1,2\n", "uneven": b"a.png,1\nb.png\n", "quotes": b'"a.png","1"\n"b.png","2"\n',
    "an open quote": b'"a.png,1\nb.png,2\n', "a field of 200,000 signs": b"a" * 200000 + b",1\nb.png,2\n",
    "NUL": b"a.png,\0\n",
}  # fmt: skip
for damage, content in CLASSES.items():
    for name in ("labels.txt", "labels.csv"):
        LABELS.append(Cause("labels", f"classes in {name}", damage, partial(put, name, content)))
MASKS = {
    "as it should be": np.zeros((2, 4, 5), np.int64), "another size": np.zeros((2, 5, 4), np.uint8),
    "one too few": np.zeros((1, 4, 5), np.uint8), "real numbers": np.zeros((2, 4, 5)), "flat": np.zeros(40, np.int8),
    "negative": np.full((2, 4, 5), -3), "no samples": np.zeros((0, 4, 5), np.uint8), "truth values": np.zeros((2, 4,
    5), bool),
}  # fmt: skip
for damage, array in MASKS.items():
    LABELS.append(Cause("labels", "masks", damage, partial(put, "labels_masks.npy", npy(array))))
    LABELS.append(Cause("labels", "classes as an array", damage, partial(put, "labels.npy", npy(array))))
