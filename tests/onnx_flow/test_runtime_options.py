"""CryptoMode, DebugMode, IgnoreWarnings, PrintSummary, EvalMetrics, UserCustomOpLibPath: each by its effect."""

from __future__ import annotations

import builtins
import io
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError, ModelError
from quark.onnx import (
    AdaRoundConfig,
    CalibMethod,
    Config,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    get_default_config,
)
from quark.onnx.compare import ENDS, compare
from quark.onnx.forecast import forecast
from quark.onnx.graph.libraries import library_files

SECRET = "secret_layer"


def samples(count: int = 3) -> list[dict[str, np.ndarray]]:
    return [models.feeds(models.cnn(), index) for index in range(count)]


def config(method: str = "MinMSE", **options: Any) -> QConfig:
    layer = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod[method]), weight=Int8Spec())
    return QConfig(layer, extra_options={"PrintSummary": False, **options})


def secret_model() -> onnx.ModelProto:
    proto = models.cnn()
    for node in proto.graph.node:
        node.name = f"{SECRET}_{node.output[0]}"
    return proto


@pytest.mark.parametrize("encryption", [None, "AES-256"])
def test_crypto_mode_leaves_no_trace(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    encryption: str | None,
) -> None:
    """Everything that is written anywhere is searched for the model's weights and names."""
    written: list[bytes] = []
    real = io.open

    def watched(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        handle = real(file, mode, *rest, **more)
        if not isinstance(file, int) and any(letter in mode for letter in "wax+"):
            write = handle.write

            class Spy:
                def __getattr__(self, name: str) -> Any:
                    return getattr(handle, name)

                def __enter__(self) -> Any:
                    return self

                def __exit__(self, *error: Any) -> None:
                    handle.close()

                def write(self, content: Any) -> int:
                    written.append(content if isinstance(content, bytes) else str(content).encode())
                    return int(write(content))

            return Spy()
        return handle

    monkeypatch.setattr(io, "open", watched)
    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    caplog.set_level(logging.DEBUG)
    logging.getLogger("quark.onnx.flow").warning("heard before")
    options = {"CryptoMode": True, "CalibOptimizeDisk": False, "EncryptionAlgorithm": encryption, "PrintSummary": True}
    proto = secret_model()

    def reader() -> Iterator[dict[str, np.ndarray]]:
        logging.getLogger("quark.onnx.graph.shapes").warning("about %s", SECRET)
        yield from samples()

    quantized = ModelQuantizer(config(**options, TmpDir=str(tmp_path))).quantize_model(proto, None, reader())
    logging.getLogger("quark.onnx.flow").warning("heard after")
    assert quantized is not None and not quantized.metadata_props
    assert bool(written) == (encryption is not None)
    weights = [onnx.numpy_helper.to_array(tensor).tobytes()[:32] for tensor in proto.graph.initializer]
    sample = samples()[0]["x"].tobytes()[:32]
    for content in written:
        assert SECRET.encode() not in content and sample not in content
        assert not any(weight in content for weight in weights)
    assert not list(tmp_path.iterdir())
    texts = capfd.readouterr()
    assert texts.out == texts.err == ""
    libraries = ("quark", "onnx")
    assert [record.message for record in caplog.records if record.name.startswith(libraries)] == [
        "heard before",
        "heard after",
    ]
    models.session(quantized)


def test_libraries_speak_without_crypto_mode_and_in_other_threads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def reader() -> Iterator[dict[str, np.ndarray]]:
        other = threading.Thread(target=logging.getLogger("onnx_ir.serde").warning, args=("from another thread",))
        other.start()
        other.join()
        yield from samples()

    ModelQuantizer(config(CryptoMode=True)).quantize_model(secret_model(), None, reader())
    assert [record.message for record in caplog.records if "onnx" in record.name] == ["from another thread"]
    ModelQuantizer(config()).quantize_model(secret_model(), None, samples())
    assert any(SECRET in record.getMessage() for record in caplog.records if record.name.startswith("onnx_ir"))


def test_the_spy_sees_what_is_written_without_crypto_mode(tmp_path: Path) -> None:
    files: set[str] = set()

    def reader() -> Iterator[dict[str, np.ndarray]]:
        for sample in samples():
            yield sample
            files.update(path.name for path in tmp_path.rglob("*.values"))

    ModelQuantizer(config(CalibOptimizeDisk=False, TmpDir=str(tmp_path))).quantize_model(models.cnn(), None, reader())
    assert files


def test_crypto_mode_refuses_to_write_the_preprocessed_model(tmp_path: Path) -> None:
    recipe = {"preprocess_passes": {"fold_batch_norm": {}}, "preprocessed_model_path": str(tmp_path / "p.onnx")}
    ModelQuantizer(config(PreprocessYAML=recipe)).quantize_model(models.cnn(), None, samples())
    (tmp_path / "p.onnx").unlink()
    forecast(config(PreprocessYAML=recipe).compile(), models.cnn())  # a dry run writes nothing either
    with pytest.raises(ConfigError, match="leave out preprocessed_model_path"):
        ModelQuantizer(config(PreprocessYAML=recipe, CryptoMode=True)).quantize_model(models.cnn(), None, samples())
    assert not list(tmp_path.iterdir())


def test_crypto_mode_wants_a_model_in_memory(tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "m.onnx")
    with pytest.raises(ConfigError, match="give the model as an onnx"):
        ModelQuantizer(config(CryptoMode=True)).quantize_model(tmp_path / "m.onnx", None, samples())
    with pytest.raises(ConfigError, match="leave model_output out"):
        ModelQuantizer(config(CryptoMode=True)).quantize_model(models.cnn(), tmp_path / "q.onnx", samples())
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_debug_mode_tells_every_decision(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ModelQuantizer(config()).quantize_model(models.cnn(), None, samples())
    assert "because global_config" not in caplog.text
    plan = ModelQuantizer(config(DebugMode=True)).run(models.cnn(), None, samples()).plan
    for name in (*plan.tensors, *plan.nodes):
        assert plan.explain(name) in caplog.text


def test_warnings_of_libraries_are_hidden_and_the_filters_stay() -> None:
    def reader() -> Iterator[dict[str, np.ndarray]]:
        for sample in samples():
            warnings.warn("from a library", UserWarning, stacklevel=1)
            yield sample

    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ModelQuantizer(config(IgnoreWarnings=True)).quantize_model(models.cnn(), None, reader())
        assert not [one for one in heard if "library" in str(one.message)]
        ModelQuantizer(config(IgnoreWarnings=False)).quantize_model(models.cnn(), None, reader())
        assert [one for one in heard if "library" in str(one.message)]
    assert warnings.filters == before


def test_warnings_of_other_threads_are_heard_and_calls_may_overlap() -> None:
    inside, leave = threading.Event(), threading.Event()

    def slow() -> Iterator[dict[str, np.ndarray]]:
        inside.set()
        leave.wait(60)
        yield from samples()

    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        quantizer = ModelQuantizer(config(IgnoreWarnings=True))
        first = threading.Thread(target=quantizer.quantize_model, args=(models.cnn(), None, slow()))
        first.start()
        inside.wait(60)
        warnings.warn("from this thread", UserWarning, stacklevel=1)

        def reader() -> Iterator[dict[str, np.ndarray]]:
            leave.set()
            first.join()  # the call that began first ends first
            warnings.warn("from the second call", UserWarning, stacklevel=1)
            yield from samples()

        quantizer.quantize_model(models.cnn(), None, reader())
        assert [str(one.message) for one in heard if "from" in str(one.message)] == ["from this thread"]
        assert len(warnings.filters) == len(before) + 1
    assert warnings.filters == before


def test_print_summary(capsys: pytest.CaptureFixture[str]) -> None:
    ModelQuantizer(config(PrintSummary=False)).quantize_model(models.cnn(), None, samples())
    assert capsys.readouterr().out == ""
    ModelQuantizer(config(PrintSummary=True)).quantize_model(models.cnn(), None, samples())
    told = capsys.readouterr().out
    assert "Quantized tensors" in told and "Measured" in told and "time per sample" in told and "time in all" in told
    line = next(line for line in told.split("\n") if "fold_batch_norm" in line)
    assert line.split()[1] == "2"  # how often the pass fired


def test_metrics_are_those_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = samples(5)[3:]
    job = config(EvalMetrics=True, EvalDataReader=others, PrintSummary=True)
    result = ModelQuantizer(job).run(models.cnn(), tmp_path / "q.onnx", samples())
    assert result.metrics is not None and result.metrics.samples == 2
    expected = compare(models.cnn(), tmp_path / "q.onnx", others, ENDS)
    assert result.metrics.outputs == expected.outputs
    told = capsys.readouterr().out
    assert f"{expected.outputs['y'].cosine:.6f}" in told and "Layer by layer, worst first" in told
    assert [layer.tensor for layer in result.metrics.layers]
    same = ModelQuantizer(config(EvalMetrics=True)).run(models.cnn(), None, samples())
    assert same.metrics is not None and same.metrics.samples == 3
    assert ModelQuantizer(config()).run(models.cnn(), None, samples()).metrics is None


class Once:
    """The reader of the seeds: get_next and nothing else, here with one array that it fills again and again."""

    def __init__(self, given: list[dict[str, Any]]) -> None:
        self.left = list(given)
        self.shown = {name: np.empty_like(array) for name, array in given[0].items()}

    def get_next(self) -> dict[str, Any] | None:
        if not self.left:
            return None
        for name, array in self.left.pop(0).items():
            self.shown[name][...] = array
        return self.shown


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("algorithms", [[], [AdaRoundConfig(num_iterations=5)]])
@pytest.mark.parametrize("shape", ["get_next", "generator", "evaluation"])
def test_metrics_on_data_that_can_be_read_once(size: int | None, algorithms: list[Any], shape: str) -> None:
    """The same numbers as with a list, also where an algorithm reads the data, too."""
    given: dict[str, Any] = {"EvalMetrics": True, "CalibDataSize": size}
    once = {"get_next": lambda: Once(samples()), "generator": lambda: iter(samples()), "evaluation": samples}[shape]

    def measured(reader: Any, **more: Any) -> Any:
        layer = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
        made = QConfig(layer, algo_config=algorithms, extra_options={"PrintSummary": False, **given, **more})
        return ModelQuantizer(made).run(models.cnn(), None, reader).metrics

    expected = measured(samples(), **({"EvalDataReader": samples(4)} if shape == "evaluation" else {}))
    found = measured(once(), **({"EvalDataReader": Once(samples(4))} if shape == "evaluation" else {}))
    assert found.samples == (4 if shape == "evaluation" else size or 3)
    assert found.outputs == expected.outputs


def test_metrics_without_any_data_are_refused_at_once_and_generated_data_will_do() -> None:
    with pytest.raises(ConfigError, match="EvalMetrics: there is no data"):
        ModelQuantizer(config(EvalMetrics=True, WeightsOnly=True)).quantize_model(models.cnn(), None)
    result = ModelQuantizer(config(EvalMetrics=True, UseRandomData=True, CalibDataSize=3)).run(models.cnn(), None)
    assert result.metrics is not None and result.metrics.samples == 3


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    library = tmp_path / "nothing.so"
    library.write_bytes(b"no library")
    with pytest.raises(ModelError, match=r"UserCustomOpLibPath: .*nothing\.so"):
        ModelQuantizer(config(UserCustomOpLibPath=str(library))).quantize_model(models.cnn(), None, samples())


def test_libraries_are_files_or_folders_relative_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.so", "folder/b.so", "folder/c.so", "folder/notes.txt", "empty/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    here = tmp_path.resolve()
    assert library_files(None) == []
    assert library_files("a.so") == library_files([str(here / "a.so")]) == [str(here / "a.so")]
    assert library_files(["folder", "a.so"]) == [str(here / name) for name in ("folder/b.so", "folder/c.so", "a.so")]
    for missing, why in (("empty", "holds no library"), ("nowhere.so", "there is no")):
        with pytest.raises(ModelError, match=f"UserCustomOpLibPath: .*{why}"):
            ModelQuantizer(config(UserCustomOpLibPath=missing)).quantize_model(models.cnn(), None, samples())


def test_the_older_configuration_has_the_same_switches() -> None:
    legacy = get_default_config("A8W8")
    legacy.crypto_mode, legacy.debug_mode = True, False
    options = Config(global_quant_config=legacy).compile().options
    assert options.CryptoMode and not options.DebugMode and options.IgnoreWarnings


IO = Path("/proc/self/io")


def bytes_written() -> int:
    """What this process has handed to the kernel to write, native code included."""
    return int(next(line for line in IO.read_text().split("\n") if line.startswith("wchar")).split()[1])


@pytest.mark.skipif(not IO.exists(), reason="counts written bytes by Linux's /proc/self/io")
@pytest.mark.parametrize("preset", ["XINT8", "A8W8", "BFP16", "MATMUL_NBITS", "UINT8_DYNAMIC_QUANT"])
def test_crypto_mode_writes_nothing_at_all(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    weights = {"w": models.normal(64, 4, 3, 3), "v": models.normal(64 * 16, 32)}  # 140 kB
    graph = "g (float[1,4,6,6] x) => (float[1,32] y) { a = Conv(x, w) r = Relu(a) f = Flatten(r) y = MatMul(f, v) }"
    proto = models.model(graph, weights)
    written = {}
    for crypto in (True, False):
        made = get_default_config(preset)
        made.extra_options |= {"PrintSummary": False, "CryptoMode": crypto}
        output = None if crypto else tmp_path / "q.onnx"
        before = bytes_written()
        ModelQuantizer(Config(made)).quantize_model(proto, output, [models.feeds(proto)])
        written[crypto] = bytes_written() - before
        assert list(tmp_path.iterdir()) == ([] if crypto else [tmp_path / "q.onnx"])
    assert written[True] < 1000 < 20_000 < written[False]
