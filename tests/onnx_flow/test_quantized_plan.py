"""A quantized model is read back into the plan that it was made by, ours and ONNX Runtime's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from tests.onnx_flow import models

from quark.cli import main
from quark.config.plan import Plan
from quark.config.plan_diff import differences
from quark.errors import ModelError
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.quantized_plan import plan_of

PRESETS = (
    *("XINT8", "A8W8", "A16W8", "A8W8_CPU", "BF16", "BFP16", "BF16_MIXED_BFP16", "MX6", "MXFP4E2M1", "S8S8_AAWS"),
    "INT16_CNN_DEFAULT",
)
GRAPH = "g (float[n,8] x) => (float[n,8] z) { a = MatMul(x, w) b = Relu(a) z = MatMul(b, v) }"
RNG = np.random.default_rng(5)
WEIGHTS = {name: RNG.normal(size=(8, 8)).astype(np.float32) for name in ("w", "v")}


def made(preset: str, path: Path, **options: object) -> Plan:
    config = get_default_config(preset)
    config.print_summary = config.include_cle = False
    config.extra_options.update({"UseRandomData": True, **options})
    return ModelQuantizer(Config(global_quant_config=config)).run(models.cnn(), path).plan


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_read_back(tmp_path: Path, preset: str) -> None:
    """The same tensors, formats, granularity, scales and zero points as in the plan that was written."""
    plan = made(preset, tmp_path / "q.onnx")
    assert list(differences(plan, plan_of(tmp_path / "q.onnx"))) == []


class Reader(CalibrationDataReader):
    """Four samples."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        shape = [axis.dim_value or 1 for axis in proto.graph.input[0].type.tensor_type.shape.dim]
        rng = np.random.default_rng(0)
        name = proto.graph.input[0].name
        self.samples = iter([{name: rng.normal(size=shape).astype(np.float32)} for _ in range(4)])

    def get_next(self) -> dict[str, np.ndarray] | None:  # type: ignore[override]
        return next(self.samples, None)


def test_a_model_of_another_tool_is_explained_compared_and_carried_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scales and zero points of the other tool's file are those of the model that ``--plan-from`` makes."""
    proto = models.model(GRAPH, WEIGHTS)
    onnx.save(proto, tmp_path / "m.onnx")
    quantize_static(
        tmp_path / "m.onnx", tmp_path / "ort.onnx", Reader(proto), quant_format=QuantFormat.QDQ, per_channel=True
    )
    theirs = plan_of(tmp_path / "ort.onnx")
    assert theirs.tensors["w"].spec.describe(given=True).startswith("int8 symmetric per channel (axis 1)")
    assert main(["onnx", "explain", str(tmp_path / "ort.onnx"), "w"]) == 0
    assert "given, because the quantized model has it so" in capsys.readouterr().out
    options = ["-p", "A8W8", "--random", "--plan-from", str(tmp_path / "ort.onnx")]
    assert main(["onnx", "quantize", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "q.onnx"), *options]) == 0
    capsys.readouterr()
    ours = plan_of(tmp_path / "q.onnx")
    for name in ("w", "v", "x", "b"):
        for one, other in zip(theirs.tensors[name].given or (), ours.tensors[name].given or (), strict=True):
            np.testing.assert_array_equal(one, other)
    assert main(["plan", "diff", str(tmp_path / "ort.onnx"), str(tmp_path / "q.onnx"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []


def test_what_a_plan_cannot_hold_is_said(tmp_path: Path) -> None:
    onnx.save(models.cnn(), tmp_path / "float.onnx")
    with pytest.raises(ModelError, match="is not quantized"):
        plan_of(tmp_path / "float.onnx")
    made("UINT8_DYNAMIC_QUANT", tmp_path / "dynamic.onnx")
    with pytest.raises(ModelError, match="a plan holds no ConvInteger, which is the node 'c1_quant'"):
        plan_of(tmp_path / "dynamic.onnx")
    text = """g (float[4,8] x) => (float[4,8] y) <bool c = {1}, float s = {0.1}, int8 z = {0}> { y = If (c) <
        then_branch = t () => (float[4,8] u) { [inner] q = QuantizeLinear(x, s, z) u = DequantizeLinear(q, s, z) },
        else_branch = e () => (float[4,8] v) { v = Neg(x) }> }"""
    onnx.save(models.model(text), tmp_path / "body.onnx")
    with pytest.raises(ModelError, match="'inner' quantizes in a body of If or Loop"):
        plan_of(tmp_path / "body.onnx")
