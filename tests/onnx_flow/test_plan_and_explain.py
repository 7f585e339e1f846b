"""``quark onnx plan`` predicts what then happens; ``quark onnx explain`` finds the reason in the file alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.test_overrides import GRAPH, WEIGHTS

from quark.cli import main
from quark.errors import ConfigError, ModelError
from quark.onnx import Config, ModelQuantizer, QConfig, get_default_config
from quark.onnx.explain import KEY, explain
from quark.onnx.forecast import forecast


def quantized(folder: Path, preset: str = "A8W8", **changes: object) -> Path:
    config = get_default_config(preset)
    config.print_summary = False
    config.extra_options.update({"UseRandomData": True})
    for name, value in changes.items():
        setattr(config, name, value)
    ModelQuantizer(Config(global_quant_config=config)).quantize_model(models.cnn(), folder / "q.onnx")
    return folder / "q.onnx"


def test_a_tensor_is_explained_from_the_file_alone(tmp_path: Path) -> None:
    path = quantized(tmp_path, nodes_to_exclude=["y"])
    assert "activation 'r2': int8 symmetric" in explain(path, "r2")
    assert "global_config" in explain(path, "r2")
    for written in ("w2_quantized", "w2_scale", "w2_DequantizeLinear", "w2"):
        assert explain(path, written).startswith("weight 'w2': int8 symmetric")
    assert explain(path, "y") == "Gemm 'y': float, because nodes_to_exclude: y"
    assert explain(path, "n1").startswith("tensor 'n1': float")
    assert "one kernel (RemoveQDQConvRelu)" in explain(path, "a2")
    with pytest.raises(ConfigError, match=r"unknown tensor or node 'w1_bais'\. Did you mean 'w1_bias'"):
        explain(path, "w1_bais")


def test_every_tensor_and_node_of_the_plan_is_there(tmp_path: Path) -> None:
    config = QConfig(extra_options={"PrintSummary": False, "UseRandomData": True})
    result = ModelQuantizer(config).run(models.cnn(), tmp_path / "q.onnx")
    for name in (*result.plan.tensors, *result.plan.nodes):
        assert result.plan.explain(name) in explain(tmp_path / "q.onnx", name)
    stored = {entry.key: entry.value for entry in onnx.load(tmp_path / "q.onnx").metadata_props}[KEY]
    assert len(stored) < 100 * len(result.plan.tensors) + 1000


def test_a_model_without_decisions_says_so(tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "float.onnx")
    with pytest.raises(ModelError, match="holds no decisions"):
        explain(tmp_path / "float.onnx", "x")
    proto = onnx.load(quantized(tmp_path))
    proto.metadata_props[0].value = "no base64 !"
    onnx.save(proto, tmp_path / "damaged.onnx")
    with pytest.raises(ModelError, match="are damaged"):
        explain(tmp_path / "damaged.onnx", "x")


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "A8W8_CPU", "BFP16"])
def test_the_plan_without_data_is_the_plan_with_data(preset: str) -> None:
    config = get_default_config(preset)
    config.print_summary, config.include_cle = False, False
    config.extra_options["UseRandomData"] = True
    job = Config(global_quant_config=config)
    predicted, done = forecast(job.compile(), models.cnn()).plan, ModelQuantizer(job).run(models.cnn()).plan
    assert {t.name: (t.role, t.reason) for t in predicted} == {t.name: (t.role, t.reason) for t in done}
    assert predicted.nodes == done.nodes


REAL = ("squeezenet11_flowers5.onnx", "stories260K.onnx")


@pytest.mark.skipif(not models.REAL_MODELS.is_dir(), reason="no real models beside the repository")
@pytest.mark.parametrize(
    ("name", "preset"),
    [
        *(("squeezenet11_flowers5.onnx", preset) for preset in ("XINT8", "A8W8", "MXFP4E2M1")),
        ("stories260K.onnx", "MATMUL_NBITS"),
        pytest.param("stories260K.onnx", "A8W8", marks=pytest.mark.slow),
    ],
)
def test_the_predicted_size_is_near_the_written_one(tmp_path: Path, name: str, preset: str) -> None:
    config = get_default_config(preset)
    config.print_summary, config.include_cle = False, False
    if preset == "MATMUL_NBITS":
        config.extra_options["MatMulNBitsParams"] = {"GroupSize": 32}
    config.extra_options["UseRandomData"] = True
    job = Config(global_quant_config=config)
    predicted = forecast(job.compile(), models.REAL_MODELS / name)
    ModelQuantizer(job).quantize_model(models.REAL_MODELS / name, tmp_path / "q.onnx")
    off = 0.15 if preset == "MATMUL_NBITS" else 0.03
    assert predicted.bytes == pytest.approx((tmp_path / "q.onnx").stat().st_size, rel=off)
    assert predicted.peak_bytes > 0 and predicted.seconds_per_sample is not None


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["A8W8_CPU", "XINT8", "BF16"])
def test_the_predicted_peak_is_near_the_reached_one(tmp_path: Path, preset: str) -> None:
    """Each in a process of its own, with all that the interpreter and libraries take."""
    text = "g (float[1,512,8,8] x) => (float[1,512,8,8] y) { a = Conv <pads = [1,1,1,1]> (x, w0) b = Relu (a)" + (
        "c = Conv <pads = [1,1,1,1]> (b, w1) d = Relu (c) y = Conv <pads = [1,1,1,1]> (d, w2) }"
    )
    weights = {f"w{number}": models.normal(512, 512, 3, 3) * np.float32(0.02) for number in range(3)}
    onnx.save(models.model(text, weights), tmp_path / "m.onnx")
    job = [str(tmp_path / "m.onnx"), "-p", preset]

    def said(*words: str) -> str:
        command = [sys.executable, "-m", "quark", "onnx", *words]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    predicted = json.loads(said("plan", *job, "--json"))["peak_bytes"] / 1e6
    reached = said("quantize", *job, "--random", "-o", str(tmp_path / "q.onnx"), "--no-check")
    assert predicted == pytest.approx(float(re.findall(r"memory at the peak +(\d+) MB", reached)[0]), rel=0.25)


@pytest.mark.parametrize(
    "options",
    [{"DedicatedQDQPair": True}, {"AddQDQPairToWeight": True}, {"RemoveQDQConvRelu": False}, {"QuantizeBias": False}],
)
def test_the_predicted_size_follows_the_options(tmp_path: Path, options: dict[str, bool]) -> None:
    config = QConfig(extra_options={"PrintSummary": False, "UseRandomData": True, **options})
    proto = models.model(GRAPH, WEIGHTS)  # two nodes read one of its tensors
    predicted = forecast(config.compile(), proto)
    ModelQuantizer(config).quantize_model(proto, tmp_path / "q.onnx")
    assert predicted.bytes == pytest.approx((tmp_path / "q.onnx").stat().st_size, rel=0.03)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(models.cnn(), tmp_path / "m.onnx")
    command = ["onnx", "plan", str(tmp_path / "m.onnx"), "--preset", "XINT8", "--exclude", "y"]
    assert main([*command, "--tensors"]) == 0
    text = capsys.readouterr().out
    for words in ("Operators", "Left in float", "nodes_to_exclude", "By which rule", "Predicted", "memory at the peak"):
        assert words in text
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["nodes"]["y"] == {"op_type": "Gemm", "quantized": False, "reason": "nodes_to_exclude: y"}
    assert facts["tensors"]["w2"]["role"] == "weight" and facts["bytes"]["predicted"] > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx"]
    assert main(["onnx", "explain", str(quantized(tmp_path)), "w2"]) == 0
    assert capsys.readouterr().out.startswith("weight 'w2': int8")
    assert main(["onnx", "explain", str(tmp_path / "q.onnx"), "nothing", "--json"]) == 1


def test_the_summary_tells_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(models.cnn(), tmp_path / "m.onnx")
    config = QConfig(extra_options={"UseRandomData": True})
    ModelQuantizer(config).quantize_model(tmp_path / "m.onnx", tmp_path / "q.onnx")
    text = capsys.readouterr().out
    assert "time per sample" in text and "Passes" in text and "fold_batch_norm" in text
    assert "Measured" in text and "against the float file" in text
    ratio = (tmp_path / "m.onnx").stat().st_size / (tmp_path / "q.onnx").stat().st_size
    assert f"{ratio:.1f}×" in text


def test_the_same_bytes_twice(tmp_path: Path) -> None:
    first = quantized(tmp_path).read_bytes()
    assert quantized(tmp_path).read_bytes() == first and np.frombuffer(first, np.uint8).size > 1000
