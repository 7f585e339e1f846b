"""The benchmark of the operators runs on a toy network, and its quantized models compute what the formats say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.operators.amd_operators import bfp_quantize_dequantize, mx_quantize_dequantize

from quark.numerics.affine import Coding
from quark.numerics.blocks import BLOCKS
from quark.numerics.elements import ELEMENTS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed

from benchmarks import models, operators  # noqa: E402
from tests.operators.running import assert_same  # noqa: E402


@pytest.mark.slow
def test_the_report(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.operators",
        "--toy",
        "--repeats",
        "1",
        "--profile",
        "--json",
        str(file),
    ]
    done = subprocess.run(
        [*command, "--formats", "bfloat16", "mxfp4"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert file.exists(), done.stderr
    lines = {line["format"]: line for line in json.loads(file.read_text())["lines"]}
    assert set(lines) == {"float", "bfloat16", "mxfp4"}
    assert all(line["milliseconds"] > 0 for line in lines.values())
    spent = lines["mxfp4"]["kernels"]
    assert "If" not in spent and spent["Conv"] > 0  # what runs inside an If counts for itself


def grid_of(name: str, x: np.ndarray) -> np.ndarray:
    """``x`` (blocks along axis 1) as ``quark.numerics`` rounds the activations of a case."""
    case = operators.CASES[name]
    if case.op_name == "BFPQuantizeDequantize":
        return bfp_quantize_dequantize(x, **case.attributes)
    if case.op_name == "MXQuantizeDequantize":
        return mx_quantize_dequantize(x, **case.attributes)
    if case.op_name == "BlockQuantizeDequantize":
        return BLOCKS[name].round(x, 1)
    scale = np.float32(1 / 16 if case.op_name == "QuantizeDequantize" else 1)
    return Coding(ELEMENTS[name]).fake_quantize(x, scale, np.int32(0))


@pytest.mark.parametrize("name", operators.CASES)
def test_every_case_quantizes_activations_and_weights(name: str) -> None:
    network = models.resnet(models.TOY)
    feed = models.random_images(models.TOY.image, 1, seed=1)[0]
    case, weight = operators.CASES[name], network.graph.initializer[0]
    model = operators.quantized(network, case)
    onnx.checker.check_model(model, full_check=True)
    written = [n for n in model.graph.node if n.op_type in (case.op_name, "Cast")]
    assert len(written) >= len(operators.activations(network))
    for output in (f"{network.graph.input[0].name}_quantized", weight.name):
        del model.graph.output[:]
        model.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, [None] * 4))
        options = ort.SessionOptions()
        options.log_severity_level = 3
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        (got,) = session.run(None, feed)
        if output != weight.name:
            assert_same(got, grid_of(name, next(iter(feed.values()))))
        elif case.weights in BLOCKS:
            assert_same(got, BLOCKS[case.weights].round(numpy_helper.to_array(weight), 1))
        else:
            assert 0 < np.abs(got - numpy_helper.to_array(weight)).max() < 0.1 * np.abs(got).max()
