"""A quantized model is read back into the plan that it was made by, ours and ONNX Runtime's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
from tests.onnx_flow import models

from quark.cli import main
from quark.config.plan import Plan
from quark.config.plan_diff import differences
from quark.config.presets import PRESETS
from quark.errors import ModelError
from quark.numerics.formats import Block
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.quantized_plan import plan_of

#: Presets whose models hold nothing that a plan could: ``test_what_a_plan_cannot_hold_is_said``.
OTHER_MODES = ("MATMUL_NBITS", "UINT8_DYNAMIC_QUANT")
GRAPH = "g (float[n,8] x) => (float[n,8] z) { a = MatMul(x, w) b = Relu(a) z = MatMul(b, v) }"
RNG = np.random.default_rng(5)
WEIGHTS = {name: RNG.normal(size=(8, 8)).astype(np.float32) for name in ("w", "v")}


def made(preset: str, path: Path, **options: object) -> Plan:
    config = get_default_config(preset)
    config.print_summary = config.include_cle = False
    config.extra_options.update({"UseRandomData": True, **options})
    return ModelQuantizer(Config(global_quant_config=config)).run(models.cnn(), path).plan


def changed(path: Path, name: str, factor: float) -> Path:
    """The file with one scale times ``factor``, written by onnx."""
    proto = onnx.load(path)
    scale = next(one for one in proto.graph.initializer if one.name == name)
    array = onnx.numpy_helper.to_array(scale)
    scale.CopyFrom(onnx.numpy_helper.from_array((array * factor).astype(array.dtype), name))
    onnx.save(proto, path.with_name("changed.onnx"))
    return path.with_name("changed.onnx")


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=[pytest.mark.slow] if one.tuning else [])
        for name, one in PRESETS.items()
        if name not in OTHER_MODES
    ],
)
def test_every_preset_is_read_back(tmp_path: Path, preset: str) -> None:
    """The same tensors, formats, granularity, scales and zero points as in the plan that was written; one other scale
    in the file is another row."""
    plan = made(preset, tmp_path / "q.onnx")
    assert list(differences(plan, plan_of(tmp_path / "q.onnx"))) == []
    names = [one.name for one in onnx.load(tmp_path / "q.onnx").graph.initializer]
    ends = ("_scale", "_tensor_scale", "_quantized_scale")
    scaled = {(row.role, name): name + end for name, row in plan.tensors.items() for end in ends if name + end in names}
    assert scaled or all(isinstance(row.spec.row, Block) or row.spec.row.unit_scale for row in plan.tensors.values())
    for (_, name), scale in {key[0]: (key, one) for key, one in scaled.items()}.values():  # one of each role
        found = differences(plan, plan_of(changed(tmp_path / "q.onnx", scale, 2.0)))
        group = {one.name for one in plan.tensors.values() if one.group == plan.tensors[name].group}
        assert {one.name for one in found} == group


@pytest.mark.parametrize("preset", ["A8W8", "NVFP4"])
def test_a_scale_that_was_changed_in_a_file_is_that_of_the_model_that_is_made_by_it(
    tmp_path: Path, preset: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made(preset, tmp_path / "q.onnx")
    onnx.save(models.cnn(), tmp_path / "float.onnx")
    other = changed(tmp_path / "q.onnx", "x_scale", 2.0)
    options = ["-p", preset, "--random", "--plan-from", str(other)]
    assert main(["onnx", "quantize", str(tmp_path / "float.onnx"), "-o", str(tmp_path / "q.onnx"), *options]) == 0
    found = [one.name for one in differences(plan_of(other), plan_of(tmp_path / "q.onnx"))]
    assert found == ["w1_bias"] * (preset == "A8W8")  # whose scale in the file no longer was that of its products
    files = [onnx.load(path).graph.initializer for path in (other, tmp_path / "q.onnx")]
    wanted, again = ([onnx.numpy_helper.to_array(one) for one in file if one.name == "x_scale"] for file in files)
    np.testing.assert_array_equal(again, wanted)


def test_another_scale_shows_wherever_a_quantized_file_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``plan diff`` names the tensor, ``inspect`` the rule that the scale no longer follows, ``compare`` what is cut
    off: all are views of the plan that is read off the file."""
    made("XINT8", tmp_path / "q.onnx")
    onnx.save(models.cnn(), tmp_path / "float.onnx")
    other = changed(tmp_path / "q.onnx", "r1_scale", 0.3)

    def said(*words: str | Path) -> Any:
        assert main([*map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    found = said("plan", "diff", tmp_path / "q.onnx", other)["differences"]
    assert [one["name"] for one in found] == ["r1", "p1"]  # which a MaxPool gives one scale
    kinds = [said("onnx", "inspect", path)["tensors"]["activation"] for path in (tmp_path / "q.onnx", other)]
    assert all("power_of_two" in kind for kind in kinds[0])
    assert [count for kind, count in kinds[1].items() if "power_of_two" not in kind] == [2]
    layers = [
        {
            one["tensor"]: one["clipped"]
            for one in said("onnx", "compare", tmp_path / "float.onnx", path, "--random")["layers"]
        }
        for path in (tmp_path / "q.onnx", other)
    ]
    assert layers[0]["r1"] == 0 and layers[1]["r1"] > 0


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
    for preset, words in zip(OTHER_MODES, ("MatMulNBits, which is the node 'y_Q4'", "ConvInteger"), strict=True):
        made(preset, tmp_path / "other.onnx")
        with pytest.raises(ModelError, match=f"a plan holds no {words}"):
            plan_of(tmp_path / "other.onnx")
    text = """g (float[4,8] x) => (float[4,8] y) <bool c = {1}, float s = {0.1}, int8 z = {0}> { y = If (c) <
        then_branch = t () => (float[4,8] u) { [inner] q = QuantizeLinear(x, s, z) u = DequantizeLinear(q, s, z) },
        else_branch = e () => (float[4,8] v) { v = Neg(x) }> }"""
    onnx.save(models.model(text), tmp_path / "body.onnx")
    with pytest.raises(ModelError, match="'inner' quantizes in a body of If or Loop"):
        plan_of(tmp_path / "body.onnx")
