"""Damage to folders of language models: safetensors headers, the index, config.json, rows of tokens."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.causes import Cause, Finding

try:
    import quark.torch.export.checkpoint
    import quark.torch.language  # noqa: F401 - before a process is forked for every cause
except ImportError:  # torch is an extra: ``needs`` skips these readers
    pass

FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
DEEP = "[" * 100_000
DIGITS = "9" * 5_000
LONG = "n" * 100_000

SAFETENSORS: list[Cause] = []
INDEXES: list[Cause] = []
TOKENS: list[Cause] = []


def read(folder: Path) -> None:
    """Read every tensor of a checkpoint, or the rows of tokens.

    Raises:
        Finding: a tensor that is not the one that was written.
    """
    rows = next((folder / name for name in ("d.jsonl", "d.txt") if (folder / name).exists()), None)
    if rows is not None:
        from quark.torch.language import read_ids

        read_ids(rows, lambda: lambda text, **more: {"input_ids": [1, 2]})
        return
    from quark.torch.export.checkpoint import read_checkpoint

    for name, value in read_checkpoint(folder).tensors():
        if name == "a" and (tuple(value.shape) not in ((2, 3), (6,), (3, 2), (1, 6)) or value.numel() != 6):
            raise Finding(f"{name} has the shape {tuple(value.shape)}")


# ---- safetensors -----------------------------------------------------------------------------------------------------

BODY = np.arange(8, dtype=np.float32).tobytes()


def entry(dtype: Any = "F32", shape: Any = (2, 3), offsets: Any = (0, 24)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


GOOD = {"a": entry(), "b": entry(shape=(2,), offsets=(24, 32))}


def tensors(header: Any = None, body: bytes = BODY, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(GOOD if header is None else header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + body


def put(causes: list[Cause], reader: str, field: str, damage: str, files: dict[str, bytes]) -> None:
    def make(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    causes.append(Cause(reader, field, damage, make))


HEADERS: dict[tuple[str, str], bytes] = {
    ("file", "as it should be"): tensors(),
    ("file", "empty"): b"",
    ("file", "seven bytes"): b"1234567",
    ("file", "text"): b"weights, somewhere",
    ("file", "pickle"): b"\x80\x04K\x01.",
    ("file", "zip"): b"PK\x03\x04" + bytes(60),
    ("file", "with a tail"): tensors() + b"tail",
    ("body", "none"): tensors(body=b""),
    ("body", "a byte short"): tensors(body=BODY[:-1]),
    ("header", "empty object"): tensors({}, b""),
    ("header", "a list"): tensors([]),
    ("header", "null"): tensors(b"null"),
    ("header", "not UTF-8"): tensors(b'{"\xff\xfe": 1}'),
    ("header", "deep"): tensors(DEEP.encode()),
    ("header", "digits"): tensors(f'{{"a": {DIGITS}}}'.encode()),
    ("header", "spaces in front"): tensors(b"   " + json.dumps(GOOD).encode()),
    ("header", "spaces behind"): tensors(json.dumps(GOOD).encode() + b"   "),
    ("header", "a name twice"): tensors(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), BODY[:24]),
    ("header", "cut"): tensors(json.dumps(GOOD).encode()[:-5]),
    ("metadata", "a text"): tensors({"__metadata__": "x", **GOOD}),
    ("metadata", "a number in it"): tensors({"__metadata__": {"a": 1}, **GOOD}),
    ("metadata", "as it should be"): tensors({"__metadata__": {"a": "b"}, **GOOD}),
    ("entry", "a number"): tensors({"a": 1}),
    ("entry", "empty"): tensors({"a": {}}),
    ("entry", "a key too much"): tensors({"a": {**entry(), "more": 1}, "b": GOOD["b"]}),
    ("gap", "between tensors"): tensors({"a": entry(), "b": entry(shape=(1,), offsets=(28, 32))}),
    ("overlap", "of tensors"): tensors({"a": entry(), "b": entry(shape=(4,), offsets=(16, 32))}),
}
for size in (0, 1, 7, len(json.dumps(GOOD)) - 1, len(json.dumps(GOOD)) + 1, 10**8 + 1, 2**32, 2**63, 2**64 - 1):
    HEADERS["length of the header", str(size)] = tensors(size=size)
for value in ("f32", "F31", "", None, 1, "I4", "F64", "U8", "BF16", "BOOL", "F8_E4M3", "C64", "PICKLE", LONG):
    HEADERS["dtype", str(value)[:20]] = tensors({"a": entry(dtype=value), "b": GOOD["b"]})
SHAPES = [
    (3, 2),
    (6,),
    (1, 6),
    (7,),
    (-2, -3),
    (2.0, 3),
    ("2", 3),
    None,
    "23",
    6,
    (),
    (0,),
    (2**63, 2),
    (2**32, 2**32),
    (10**30,),
    [[2, 3]],
]
for value in SHAPES:
    HEADERS["shape", str(value)] = tensors({"a": entry(shape=value), "b": GOOD["b"]})
for value in (
    (0, 23),
    (0, 25),
    (24, 0),
    (-24, 0),
    (0,),
    (),
    None,
    "0-24",
    (0, 24, 32),
    (0.0, 24),
    (2**63, 2**63 + 24),
    (0, 2**64),
):
    HEADERS["data_offsets", str(value)] = tensors({"a": entry(offsets=value), "b": GOOD["b"]})
for name in ("", "../../a", "a\0b", "a\nb", LONG, "🦆", "__metadata__2"):
    HEADERS["name of a tensor", ascii(name)[:20]] = tensors({name: entry(), "b": GOOD["b"]})
for share in (0.02, 0.2, 0.5, 0.9):
    HEADERS["file", f"cut at {share}"] = tensors()[: int(len(tensors()) * share)]
CONFIGURED = {CONFIG: b'{"architectures": ["X"]}'}
for (field, damage), content in HEADERS.items():
    put(SAFETENSORS, "safetensors", field, damage, {**CONFIGURED, FILE: content})

# ---- the index and config.json ---------------------------------------------------------------------------------------

PARTS = {
    "model-1.safetensors": tensors({"a": entry()}, BODY[:24]),
    "model-2.safetensors": tensors({"b": entry(shape=(2,), offsets=(0, 8))}, BODY[:8]),
}
MAP = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello",
    "null": b"null",
    "a list": b"[]",
    "a number": b"7",
    "an object of nothing": b"{}",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "with a BOM": b"\xef\xbb\xbf{}",
    "deep": DEEP.encode(),
    "deep objects": b'{"a":' * 100_000,
    "digits": f'{{"a": {DIGITS}}}'.encode(),
    "a key twice": b'{"weight_map": {}, "weight_map": {}}',
    "cut": b'{"weight_map": {"a": "mod',
    "NUL": b'{"a": "\0"}',
    "lone surrogate": b'{"a": "\\ud800"}',
    "comments": b"// x\n{}",
    "single quotes": b"{'a': 1}",
    "a comma too much": b'{"a": 1,}',
    "infinite": b'{"a": Infinity}',
}
for damage, content in TEXTS.items():
    put(INDEXES, "index", "index", damage, {**CONFIGURED, **PARTS, INDEX: content})
    put(INDEXES, "index", "config.json", damage, {CONFIG: content, FILE: tensors()})
WRONG: dict[tuple[str, str], Any] = {("weight_map", "as it should be"): MAP}
for value in (None, [], "x", 1, {}, [MAP]):
    WRONG["weight_map", str(value)[:20]] = value
for value in (
    *(
        "nowhere.safetensors",
        "../model-1.safetensors",
        "/etc/passwd",
        "model-1.bin",
        "",
        None,
        1,
        [],
        {},
        LONG + ".safetensors",
    ),
    *(
        "a\0.safetensors",
        "C:\\x.safetensors",
        "sub/model-1.safetensors",
        ".safetensors",
        "config.json",
        "model-2.safetensors",
    ),
    *("MODEL-1.safetensors", "model-1.safetensors ", "con.safetensors", "🦆.safetensors"),
):
    WRONG["file of a tensor", ascii(value)[:24]] = {**MAP, "a": value}
for name in ("z", "", "a\0", LONG, "../a"):
    WRONG["name of a tensor", ascii(name)[:20]] = {**MAP, name: "model-1.safetensors"}
WRONG["weight_map", "a tensor is left out"] = {"a": MAP["a"]}
WRONG["weight_map", "files are changed over"] = {"a": MAP["b"], "b": MAP["a"]}
for (field, damage), value in WRONG.items():
    index = json.dumps({"metadata": {"total_size": 32}, "weight_map": value}).encode()
    put(INDEXES, "index", field, damage, {**CONFIGURED, **PARTS, INDEX: index})
put(INDEXES, "index", "files", "two indexes", {**CONFIGURED, **PARTS, INDEX: b"{}", "x" + INDEX: b"{}"})
put(INDEXES, "index", "files", "two and no index", {**CONFIGURED, **PARTS})
put(INDEXES, "index", "files", "no tensors", dict(CONFIGURED))
put(INDEXES, "index", "files", "pickled weights", {**CONFIGURED, "pytorch_model.bin": b"\x80\x04K\x01."})
put(
    INDEXES,
    "index",
    "files",
    "a part is cut",
    {**CONFIGURED, **PARTS, INDEX: json.dumps({"weight_map": MAP}).encode(), "model-1.safetensors": b"x"},
)

# ---- rows of tokens --------------------------------------------------------------------------------------------------

for damage, content in TEXTS.items():
    put(TOKENS, "tokens", "line", damage, {"d.jsonl": content + b"\n"})
    put(TOKENS, "tokens", "second line", damage, {"d.jsonl": b'{"text": "x"}\n' + content + b"\n"})
for value in ([], [1], [-1], [1.5], ["1"], None, "text", {}, [[1, 2]], [2**31], [10**30], [True], [None]):
    put(TOKENS, "tokens", "input_ids", str(value), {"d.jsonl": json.dumps({"input_ids": value}).encode()})
for value in ("", "x", None, 1, [], {}, "\ud800", LONG):
    put(TOKENS, "tokens", "text", ascii(value)[:20], {"d.jsonl": json.dumps({"text": value}).encode()})
for damage, content in {
    "not UTF-8": b"\xff\xfe",
    "empty": b"",
    "spaces": b"  \n",
    "NUL": b"a\0b",
    "Latin-1": b"caf\xe9",
    "plain": b"a text",
}.items():
    put(TOKENS, "tokens", "text file", damage, {"d.txt": content})
