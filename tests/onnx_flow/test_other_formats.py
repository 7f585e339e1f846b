"""Files of other formats, written by the programs whose they are, are called by their names."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models

from quark.errors import ModelError
from quark.onnx.graph.model import load

torch = pytest.importorskip("torch")


def in_runtime_format(path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    proto = models.conv_chain(1).SerializeToString()
    onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


def safetensors(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.ones((2, 2), np.float32)}, path)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.onnx", b"x")


WRITTEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "m.ort": (in_runtime_format, "ONNX Runtime's own format"),
    "m.json": (lambda path: onnx.save(models.conv_chain(1), path), "ONNX as JSON"),
    "m.onnxtxt": (lambda path: onnx.save(models.conv_chain(1), path), "ONNX as text"),
    "m.textproto": (lambda path: onnx.save(models.conv_chain(1), path), "ONNX as text"),
    "m.pt": (lambda path: torch.save({"w": torch.ones(2)}, path), "a PyTorch file; export the model"),
    "old.pth": (
        lambda path: torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False),
        "a PyTorch file",
    ),
    "m.safetensors": (safetensors, "a safetensors file"),
    "m.npy": (lambda path: np.save(path, np.ones(3)), "a NumPy array"),
    "m.npz": (lambda path: np.savez(path, x=np.ones(3)), "a NumPy archive"),
    "m.zip": (zipped, "a ZIP archive"),
    "m.onnx.gz": (lambda path: path.write_bytes(gzip.compress(b"x" * 99)), "compressed by gzip"),
    "m.tflite": (lambda path: path.write_bytes(b"\x1c\0\0\0TFL3" + bytes(64)), "a TensorFlow Lite model"),
    "m.h5": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64)), "an HDF5 file"),
    "m.gguf": (lambda path: path.write_bytes(b"GGUF\3\0\0\0" + bytes(64)), "a GGUF model"),
    "page.onnx": (lambda path: path.write_text("<!DOCTYPE html><html>"), "a page of a web site"),
    "pointer.onnx": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "Git LFS"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_of_another_format_is_called_by_its_name(name: str, tmp_path: Path) -> None:
    write, expected = WRITTEN[name]
    path = tmp_path / name
    write(path)
    with pytest.raises(ModelError) as caught:
        load(path)
    assert expected in str(caught.value) and str(path) in str(caught.value)


def test_a_damaged_model_is_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(models.conv_chain(1).SerializeToString()[:-7])
    with pytest.raises(ModelError, match="damaged"):
        load(path)
