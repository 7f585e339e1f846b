"""What the C library does with freed memory is what the caller has told it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import onnx
import pytest
from tests.onnx_flow import models

from quark.cli import main
from quark.onnx import ModelQuantizer, QConfig


class Library:
    """A C library that notes what is set."""

    def __init__(self) -> None:
        self.settings: list[tuple[int, int]] = []

    def mallopt(self, parameter: int, value: int) -> int:
        self.settings.append((parameter, value))
        return 1

    def malloc_trim(self, pad: int) -> int:
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made, opened = Library(), ctypes.CDLL

    def open_library(name: Any, *args: Any, **more: Any) -> Any:
        return made if name is None else opened(name, *args, **more)

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    return made


def words(folder: Path) -> list[str]:
    onnx.save(models.cnn(), folder / "m.onnx")
    return ["onnx", "quantize", str(folder / "m.onnx"), "-o", str(folder / "q.onnx"), "--random", "--no-check"]


def test_its_settings_are_left_to_it(library: Library, tmp_path: Path) -> None:
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options.update(PrintSummary=False, UseRandomData=True)
    ModelQuantizer(config).quantize_model(models.cnn(), tmp_path / "q.onnx")
    assert main(words(tmp_path)) == 0
    assert (tmp_path / "q.onnx").exists() and not library.settings
