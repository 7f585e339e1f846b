"""What a file is that is not an ONNX model: formats that people have beside it, and how each becomes ONNX."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from quark.dataclass import dataclass

HEAD = 512
"""Bytes at the beginning of a file that are looked at."""


@dataclass(frozen=True)
class OtherFormat:
    """A format by its first bytes, or by those and the end of its name.

    Attributes:
        name: what it is.
        advice: what to give instead, or how to make it.
        begins: whether these are its first bytes.
        suffixes: ends of names; empty: any.
    """

    name: str
    advice: str
    begins: Callable[[bytes], bool]
    suffixes: tuple[str, ...] = ()


_TEXT = "make it binary: onnx.save(onnx.load('FILE'), 'model.onnx')"
_TORCH = "export the model: torch.onnx.export(model, args, 'model.onnx', dynamo=True)"
#: The first that fits counts.
FORMATS = (
    OtherFormat(
        "a model in ONNX Runtime's own format",
        "give the .onnx file that it was made from",
        lambda head: head[4:8] == b"ORTM",
    ),
    OtherFormat("ONNX as JSON", _TEXT, lambda head: re.match(rb"\s*\{\s*\"(irVersion|ir_version)\"", head) is not None),
    OtherFormat("ONNX as text", _TEXT, lambda head: re.match(rb"\s*ir_version:", head) is not None),
    OtherFormat("ONNX as text", _TEXT, lambda head: re.match(rb"\s*<\s*ir_version\s*:", head) is not None),
    OtherFormat(
        "a TensorFlow Lite model",
        "convert it: python -m tf2onnx.convert --tflite FILE --output model.onnx",
        lambda head: head[4:8] == b"TFL3",
    ),
    OtherFormat(
        "a GGUF model",
        "give the folder that it was made from to quark torch",
        lambda head: head.startswith(b"GGUF"),
    ),
    OtherFormat(
        "an HDF5 file, as Keras writes models",
        "convert it: python -m tf2onnx.convert --keras FILE --output model.onnx",
        lambda head: head.startswith(b"\x89HDF\r\n\x1a\n"),
    ),
    OtherFormat(
        "a Keras model",
        "export it: model.export('model.onnx', format='onnx')",
        lambda head: head.startswith(b"PK\x03\x04"),
        (".keras",),
    ),
    OtherFormat("a NumPy archive", "samples go to --data", lambda head: head.startswith(b"PK\x03\x04"), (".npz",)),
    OtherFormat("a NumPy array", "samples go to --data", lambda head: head.startswith(b"\x93NUMPY")),
    OtherFormat("a PyTorch file", _TORCH, lambda head: head.startswith(b"PK\x03\x04"), (".pt", ".pth", ".pt2", ".bin")),
    OtherFormat("a PyTorch file", _TORCH, lambda head: head.startswith((b"\x80\x02", b"\x80\x04")), (".pt", ".pth")),
    OtherFormat("a ZIP archive", "unpack it", lambda head: head.startswith(b"PK\x03\x04")),
    OtherFormat("compressed by gzip", "unpack it", lambda head: head.startswith(b"\x1f\x8b")),
    OtherFormat(
        "a safetensors file, which holds weights alone",
        "give its folder to quark torch, or export the model to ONNX",
        lambda head: re.match(rb".{5}\x00{3}\{\"", head, re.DOTALL) is not None,
    ),
    OtherFormat(
        "a page of a web site or a pointer of Git LFS",
        "fetch the file itself (git lfs pull)",
        lambda head: re.match(rb"\s*(<!doctype|<html|version https://git-lfs)", head, re.IGNORECASE) is not None,
    ),
    OtherFormat(
        "an OpenVINO model", "give the .onnx file that it was made from", lambda head: b"<net name=" in head, (".xml",)
    ),
)


def other_format(path: Path) -> str | None:
    """What a file is and what to do, as the end of a sentence; None where nothing is known."""
    with path.open("rb") as file:
        head = file.read(HEAD)
    ends = path.suffix.lower()
    found = next((one for one in FORMATS if one.begins(head) and (not one.suffixes or ends in one.suffixes)), None)
    return None if found is None else f"is {found.name}; {found.advice.replace('FILE', path.name)}"
