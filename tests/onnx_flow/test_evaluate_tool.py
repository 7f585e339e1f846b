"""``python -m quark.onnx.tools.evaluate``: both spellings, both ways to give the folders, and every mistake."""

from __future__ import annotations

import builtins
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quark.errors import DataError
from quark.onnx.tools.evaluate import compare_folders, mean
from quark.onnx.tools.evaluate.__main__ import main

A = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
B = np.array([[3.0, 4.0], [0.0, 2.0]], np.float32)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders with one array each, in a folder below."""
    for name, array in (("float", A), ("quantized", B)):
        (tmp_path / name / "sub").mkdir(parents=True)
        np.save(tmp_path / name / "sub" / "0.npy", array)
    return tmp_path / "float", tmp_path / "quantized"


def test_measures_are_the_documented_formulas(folders: tuple[Path, Path]) -> None:
    (result,) = compare_folders(*folders)
    assert result.name == "sub/0.npy"
    assert result.cosine == pytest.approx(25 / (5 * math.sqrt(29)))
    assert result.l2 == pytest.approx(2.0)
    assert result.psnr == pytest.approx(20 * math.log10(4 / 1))  # peak of A, mean squared error


def test_equal_results_have_an_infinite_psnr(folders: tuple[Path, Path]) -> None:
    (result,) = compare_folders(folders[0], folders[0])
    assert (result.l2, result.psnr) == (0.0, math.inf)
    assert result.cosine == pytest.approx(1.0)


def test_mean_is_over_files(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        np.save(folder / "same.npy", A)
    results = compare_folders(*folders)
    assert [result.name for result in results] == ["same.npy", "sub/0.npy"]
    assert mean(results).l2 == pytest.approx(1.0)
    assert mean(results).psnr == math.inf


@pytest.mark.parametrize("suffix", [".png", ".PNG", ".jpg"])
def test_images(tmp_path: Path, suffix: str) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, level in (("a", 100), ("b", 116)):
        (tmp_path / name).mkdir()
        image.fromarray(np.full((16, 16, 3), level, np.uint8)).save(tmp_path / name / f"0{suffix}")
    (result,) = compare_folders(tmp_path / "a", tmp_path / "b")
    assert result.psnr == pytest.approx(20 * math.log10(255 / 16), abs=0.6 if suffix == ".jpg" else 1e-9)


@pytest.mark.parametrize("spelling", ["quark.onnx.tools.evaluate", "quark.onnx.tools.evaluate.py"])
def test_both_spellings_run(folders: tuple[Path, Path], spelling: str) -> None:
    flags = ["--baseline_results_folder", str(folders[0]), "--quantized_results_folder", str(folders[1])]
    run = subprocess.run([sys.executable, "-W", "error", "-m", spelling, *flags], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert "sub/0.npy" in run.stdout and "12.04" in run.stdout and "0.928477" in run.stdout


def test_folders_by_position_and_json(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folders[0]), str(folders[0]), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["files"][0]["name"] == "sub/0.npy"
    assert printed["mean"]["psnr"] == "inf"


@pytest.mark.parametrize("arguments", [[], ["a"], ["a", "b", "c"], ["a", "--baseline_results_folder", "b"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "two folders" in capsys.readouterr().err


def test_missing_folder(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folders[0]), str(folders[0] / "nowhere")]) == 1
    error = capsys.readouterr().err
    assert "nowhere does not exist" in error and "Traceback" not in error


def test_file_without_counterpart(folders: tuple[Path, Path]) -> None:
    np.save(folders[1] / "extra.npy", A)
    with pytest.raises(DataError, match=r"extra\.npy is in .*quantized but not in .*float"):
        compare_folders(*folders)


def test_shapes_differ(folders: tuple[Path, Path]) -> None:
    np.save(folders[1] / "sub" / "0.npy", A[:1])
    with pytest.raises(DataError, match=r"sub/0\.npy.*\(2, 2\).*\(1, 2\)"):
        compare_folders(*folders)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("0.npy", b"", ".npy data"),
        ("0.npy", b"garbage", ".npy data"),
        ("0.png", b"x", "not a readable image"),
    ],
)
def test_unreadable_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}' (is|cannot be read as) {message}"):
        compare_folders(tmp_path, tmp_path)


def test_text_and_objects_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.array(["a"]))
    with pytest.raises(DataError, match=r"0\.npy' .* text or objects .type <U1"):
        compare_folders(tmp_path, tmp_path)


def test_file_without_values(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.zeros((0, 3)))
    with pytest.raises(DataError, match=r"0\.npy holds no values"):
        compare_folders(tmp_path, tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match="holds no NPY, PNG or JPG"):
        compare_folders(tmp_path, tmp_path)


def test_images_without_pillow_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0.png").write_bytes(b"x")
    real = builtins.__import__

    def without_pillow(name: str, *rest: object) -> object:
        if name == "PIL":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(DataError, match="pip install pillow"):
        compare_folders(tmp_path, tmp_path)
