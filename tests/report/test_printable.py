"""Names of strangers on a terminal: nothing in them moves the cursor, colours, reorders or begins a line of its own."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
from rich.console import Console
from tests.onnx_flow import models

from quark.cli import main, output
from quark.errors import ModelError, printable
from quark.report.tables import print_lines, print_table
from quark.report.values import Table

SIGNS = [*map(chr, range(32)), *map(chr, range(127, 160)), "\u202e", "\u2066", "\u2028", "\udc80", "\U000e0001"]
NAME = f"mm{''.join(SIGNS)}\nerror: [/b][red]no:fire:"


def test_what_can_be_printed_stays() -> None:
    for text in ("", "plain", "größe ×µ 日本語 🙂", "two\nlines", "C:\\n"):
        assert printable(text) == text
    assert printable("a\x1b[2J\r\u202eb") == "a\\x1b[2J\\r\\u202eb"


def test_tables_and_lines_hold_no_sign_that_does_anything(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = io.StringIO()
    table = Table(NAME, (NAME, "2"), ((NAME, "1.0"), ("b", NAME)), NAME)
    print_table(table, Console(file=drawn, width=1000))
    output.say(NAME)
    output.write_lines([NAME, "the last"])
    print_lines([NAME])
    said = capsys.readouterr()
    for text in (drawn.getvalue(), said.out, said.err, str(ModelError(NAME))):
        assert "error: [/b][red]no:fire:" in text, "taken for markup or a picture"
        assert [sign for sign in text if sign != "\n" and not sign.isprintable()] == []
    rows = [line for line in drawn.getvalue().splitlines() if line.startswith("error: ")]
    assert len(rows) <= 1, "the note alone has lines"


def test_commands_print_the_names_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "".join(sign for sign in NAME if sign != "\0" and not "\ud800" <= sign < "\ue000")
    model = models.model("g (float[1, 8] x) => (float[1, 4] y) { y = MatMul (x, w) }", {"w": models.normal(8, 4)}, 17)
    model.graph.node[0].name, model.producer_name = name, name
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=models.normal(2, 8))
    samples = ["--data", str(tmp_path / "d.npz")]
    for words, expected in (
        (["inspect"], 0),
        (["sensitivity", *samples], 0),
        (["quantize", "-o", str(tmp_path / "q.onnx"), *samples, "--exclude", f"{name}?"], 1),
    ):
        assert main(["onnx", words[0], str(tmp_path / "m.onnx"), *words[1:]]) == expected
        said = capsys.readouterr()
        assert [sign for sign in said.out + said.err if sign != "\n" and not sign.isprintable()] == [], words
