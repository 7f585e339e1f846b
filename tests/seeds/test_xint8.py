"""Page 003: power-of-two scales, the measurement of what they cost, and fine-tuning, all of it executed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.onnx_flow import models
from tests.seeds import text
from tests.seeds.awkward import Reader, decibels, network, samples

from quark.onnx import ModelQuantizer
from quark.onnx.quantization.config import Config, get_default_config

PRESETS = ("XINT8_ADAROUND_CONFIG", "XINT8_ADAQUANT_CONFIG")


def one_input() -> onnx.ModelProto:
    """A network with the input of the page's name and awkward shapes."""
    graph = """g (float[N, 6, 9, 7] model_input_name) => (float y) {
        a = Conv <pads = [1, 0, 1, 1]> (model_input_name, w1, b1)
        r = Relu (a)
        d = Conv <group = 10> (r, w2, b2)
        s = LeakyRelu <alpha = 0.1> (d)
        q = GlobalAveragePool (s)
        f = Flatten (q)
        y = Gemm <transB = 1> (f, w5, b5)
    }"""
    weights = {"w1": models.normal(10, 6, 3, 2) * 0.2, "b1": models.normal(10), "w2": models.normal(10, 1, 3, 3) * 0.4}
    weights |= {"b2": models.normal(10, seed=2), "w5": models.normal(11, 10) * 0.3, "b5": models.normal(11)}
    return models.model(graph, weights, opset=17)


IMAGES = [models.normal(1, 6, 9, 7, seed=k) for k in range(8)]


@text.needed
def test_the_first_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    onnx.save(one_input(), "path/to/float_model.onnx")
    _, code = text.block("003", "from onnxruntime.quantization.calibrate", "quantizer.quantize_model(")
    code = text.indented(code).replace("processed_data = []", "processed_data = IMAGES")
    exec(compile(code, "003", "exec"), {"IMAGES": IMAGES})
    proto = onnx.load("path/to/quantized_model.onnx")
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    scales = np.concatenate([np.ravel(stored[node.input[1]]) for node in nodes])
    assert len(scales) > 10 and (np.log2(scales) % 1 == 0).all()
    zeros = {int(zero) for node in nodes for zero in np.ravel(stored[node.input[2]])}
    assert zeros <= {0, 128}
    assert {stored[node.input[2]].dtype.itemsize for node in nodes} == {1}  # biases too


def powers_of_two(proto: onnx.ModelProto) -> bool:
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    return bool((np.log2(np.concatenate([np.ravel(stored[node.input[1]]) for node in nodes])) % 1 == 0).all())


def test_symmetric_eight_bits_with_powers_of_two() -> None:
    feeds = [{"model_input_name": image} for image in IMAGES]
    quantizer = ModelQuantizer(Config(global_quant_config=get_default_config("XINT8")))
    proto = quantizer.quantize_model(one_input(), None, Reader(feeds))
    assert powers_of_two(proto)
    found, exact = (
        np.concatenate([models.run(one, {"model_input_name": image})[0] for image in IMAGES])
        for one in (proto, one_input())
    )
    assert 10 * np.log10(np.square(exact).sum() / np.square(found - exact).sum()) > 18


def test_the_graph_is_optimized_by_itself() -> None:
    proto = ModelQuantizer(Config(get_default_config("XINT8"))).quantize_model(network(), None, Reader(samples()))
    assert "BatchNormalization" not in {node.op_type for node in proto.graph.node}
    assert decibels(proto) > 10


@text.needed
@pytest.mark.parametrize("preset", PRESETS)
def test_fine_tuning(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two examples, and what they win over the plain preset."""
    pytest.importorskip("torch").set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    onnx.save(one_input(), "float.onnx")
    feeds = [{"model_input_name": image} for image in IMAGES]
    given: dict[str, Any] = {
        "input_model_path": "float.onnx",
        "output_model_path": "out.onnx",
        "data_reader": Reader(feeds),
    }
    given |= {"get_default_config": get_default_config, "Config": Config, "ModelQuantizer": ModelQuantizer}
    start = next(n for n, line in enumerate(text.lines("003"), 1) if preset in line)
    _, code = text.block("003", "quant_config = get_default_config", "quantizer.quantize_model(", start)
    exec(compile(code, "003", "exec"), given)
    plain = ModelQuantizer(Config(get_default_config("XINT8"))).quantize_model("float.onnx", None, Reader(feeds))
    assert powers_of_two(onnx.load("out.onnx"))
    errors = []
    for proto in (plain, onnx.load("out.onnx")):
        errors.append(
            sum(float(np.square(models.run(proto, f)[0] - models.run(one_input(), f)[0]).sum()) for f in feeds)
        )
    assert errors[1] < errors[0]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two folders of results, in every format that the page names."""
    rng = np.random.default_rng(0)
    for folder, noise in (("baseline_results", 0.0), ("quantized_results", 0.01)):
        (tmp_path / folder).mkdir()
        for index in range(2):
            values = np.random.default_rng(index).standard_normal((1, 11)) + noise * rng.standard_normal((1, 11))
            np.save(tmp_path / folder / f"{index}.npy", values.astype(np.float32))
    return tmp_path


@text.needed
def test_results_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(one_input(), "float32_model.onnx")
    _, code = text.block("003", "import numpy as np", "infer_model_and_save_output(onnx_model_path")
    exec(compile(code, "003", "exec"), {"input_data_loader": IMAGES})
    assert np.load("baseline_results/7.npy").shape == (1, 11)


@text.needed
def test_results_are_compared(results: Path) -> None:
    """The command of the page, with its own spelling of the module."""
    line = next(line for line in text.lines("003") if line.startswith("python -m quark.onnx.tools.evaluate"))
    words = line.split()[1:]
    folders = {"BASELINE_RESULTS_FOLDER_PATH": "baseline_results", "QUANTIZED_RESULTS_FOLDER_PATH": "quantized_results"}
    words = [str(results / folders[word[1:]]) if word.startswith("$") else word for word in words]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert all(re.search(word, done.stdout, re.I) for word in ("cosine", "L2", "PSNR"))


def test_the_metrics_of_a_comparison(results: Path) -> None:
    from quark.onnx.tools.evaluate import compare_folders

    for one in compare_folders(results / "baseline_results", results / "quantized_results"):
        a, b = (
            np.load(results / folder / one.name).astype(np.float64).ravel()
            for folder in ("baseline_results", "quantized_results")
        )
        assert one.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-6)
        assert one.l2 == pytest.approx(np.linalg.norm(a - b), rel=1e-6)
