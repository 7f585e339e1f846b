"""Plans of both flows: what is planned is what is made, a line says why, and two plans are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from tests.onnx_flow import models
from tests.torch_flow.export.networks import llama

from quark.cli import main
from quark.config.plan import Plan

Capture = pytest.CaptureFixture[str]
W = np.random.default_rng(5).normal(size=(8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plan")
    llama().save_pretrained(made / "m")
    return made / "m"


def told(capture: Capture, *arguments: Any) -> str:
    code = main([str(argument) for argument in arguments])
    out, err = capture.readouterr()
    assert code == 0, err
    return out


def stored(folder: Path) -> dict[str, int]:
    """Bytes of the tensors in a folder, by name."""
    found: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("scheme", ["int4_wo_32", "mxfp4"])
def test_what_is_planned_is_what_is_made(folder: Path, tmp_path: Path, capsys: Capture, scheme: str) -> None:
    options = ("--scheme", scheme, "--layer", "*.down_proj=int8_wo_per_channel", "--exclude", "*.o_proj")
    planned = json.loads(told(capsys, "torch", "plan", folder, *options, "--json"))
    told(capsys, "torch", "quantize-files", folder, "-o", tmp_path / "q", *options, "--json")
    made = stored(tmp_path / "q")
    quantized = {name.rpartition(".")[0] for name in made if name.endswith("weight_scale")}
    assert planned["bytes"]["predicted"] == sum(made.values())
    assert planned["bytes"]["float"] == sum(stored(folder).values())
    assert {name for name, layer in planned["layers"].items() if layer["quantized"]} == quantized and quantized
    down = next(entry for name, entry in planned["tensors"].items() if name.endswith("down_proj.weight"))
    assert down["spec"].startswith("int8") and down["reason"] == "layer_quant_config['*.down_proj']"
    left = next(layer for name, layer in planned["layers"].items() if name.endswith("o_proj"))
    assert left == {"type": "Linear", "quantized": False, "reason": "exclude: '*.o_proj'"}
    assert planned["peak_bytes"] > 4e8 and planned["temporary_bytes"] == 0 < planned["seconds"] < 60
    assert not planned["needs_samples"] and set(planned["readers"]) >= {"vLLM", "transformers"}


def test_the_command_says_what_comes_and_why(folder: Path, capsys: Capture) -> None:
    assert main(["torch", "plan", str(folder), "--scheme", "fp8", "--tensors"]) == 0
    shown = capsys.readouterr()
    assert "Who reads it" in shown.out and "No weight was read. It needs samples: give a text" in shown.err
    name = "model.layers.0.mlp.down_proj"
    line = told(capsys, "torch", "explain", folder, f"{name}.weight", "--scheme", "int4_wo_32")
    assert line.startswith(f"weight '{name}.weight': int4") and "because global_quant_config" in line
    head = told(capsys, "torch", "explain", folder, "lm_head", "-s", "int4_wo_32")
    assert head == "Linear 'lm_head': float, because exclude: 'lm_head'\n"
    assert main(["torch", "explain", str(folder), "model.layers.0.mlp.down_prj", "-s", "int4_wo_32"]) == 1
    assert f"Did you mean '{name}'" in capsys.readouterr().err


def test_plans_are_compared(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    a, b, c = (tmp_path / f"{name}.json" for name in "abc")
    layer = ("--layer", "model.layers.0.mlp.down_proj=int8_wo_per_channel")
    told(capsys, "torch", "plan", folder, "-s", "int4_wo_32", "--plan", a)
    told(capsys, "torch", "plan", folder, "-s", "int4_wo_32", "--plan", b)
    told(capsys, "torch", "plan", folder, "-s", "int4_wo_32", *layer, "--plan", c)
    assert Plan.from_json(a.read_text()).to_json() == a.read_text()
    assert told(capsys, "plan", "diff", a, b).strip().startswith("no difference: ")
    found = json.loads(told(capsys, "plan", "diff", a, c, "--json"))["differences"]
    assert {row["name"] for row in found} == {f"{layer[1].partition('=')[0]}{end}" for end in ("", ".weight")}
    assert "int4" in found[0]["before"] and "int8" in found[0]["after"]
    proto = models.model("g (float[n,8] x) => (float[n,8] z) { y = MatMul(x, w) z = Relu(y) }", {"w": W})
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    for path, preset in ((a, "A8W8"), (b, "A8W8"), (c, "A16W8")):
        told(capsys, "onnx", "plan", tmp_path / "m.onnx", "--preset", preset, "--plan", path)
    assert "no difference" in told(capsys, "plan", "diff", a, b) and "int16" in told(capsys, "plan", "diff", a, c)
    quantized = tmp_path / "q.json"
    options = ("-o", tmp_path / "q.onnx", "--preset", "A8W8", "--random", "--plan", quantized)
    told(capsys, "onnx", "quantize", tmp_path / "m.onnx", *options)
    assert "no difference" in told(capsys, "plan", "diff", a, quantized)
    changed = json.loads(quantized.read_text())
    changed["tensors"][0]["scale"] = 3.5
    c.write_text(json.dumps(changed))
    assert "1 difference" in told(capsys, "plan", "diff", quantized, c)


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"tensors": [{"spec": {"granularity": {"kind": "prod"}}}]}'])
def test_what_is_no_plan_is_one_sentence(tmp_path: Path, capsys: Capture, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    assert main(["plan", "diff", str(tmp_path / "p.json"), str(tmp_path / "p.json")]) == 1
    assert "is not a plan" in capsys.readouterr().err
