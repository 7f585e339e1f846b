"""Files of the user's on the command line, and two data types in the place of a preset."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import joblib
import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

import quark
from quark import parallel
from quark.cli import extensions, main
from quark.config.presets import get_preset
from quark.errors import ConfigError
from quark.onnx.quantization.config.candidates import candidate

FILE = """
print("words of the file")
import numpy as np
import quark
from quark.numerics.formats import Float

def narrow(statistic, grid, part=0.5):
    return part * statistic.lo, part * statistic.hi

quark.register_format(Float("fp8_e3m4", 3, 4, max=15.5, has_infinity=True, has_nan=True))
quark.register_calibration("narrow", narrow, "extremes")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model, samples, and a file of the user's; what it registers is forgotten again."""
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "ends.py").write_text("raise SystemExit\n")
    (tmp_path / "fails.py").write_text("\nraise IndexError('seven')\n")
    onnx.save(models.cnn(), tmp_path / "float.onnx")
    np.savez(tmp_path / "x.npz", **models.feeds(models.cnn(), 0))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    if extensions._RUN:
        quark.unregister_calibration("narrow")
        quark.unregister_format("fp8_e3m4")
    extensions._RUN.clear()


def specs() -> dict[str, set[str]]:
    found = json.loads(Path("plan.json").read_text())["tensors"]
    rows = found.values() if isinstance(found, dict) else found
    return {role: {json.dumps(one["spec"]) for one in rows if one["role"] == role} for role in ("activation", "weight")}


def test_names_of_a_file_are_names_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["onnx", "quantize", "float.onnx", "-o", "q.onnx", "--data", "x.npz", "--plan", "plan.json"]
    assert main(["--extension", "mine.py", *words, "--preset", "fp8_e3m4:narrow/int8@channel"]) == 0
    found = specs()
    assert all("fp8_e3m4" in one and "narrow" in one for one in found["activation"])
    assert all("int8" in one and "channel" in one.lower() for one in found["weight"])
    told = capsys.readouterr()
    assert "--extension mine.py" in told.out
    assert "words of the file" in told.err and "words of the file" not in told.out


LOUD = """
import os
os.write(1, b"at the start ")  # as a library of C does, or a process that is started

def largest(path):
    print("in the function")
    os.write(1, b"in the function")
    return 1.0
"""


def test_json_stands_alone_whatever_files_of_the_user_print(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("loud.py").write_text(LOUD)
    words = ["onnx", "sensitivity", "float.onnx", "--data", "x.npz", "--metric", "loud.py:largest", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["metric"] == "loud.py:largest"
    command = [sys.executable, "-m", "quark", "--extension", "loud.py", "presets", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "A8W8_CPU" in json.loads(done.stdout) and "at the start" in done.stderr


COUNTS = """
from quark.observers.histogram import Histogram
class Counts(Histogram):
    def METHOD:
        return {}["nothing"]
"""
NARROW = "the calibration method 'narrow'"


@pytest.mark.parametrize(
    ("raising", "method", "said"),
    [
        ("raise SystemExit", "", f"{NARROW} raised SystemExit in line 8 of mine.py"),
        ("np.zeros(4).reshape(3)", "", f"{NARROW} raised ValueError in line 8 of mine.py: cannot reshape"),
        ("", "update(self, x)", "the statistic 'Counts' raised KeyError in line 5 of mine.py: 'nothing'"),
        ("", "__init__(self)", f"{NARROW} raised KeyError in line 5 of mine.py"),
        ("", "merge(self, other)", "--extension 'mine.py' raised KeyError in line 5 of mine.py"),
    ],
)
def test_what_a_function_raises_is_a_sentence_with_its_line(
    folder: Path, capsys: pytest.CaptureFixture[str], raising: str, method: str, said: str
) -> None:
    text = COUNTS.replace("METHOD", method) + FILE.replace('"extremes"', "Counts") if method else FILE
    Path("mine.py").write_text(text.replace("    return part", f"    {raising or 'pass'}\n    return part"))
    words = ["--extension", "mine.py", "onnx", "quantize", "float.onnx", "-o", "q.onnx", "--data", "x.npz"]
    assert main([*words, "--preset", "int8:narrow/int8", "--set", "CalibWorkerNum=2"]) == 1
    assert f"error: {said}" in capsys.readouterr().err
    assert not Path("q.onnx").exists()


def test_names_are_known_in_processes(folder: Path) -> None:
    """Where the workers are processes of their own the file runs there, too."""
    with extensions.extended(["--extension", "mine.py"]) as rest, joblib.parallel_config("loky", n_jobs=2):
        (found,) = parallel.results([parallel.delayed(get_preset, "fp8_e3m4/int8")], None)
    assert found == get_preset("fp8_e3m4/int8") and not rest
    assert extensions.command_line(["quark"]) == "quark"  # of the next command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--extension"], "--extension takes a Python file, such as --extension mine.py"),
        (["--extension", "--json"], "--extension takes a Python file"),
        (["--extension", "none.py"], "--extension 'none.py': the file 'none.py' does not exist"),
        (["--extension", "x.npz"], "--extension: 'x.npz' is not a Python file"),
        (["--extension", "ends.py"], "--extension: 'ends.py' raised SystemExit in line 1 of ends.py"),
        (["--extension", "fails.py"], "--extension: 'fails.py' raised IndexError in line 2 of fails.py: seven"),
    ],
)
def test_what_a_file_does_wrongly_is_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["presets", *words]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["uint8/int8@channel", "int8:mse/int4@32", "uint16/mxfp4"])
def test_two_data_types_are_a_preset(name: str) -> None:
    preset, layer = get_preset(name), candidate(name)
    assert layer is not None
    assert (preset.activation, preset.weight) == (layer.inputs, layer.weight)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("uint9/int8", "the preset 'uint9/int8': unknown data type 'uint9'"),
        ("uint8/int8@rows", "the preset 'uint8/int8@rows': unknown scales 'rows'"),
        ("uint8:mean/int8", "the preset 'uint8:mean/int8': unknown calibration method 'mean'"),
        ("float/int4", "the preset 'float/int4': float activations are for single layers"),
    ],
)
def test_what_is_no_data_type_is_named(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match="^" + said):
        get_preset(name)
