"""A user's function from its file: loaded afresh, and nothing is left beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quark.errors import ConfigError
from quark.search.function import load_function


def test_a_function_is_loaded_and_leaves_no_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "task.py"
    file.write_text("def one(path):\n    return 1.0\n")
    assert load_function(f"{file}:one")("m.onnx") == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["task.py"]
    for text, words in ((f"{file}:two", "no function 'two'"), (str(file), "task.py:accuracy")):
        with pytest.raises(ConfigError, match=words):
            load_function(text)
    (tmp_path / "task.txt").write_text("x")
    with pytest.raises(ConfigError, match="no Python file"):
        load_function(f"{tmp_path / 'task.txt'}:x")
