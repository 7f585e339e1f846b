"""SaveAndRestore: real kills at several moments, the same file afterwards, and refusals with their reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError, DataError
from quark.onnx import ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.counted import CountedSamples
from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec

SAMPLES = 6
METHODS = (CalibMethod.MinMax, CalibMethod.Percentile, CalibMethod.MinMSE)

#: Quantizes; kills itself with SIGKILL when sample ``stop`` is asked for, or right after it was counted and saved.
JOB = """
import os, signal, sys
from tests.onnx_flow.test_resume import quantize, samples
from quark.onnx.counted import CountedSamples
folder, method, when, stop = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
def die(): os.kill(os.getpid(), signal.SIGKILL)
def reader():
    for index, sample in enumerate(samples()):
        if when == "read" and index == stop: die()
        yield sample
count = CountedSamples.count
def counted(self, samples=1):
    if when == "before" and self.samples == stop: die()
    count(self, samples)
    if when == "after" and self.samples > stop: die()
CountedSamples.count = counted
quantize(folder, method, reader())
"""


def samples(seed: int = 0) -> list[dict[str, np.ndarray]]:
    return [models.feeds(models.cnn(), seed + index) for index in range(SAMPLES)]


def config(method: str, resume: Path | None, **options: object) -> QConfig:
    spec = Int8Spec(calibration_method=CalibMethod[method])
    extra = {"PrintSummary": False, "SaveAndRestore": None if resume is None else str(resume), **options}
    return QConfig(QLayerConfig(input_tensors=spec, weight=Int8Spec()), extra_options=extra)


def quantize(folder: str | Path, method: str, data: object, name: str = "q.onnx", **options: object) -> bytes:
    folder = Path(folder)
    job = config(method, folder / "resume.json", **options)
    ModelQuantizer(job).quantize_model(models.cnn(), folder / name, data)
    return (folder / name).read_bytes()


def killed_job(folder: Path, method: str, when: str, stop: int) -> int:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    command = [sys.executable, "-c", JOB, str(folder), method, when, str(stop)]
    return subprocess.run(command, env=environment, timeout=120, check=False).returncode


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize(
    ("method", "when", "stop"),
    [("MinMax", "read", 3), ("Percentile", "read", 0), ("MinMSE", "before", 2), ("Percentile", "after", 4)],
)
def test_a_killed_job_goes_on_and_writes_the_same_file(
    tmp_path: Path, method: str, when: str, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ModelQuantizer(config(method, None)).quantize_model(models.cnn(), tmp_path / "whole.onnx", samples())
    assert killed_job(tmp_path, method, when, stop) == -signal.SIGKILL and not (tmp_path / "q.onnx").exists()
    state = json.loads((tmp_path / "resume.json").read_text()) if (tmp_path / "resume.json").exists() else {}
    seen, count = [], CountedSamples.count

    def counted(self: CountedSamples, samples: int = 1) -> None:
        seen.append(self.samples)
        count(self, samples)

    monkeypatch.setattr(CountedSamples, "count", counted)
    quantize(tmp_path, method, iter(samples()))
    first = {"read": stop, "before": stop, "after": stop + 1}[when]  # quick statistics are counted before the next runs
    assert seen == list(range(first, SAMPLES))
    assert bool(state) == (first > 0)
    assert (tmp_path / "q.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()
    assert not list(tmp_path.rglob(".*.part"))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_finished_calibration_is_not_computed_again(
    tmp_path: Path, method: CalibMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quark.onnx import calibration

    first = quantize(tmp_path, method.name, samples())
    monkeypatch.setattr(calibration, "Runner", None)
    assert quantize(tmp_path, method.name, samples(), "again.onnx") == first


def test_other_data_are_refused(tmp_path: Path) -> None:
    quantize(tmp_path, "MinMax", samples())
    with pytest.raises(DataError, match="the first 6 samples are not those that were counted before"):
        quantize(tmp_path, "MinMax", samples(seed=1))
    with pytest.raises(DataError, match="now there are more"):
        quantize(tmp_path, "MinMax", [*samples(), samples()[0]])
    with pytest.raises(DataError, match="now there are only 2"):
        quantize(tmp_path, "MinMax", samples()[:2])


def test_another_model_and_another_configuration_are_refused_with_the_difference(tmp_path: Path) -> None:
    quantize(tmp_path, "Percentile", samples(), Percentile=99.0)
    with pytest.raises(ConfigError, match=r"belongs to another configuration: Percentile \(was 99.0, is 99.5\)"):
        quantize(tmp_path, "Percentile", samples(), Percentile=99.5)
    with pytest.raises(
        ConfigError, match=r'another configuration: rules.default.inputs.method \(was "percentile", is "minmax"\)'
    ):
        quantize(tmp_path, "MinMax", samples(), Percentile=99.0)
    other = models.cnn()
    other.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(models.normal(8, 3, 3, 3, seed=9), "w1"))
    job = config("Percentile", tmp_path / "resume.json", Percentile=99.0)
    with pytest.raises(ConfigError, match="belongs to another model"):
        ModelQuantizer(job).quantize_model(other, None, samples())


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"version": 1}', "not json"])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    (tmp_path / "resume.json").write_text(content)
    with pytest.raises(ConfigError, match="is not a journal of a job"):
        quantize(tmp_path, "MinMax", samples())
    assert (tmp_path / "resume.json").read_text() == content


def test_damaged_and_missing_tensors_are_refused(tmp_path: Path) -> None:
    quantize(tmp_path, "MinMax", samples())
    (tensors,) = (tmp_path / "resume.tensors").iterdir()
    tensors.write_bytes(bytes(tensors.stat().st_size))
    with pytest.raises(ConfigError, match="is damaged"):
        quantize(tmp_path, "MinMax", samples())
    tensors.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        quantize(tmp_path, "MinMax", samples())


def test_the_path_must_be_a_json_file_in_a_folder(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "state.txt", "must be the path of a"),
        (tmp_path / "no" / "s.json", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=words):
            ModelQuantizer(config("MinMax", path)).quantize_model(models.cnn(), None, samples())
