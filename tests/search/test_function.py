"""A user's function from its file: loaded afresh, and nothing is left beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quark.errors import ConfigError
from quark.search.function import digest_of, digest_of_code, load_function


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
    with pytest.raises(ConfigError, match="is not a Python file"):
        load_function(f"{tmp_path / 'task.txt'}:x")


def test_functions_without_a_file_are_told_apart_by_name_and_code() -> None:
    class Metric:
        def __call__(self, path: str) -> float:
            return 1.0

    found = [digest_of_code(one) for one in (lambda path: 1.0, lambda path: 2.0, Metric(), len, None)]
    assert len(set(found)) == len(found) and found[-1] == digest_of(None)
    assert digest_of_code(Metric()) == found[2]
