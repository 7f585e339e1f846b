"""One identity of a job: an input that changes after a kill is refused by name; else the bytes are those of one run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError, DataError
from quark.files.journal import Journal
from quark.onnx import GPTQConfig, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, fingerprint
from quark.onnx.graph.model import load
from quark.search.trials import Trying

# ---- the digest of a model -------------------------------------------------------------------------------------------


def network(external: Path | None = None) -> onnx.ModelProto:
    """Weights of every kind: large, small, unread, int8, in a Constant node, of 4 bits."""
    text = """g (float[n, 32] x) => (float[n, 32] y) {
        h = MatMul(x, large)  s = Add(h, small)  c = Constant <value = float[4] {1.0, 2.0, 3.0, 4.0}> ()
        q = DequantizeLinear(codes, step)  y = Add(s, q) }"""
    weights = {
        "large": models.normal(32, 32), "small": models.normal(32, seed=1), "unread": models.normal(999, seed=2),
        "codes": np.arange(32 * 40, dtype=np.int8).reshape(40, 32)[:1], "step": np.array(0.5, np.float32),
    }  # fmt: skip
    return models.model(text, weights)


def changes() -> dict[str, Callable[[onnx.ModelProto], object]]:
    def weight(name: str, index: int) -> Callable[[onnx.ModelProto], object]:
        def change(proto: onnx.ModelProto) -> None:
            tensor = next(one for one in proto.graph.initializer if one.name == name)
            values = onnx.numpy_helper.to_array(tensor).copy()
            values.flat[index] += 1
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, name))

        return change

    found = {
        f"{name}[{index}]": weight(name, index) for name in ("large", "small", "unread", "codes") for index in (0, -1)
    }
    found["constant"] = lambda proto: proto.graph.node[2].attribute[0].t.float_data.__setitem__(0, 9.0)
    found["operator"] = lambda proto: setattr(proto.graph.node[1], "op_type", "Sub")
    found["input"] = lambda proto: setattr(proto.graph.input[0].type.tensor_type.shape.dim[1], "dim_param", "m")
    found["opset"] = lambda proto: setattr(proto.opset_import[0], "version", proto.opset_import[0].version + 1)
    return found


@pytest.mark.parametrize("external", [False, True], ids=["inside", "external data"])
def test_every_weight_and_every_node_is_in_the_digest(external: bool, tmp_path: Path) -> None:
    def digest(proto: onnx.ModelProto, name: str) -> str:
        onnx.save(proto, tmp_path / name, save_as_external_data=external, location=f"{name}.data", size_threshold=0)
        return fingerprint.of_model(load(tmp_path / name))

    before = digest(network(), "a.onnx")
    assert digest(network(), "b.onnx") == before
    for name, change in changes().items():
        proto = network()
        change(proto)
        assert digest(proto, "b.onnx") != before, name


# ---- ONNX ------------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    """What ends a job in the middle."""


def quantized(
    folder: Path,
    proto: onnx.ModelProto,
    samples: Any,
    monkeypatch: pytest.MonkeyPatch,
    stop: int | None = None,
    **other: Any,
) -> bytes:
    """Quantize with GPTQ; raise after ``stop`` entries are kept."""
    options = {"PrintSummary": False, "SaveAndRestore": str(folder / "s.json"), **other}
    config = QConfig(
        QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec()), algo_config=[GPTQConfig()], extra_options=options
    )
    write, count = Journal._write, [0]

    def counted(self: Journal, *arguments: Any) -> None:
        if count[0] == stop:
            raise Stopped
        write(self, *arguments)
        count[0] += 1

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_write", counted)
        ModelQuantizer(config).quantize_model(proto, folder / "q.onnx", samples)
    return (folder / "q.onnx").read_bytes()


def two_layers(seed: int = 0) -> onnx.ModelProto:
    graph = "g (float[n, 32] x) => (float[n, 8] y) { [a] h = MatMul(x, w) [r] t = Relu(h) [b] y = MatMul(t, v) }"
    return models.model(graph, {"w": models.normal(32, 32, seed=seed), "v": models.normal(32, 8, seed=9)})


def feeds(seed: int = 0) -> list[dict[str, np.ndarray]]:
    return [{"x": models.normal(16, 32, seed=seed + k)} for k in range(3)]


@pytest.mark.parametrize("stop", [1, 3, 4, 5])
def test_an_input_of_an_onnx_job_that_changes_after_a_kill_is_refused(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    wanted = quantized(whole, two_layers(), feeds(), monkeypatch)
    with pytest.raises(Stopped):
        quantized(tmp_path, two_layers(), feeds(), monkeypatch, stop)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for words, model, data, other in (
        ("another model", two_layers(seed=5), feeds(), {}),
        ("samples", two_layers(), feeds(seed=5), {}),
        ("Percentile", two_layers(), feeds(), {"Percentile": 99.5}),
    ):
        with pytest.raises((ConfigError, DataError), match=words):
            quantized(tmp_path, model, data, monkeypatch, **other)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with monkeypatch.context() as patch:
        patch.setitem(fingerprint.RELEASES, "onnxruntime", "0.1")
        with pytest.raises(ConfigError, match="release of onnxruntime"):
            quantized(tmp_path, two_layers(), feeds(), monkeypatch)
    assert quantized(tmp_path, two_layers(), feeds(), monkeypatch) == wanted


def tried(job: str, proto: onnx.ModelProto, data: Any, values: dict[str, Any], ledger: Path) -> Any:
    """What a search of the ONNX flow finds."""
    from quark.onnx.search import search
    from quark.onnx.sensitivity import sensitivity

    kinds = ["A8W8", "float"]
    if job == "sensitivity":
        return sensitivity(proto, values, data, kinds, trying=Trying(ledger=ledger)).trials
    found = search(proto, values, data, kinds, "sqnr>=1", trying=Trying(ledger=ledger))
    return found.layers, found.value, found.reported


@pytest.mark.parametrize("job", ["sensitivity", "search"])
def test_an_input_of_an_onnx_search_that_changes_after_a_kill_is_refused(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: dict[str, Any] = {"preset": "A8W8"}
    whole = tried(job, two_layers(), feeds(), values, tmp_path / "whole.json")
    ledger, finish = tmp_path / "l.json", Journal.finish

    def ends(self: Journal, key: str, value: Any) -> None:
        finish(self, key, value)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", ends)
        with pytest.raises(Stopped):
            tried(job, two_layers(), feeds(), values, ledger)
    before = ledger.read_bytes()
    for words, model, data, other in (
        ("another model", two_layers(seed=5), feeds(), {}),
        ("another data", two_layers(), feeds(seed=5), {}),
        ("another algorithms", two_layers(), feeds(), {"algorithms": [{"name": "adaround"}]}),
        ("belongs to another", two_layers(), feeds(), {"target": "cpu"}),
        ("Percentile", two_layers(), feeds(), {"options": {"Percentile": 99.5}}),
    ):
        with pytest.raises(ConfigError, match=words):
            tried(job, model, data, {**values, **other}, ledger)
        assert ledger.read_bytes() == before, words
    assert tried(job, two_layers(), feeds(), values, ledger) == whole


def test_the_content_of_a_file_that_the_configuration_names_counts(tmp_path: Path) -> None:
    (tmp_path / "library.so").write_bytes(b"first")
    layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    config = QConfig(layer, extra_options={"SaveAndRestore": str(tmp_path / "s.json")})
    job, model, files = config.compile(), load(two_layers()), [("the library", tmp_path / "library.so")]
    fingerprint.journal_of(model, job, files).finish("a", 1.0)
    fingerprint.journal_of(model, job, files)
    (tmp_path / "library.so").write_bytes(b"second")
    with pytest.raises(ConfigError, match="content of the library"):
        fingerprint.journal_of(model, job, files)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def edit(path: Path, key: str, value: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: Path) -> None:
    """One bit of the last tensor, and the times of the file as they were."""
    import os

    stat, content = path.stat(), bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_an_input_of_a_job_on_files_that_changes_after_a_kill_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.torch_flow.test_files import HEADS, IDS

    from quark.torch import LLMTemplate, digest
    from quark.torch.files import quantize, quantize_checkpoint

    fields = {**HEADS, "num_hidden_layers": 1}
    source = tmp_path / "source"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).save_pretrained(source, max_shard_size="80KB")
    (source / "tokenizer.json").write_text("{}")
    (last := sorted(source.glob("*.safetensors"))[-1]).stat()
    config, samples = LLMTemplate.get("llama").get_config("fp8"), [IDS[:1, :8]]
    quantize_checkpoint(source, tmp_path / "whole", config, samples=samples)
    write, target = quantize.write_file, tmp_path / "target"

    def second_fails(path: Path, items: Any) -> None:
        if list(target.glob("*.safetensors")):
            raise Stopped
        write(path, items)

    with monkeypatch.context() as patch:
        patch.setattr(quantize, "write_file", second_fails)
        with pytest.raises(Stopped):
            quantize_checkpoint(source, target, config, samples=samples)
    before = contents(target)
    kept = tmp_path / "kept"
    shutil.copytree(source, kept)
    int8 = LLMTemplate.get("llama").get_config("int8_wo_per_channel")
    older = partial(monkeypatch.setattr, digest, "version", lambda name: "0.1")
    cases: dict[str, tuple[Callable[[], object], Any, Any]] = {
        f"weights of {last.name}": (lambda: flip(last), config, samples),
        "config.json": (lambda: edit(source / "config.json", "rms_norm_eps", 0.1), config, samples),
        "tokenizer.json": (lambda: (source / "tokenizer.json").write_text("{ }"), config, samples),
        "samples": (lambda: None, config, [IDS[:1, 1:9]]),
        "configuration: ": (lambda: None, int8, None),
        "another release of openquark": (older, config, samples),
    }
    for words, (change, chosen, data) in cases.items():
        change()
        with pytest.raises(ConfigError, match=words):
            quantize_checkpoint(source, target, chosen, samples=data)
        shutil.rmtree(source)
        shutil.copytree(kept, source)
        monkeypatch.undo()
        assert contents(target) == before
    quantize_checkpoint(source, target, config, samples=samples)
    made = {path.name: path.read_bytes() for path in target.iterdir()}
    assert made == {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
