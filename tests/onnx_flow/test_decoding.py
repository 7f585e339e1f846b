"""``FloatDecoding``: found by structure, proposed where it would be quantized, kept in float where it is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from typer.testing import CliRunner

from quark.cli.app import app
from quark.onnx import CalibMethod, Config, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, get_default_config
from quark.onnx.flow import Result
from quark.onnx.graph.model import load
from quark.onnx.pipeline import prepare
from quark.onnx.qdq.decoding import decoding_nodes

INT8 = Int8Spec(calibration_method=CalibMethod.MinMax)
REAL = Path(__file__).parents[2] / ".." / "shared" / "data" / "models"


def detector() -> onnx.ModelProto:
    """Features, then boxes (centre + size, in pixels) joined with scores: one tensor for both."""
    graph = """
    g (float[1, 3, 8, 8] x) => (float[1, 64, 5] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
        r = Relu (a)
        h = Conv <pads = [0, 0, 0, 0]> (r, w2, b2)
        t = Transpose <perm = [0, 2, 3, 1]> (h)
        flat = Reshape (t, rows)
        xy, wh, score = Split <axis = 2> (flat, parts)
        moved = Mul (xy, stride)
        centre = Add (moved, grid)
        size = Exp (wh)
        p = Sigmoid (score)
        y = Concat <axis = 2> (centre, size, p)
    }"""
    weights = {
        "w1": models.normal(8, 3, 3, 3) / 3, "b1": models.normal(8), "w2": models.normal(5, 8, 1, 1) / 3,
        "b2": models.normal(5), "rows": np.array([1, 64, 5]), "parts": np.array([2, 2, 1]),
        "stride": np.full((1, 64, 2), 32, np.float32),
        "grid": np.arange(128, dtype=np.float32).reshape(1, 64, 2) * 8,
    }  # fmt: skip
    made = models.model(graph, weights, opset=13)
    for number, node in enumerate(made.graph.node):
        node.name = f"{node.op_type}_{number}"
    return made


DETECTOR = detector()
FEEDS = [{"x": models.normal(1, 3, 8, 8, seed=seed)} for seed in range(4)]


def found_in(model: onnx.ModelProto | Path) -> set[str]:
    prepared = prepare(load(model), QConfig(QLayerConfig(INT8, INT8)).compile())
    return {node.op_type for node in decoding_nodes(prepared.model)}


def quantized(proto: onnx.ModelProto = DETECTOR, **options: object) -> Result:
    config = QConfig(QLayerConfig(INT8, INT8), extra_options={"PrintSummary": False, **options})
    return ModelQuantizer(config).run(proto, None, FEEDS)


def worst(result: Result, columns: slice) -> float:
    assert result.proto is not None
    ours, floats = (models.session(one) for one in (result.proto, DETECTOR))
    return max(float(np.abs(ours.run(None, f)[0] - floats.run(None, f)[0])[..., columns].max()) for f in FEEDS)


def test_decoding_is_found_and_nothing_before_it() -> None:
    found = found_in(DETECTOR)
    assert found == {"Transpose", "Reshape", "Split", "Mul", "Add", "Exp", "Sigmoid", "Concat"}


def test_the_option_keeps_it_in_float_and_the_layers_quantized() -> None:
    result = quantized(FloatDecoding=True)
    nodes = {node.op_type: node for node in result.plan.nodes.values()}
    assert nodes["Conv"].quantized and not nodes["Add"].quantized and nodes["Add"].reason.startswith("FloatDecoding")
    assert {name for name in result.plan.tensors if name in ("centre", "size", "p", "moved", "flat")} == set()
    plain = quantized()
    assert worst(result, slice(4, 5)) < worst(plain, slice(4, 5)) / 5  # scores do not share the boxes' scale
    assert worst(result, slice(0, 2)) < worst(plain, slice(0, 2))


@pytest.mark.parametrize(
    ("preset", "options", "decoded"),
    [
        ("A8W8_CPU", {}, False),
        ("A8W8_CPU", {"FloatDecoding": False}, True),
        ("A8W8", {}, True),
        ("XINT8", {}, True),
    ],
)
def test_it_is_the_default_where_integers_win_no_time(preset: str, options: dict[str, bool], decoded: bool) -> None:
    config = get_default_config(preset)
    config.extra_options |= {"PrintSummary": False, "FloatWhereFaster": False, **options}
    quantizer = ModelQuantizer(Config(global_quant_config=config))
    nodes = quantizer.run(DETECTOR, None, [models.feeds(DETECTOR)]).plan.nodes.values()
    assert {node.quantized for node in nodes if node.op_type == "Add"} == {decoded}
    assert all(node.quantized for node in nodes if node.op_type == "Conv")


def test_it_is_proposed_until_it_is_done() -> None:
    (sentence,) = quantized().plan.proposals
    assert "'Transpose_3' to 'Concat_10'" in sentence and "FloatDecoding=True" in sentence
    assert quantized(FloatDecoding=True).plan.proposals == []


def test_the_plan_command_proposes_it(tmp_path: Path) -> None:
    path = tmp_path / "detector.onnx"
    onnx.save(DETECTOR, path)
    told = CliRunner().invoke(app, ["onnx", "plan", str(path), "--preset", "A8W8"])
    assert told.exit_code == 0 and "FloatDecoding" in told.output
    done = CliRunner().invoke(
        app, ["onnx", "plan", str(path), "--preset", "A8W8", "--set", "FloatDecoding=true", "--json"]
    )
    assert json.loads(done.output)["proposals"] == []


@pytest.mark.parametrize(
    "tail",
    [
        "y = Relu (h)",
        "s = Sigmoid (h) y = Mul (h, s)",
        "y = Add (h, a)",
        "g = GlobalAveragePool (h) f = Flatten (g) y = Softmax (f)",
        "y = Concat <axis = 1> (h, a)",
    ],
)
def test_activations_residual_sums_and_classifiers_are_no_decoding(tail: str) -> None:
    graph = f"g (float[1, 3, 8, 8] x) => (float y) {{ a = Conv (x, w, b) r = Relu (a) h = Conv (r, v, b) {tail} }}"
    weights = {"w": models.normal(8, 3, 3, 3), "b": models.normal(8), "v": models.normal(8, 8, 1, 1)}
    proto = models.model(graph, weights, opset=13)
    assert found_in(proto) == set()
    assert quantized(proto).plan.proposals == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ultraface_rfb320", {"Exp", "Mul", "Add", "Sub", "Softmax", "Concat", "Slice"}),
        ("yolox_nano", {"Sigmoid", "Concat"}),
        ("squeezenet11_flowers5", set()),
        ("stories260K", set()),
    ],
)
def test_real_models(name: str, expected: set[str]) -> None:
    path = REAL / f"{name}.onnx"
    if not path.exists():
        pytest.skip("the shared models are not beside the repository")
    found = found_in(path)
    assert found >= expected and "Conv" not in found and bool(found) == bool(expected)
