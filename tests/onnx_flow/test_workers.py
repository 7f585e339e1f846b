"""CalibWorkerNum: threads and real processes give the file that one worker gives, every time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import joblib
import numpy as np
import onnx_ir as ir
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError, DataError
from quark.files.journal import Journal
from quark.numerics.affine import Grid
from quark.numerics.formats import get_format
from quark.onnx import ModelQuantizer, PathDataReader, QConfig, QLayerConfig, workers
from quark.onnx.algorithms.context import JobContext
from quark.onnx.calibration import Request
from quark.onnx.quantization.config.spec import CalibMethod, Int8Spec
from quark.onnx.scratch import Scratch
from quark.onnx.workers import observe_with_workers


def samples(count: int = 7) -> list[dict[str, np.ndarray]]:
    return [models.feeds(models.cnn(), index) for index in range(count)]


def refilled() -> Iterator[dict[str, np.ndarray]]:
    """A reader that fills one array again and again."""
    array = np.empty_like(samples(1)[0]["x"])
    for sample in samples():
        array[...] = sample["x"]
        yield {"x": array}


def quantized(folder: Path, method: str, workers: int, data: object = None, **options: object) -> bytes:
    spec = Int8Spec(calibration_method=CalibMethod[method])
    extra = {"PrintSummary": False, "CalibWorkerNum": workers, **options}
    config = QConfig(QLayerConfig(input_tensors=spec, weight=Int8Spec()), extra_options=extra)
    ModelQuantizer(config).quantize_model(models.cnn(), folder / "q.onnx", samples() if data is None else data)
    return (folder / "q.onnx").read_bytes()


@pytest.mark.parametrize(
    ("method", "options"),
    [("MinMax", {}), ("Percentile", {}), ("MinMSE", {"NumBins": 0}), ("MinMax", {"CalibMovingAverage": True})],
)
def test_threads_give_the_file_of_one_worker(tmp_path: Path, method: str, options: dict) -> None:
    one = quantized(tmp_path, method, 1, **options)
    assert quantized(tmp_path, method, 3, **options) == one
    assert quantized(tmp_path, method, 2, refilled(), **options) == one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The samples, a file each."""
    made = tmp_path / "samples"
    made.mkdir()
    for index, sample in enumerate(samples(23)):
        np.savez(made / f"{index:02}.npz", **sample)
    return made


@pytest.mark.parametrize("method", ["MinMax", "Percentile"])
def test_processes_give_the_file_of_one_worker(
    tmp_path: Path, folder: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, of_files = (quantized(tmp_path, method, 1, data) for data in (None, PathDataReader(models.cnn(), folder)))
    with joblib.parallel_config("loky"):
        assert quantized(tmp_path, method, 2, TmpDir=str(tmp_path / "scratch")) == one
        monkeypatch.chdir(tmp_path)  # where the processes are not; from here on they read the files themselves
        reader = PathDataReader(models.cnn(), folder.name)
        here, get_next = [], reader.get_next
        monkeypatch.setattr(reader, "get_next", lambda: here.append(1) or get_next())
        assert quantized(tmp_path, method, 2, reader, TmpDir=str(tmp_path / "scratch")) == of_files
    assert len(here) <= 3  # the first one, to look at it and to run it
    assert not list((tmp_path / "scratch").iterdir())


def test_a_worker_hands_over_several_samples_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path
) -> None:
    """Sample by sample only where the order counts, or every sample is remembered."""
    sizes: list[int] = []
    work = workers._work
    monkeypatch.setattr(workers, "_work", lambda *given: sizes.append(len(given[1].samples)) or work(*given))

    def found(method: str, data: object = None, **options: object) -> list[int]:
        sizes.clear()
        quantized(tmp_path, method, 2, data, **options)
        return sorted(sizes)

    reader = PathDataReader(models.cnn(), folder)
    assert found("MinMax") == [3, workers.CHUNK]
    assert found("MinMax", CalibMovingAverage=True) == [1] * 7
    assert found("MinMax", reader) == [2, *[3] * 7]  # four shards for each worker
    assert found("MinMax", reader, CalibDataSize=8) == [1] * 8
    assert found("MinMSE", reader, NumBins=0) == [3, *[workers.CHUNK] * 5]  # they keep their samples' values
    assert found("MinMax", reader, CalibMovingAverage=True) == [1] * 23


def test_files_that_do_not_fit_are_told_by_workers_as_by_one(tmp_path: Path, folder: Path) -> None:
    np.savez(folder / "11.npz", x=np.zeros((1, 3, 5, 5), np.float32))
    told = []
    for count in (1, 2):
        with pytest.raises(DataError) as error:
            quantized(tmp_path, "MinMax", count, PathDataReader(models.cnn(), folder))
        told.append(str(error.value))
    assert told[0] == told[1] and told[0].startswith("sample 11")


def test_processes_open_the_model_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(Scratch, "folder", lambda self, purpose: seen.append(purpose) or tmp_path)
    grid = Grid(get_format("int8"))
    model = ir.from_proto(models.cnn())
    job = QConfig(extra_options={"CalibWorkerNum": 2}).compile()
    with joblib.parallel_config("loky"), Scratch(job.options) as scratch:
        context = JobContext(job, None, scratch, Journal(), lambda *_: None)
        found = observe_with_workers(model, {"x": Request(grid)}, samples(), context, None)
    assert len(seen) == 1 and (tmp_path / "model.onnx").is_file()
    assert found["x"].hi == max(float(sample["x"].max()) for sample in samples())


def test_an_error_names_the_sample_in_every_kind_of_worker(tmp_path: Path) -> None:
    graph = "g (float[1, 4] x) => (float[1, 4] y) { l = Log (x)\n y = Add (l, w) }"
    proto = models.model(graph, {"w": models.normal(4)})
    bad = [{"x": np.full((1, 4), -1.0 if index == 5 else 1.0, np.float32)} for index in range(7)]
    config = QConfig(extra_options={"PrintSummary": False, "CalibWorkerNum": 2, "TmpDir": str(tmp_path)})
    for backend in ("threading", "loky"):
        with joblib.parallel_config(backend), pytest.raises(DataError, match="not finite on calibration sample 5"):
            ModelQuantizer(config).quantize_model(proto, None, bad)
    assert not list(tmp_path.iterdir())


def test_workers_resume(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    class Stopping:
        def __len__(self) -> int:
            return len(samples())

        def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
            yield from samples(5)
            raise Stopped

    one = quantized(tmp_path, "Percentile", 1)
    resume = {"SaveAndRestore": str(tmp_path / "r.json")}
    with pytest.raises(Stopped):
        quantized(tmp_path, "Percentile", 2, Stopping(), **resume)
    assert quantized(tmp_path, "Percentile", 3, **resume) == one

    resume = {"SaveAndRestore": str(tmp_path / "other.json")}
    with pytest.raises(Stopped):
        quantized(tmp_path, "Percentile", 1, Stopping(), **resume)
    with pytest.raises(DataError, match="told how many samples there are and now it does not"):
        quantized(tmp_path, "Percentile", 2, iter(samples()), **resume)


def test_crypto_mode_keeps_the_model_out_of_other_processes() -> None:
    config = QConfig(extra_options={"PrintSummary": False, "CalibWorkerNum": 2, "CryptoMode": True})
    with joblib.parallel_config("loky"), pytest.raises(ConfigError, match="CryptoMode: calibration by processes"):
        ModelQuantizer(config).quantize_model(models.cnn(), None, samples())
