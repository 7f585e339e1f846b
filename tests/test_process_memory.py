"""What the C library does with freed memory is the caller's, except where the process is a command's."""

from __future__ import annotations

import ctypes
import sys
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


def test_functions_leave_it_as_it_was(library: Library, tmp_path: Path) -> None:
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options.update(PrintSummary=False, UseRandomData=True)
    ModelQuantizer(config).quantize_model(models.cnn(), tmp_path / "q.onnx")
    assert main(words(tmp_path)) == 0
    assert (tmp_path / "q.onnx").exists() and not library.settings


def test_the_process_of_a_command_keeps_more(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["quark", *words(tmp_path)])
    assert main() == 0
    assert {parameter for parameter, _ in library.settings} == {-1, -3}
