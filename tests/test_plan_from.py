"""A plan that was written, and edited, is what is carried out; what does not fit is one sentence. Both flows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.torch import load_file
from tests.onnx_flow import models
from tests.torch_flow.export.networks import llama

from quark.cli import main
from quark.config.plan import Plan
from quark.errors import QuarkError
from quark.numerics.rounding import ROUNDINGS
from quark.onnx import Config, ModelQuantizer, get_default_config

Capture = pytest.CaptureFixture[str]
Edit = Callable[[dict[str, Any]], None]
RNG = np.random.default_rng(5)
WEIGHTS = {name: RNG.normal(size=(8, 8)).astype(np.float32) for name in ("w", "v")}
GRAPH = "g (float[n,8] x) => (float[n,8] z) { a = MatMul(x, w) b = Relu(a) z = MatMul(b, v) }"
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("from")
    llama().save_pretrained(made / "m")
    onnx.save(models.model(GRAPH, WEIGHTS), made / "m.onnx")
    return made


def told(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def written(folder: Path, edit: Edit, *options: str) -> Path:
    """The plan of a command, edited."""
    path = folder / "plan.json"
    assert told(*options, "--plan", path, "--overwrite") == 0
    plan = json.loads(path.read_text())
    edit(plan)
    path.write_text(json.dumps(plan))
    return path


def row(plan: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in plan["tensors"] if entry["name"] == name)


def without(plan: dict[str, Any], *names: str) -> None:
    plan["tensors"] = [entry for entry in plan["tensors"] if entry["name"] not in names]


def to_int8(plan: dict[str, Any]) -> None:
    """One layer in int8 per channel, another in float."""
    row(plan, f"{UP}.weight")["spec"].update(format="int8", granularity={"kind": "Channel", "axis": 0})
    without(plan, f"{DOWN}.weight")


@pytest.mark.parametrize("command", ["quantize", "quantize-files"])
def test_an_edited_plan_of_a_checkpoint_is_carried_out(folder: Path, tmp_path: Path, command: str) -> None:
    """The same tensors as with ``--layer`` and ``--exclude``; what was not edited has the bits that it had."""
    model, base = folder / "m", ("-s", "int4_wo_32")
    plan = written(tmp_path, to_int8, "torch", "plan", str(model), *base)
    options = ("--layer", f"{UP}=int8_wo_per_channel", "--exclude", DOWN)
    runs = {"plan": ("--plan-from", plan), "options": options, "plain": ()}
    for name, given in runs.items():
        assert told("torch", command, model, "-o", tmp_path / name, *base, *given, "--json") == 0
    found = {name: load_file(tmp_path / name / "model.safetensors") for name in runs}
    assert {name: value.shape for name, value in found["plan"].items()} == {
        name: value.shape for name, value in found["options"].items()
    }
    assert all(bool((value == found["options"][name]).all()) for name, value in found["plan"].items())
    assert f"{DOWN}.weight_scale" not in found["plan"] and found["plan"][f"{UP}.weight_scale"].numel() == 128
    again = {name for name, value in found["plain"].items() if name in found["plan"] and UP not in name}
    assert len(again) > 20 and all(
        bool((found["plain"][name] == found["plan"][name]).all()) for name in again if DOWN not in name
    )


def test_stages_can_be_edited(folder: Path, tmp_path: Path) -> None:
    """int8 on FP8 for one layer, FP8 alone for another, of int4 on FP8."""

    def edit(plan: dict[str, Any]) -> None:
        row(plan, f"{UP}.weight")["spec"]["second"].update(format="int8")
        del row(plan, f"{DOWN}.weight")["spec"]["second"]

    model, base = folder / "m", ("-s", "int4_fp8")
    plan = written(tmp_path, edit, "torch", "plan", str(model), *base)
    assert told("torch", "quantize-files", model, "-o", tmp_path / "q", *base, "--plan-from", plan, "--json") == 0
    found = load_file(tmp_path / "q" / "model.safetensors")
    kinds = {name: str(found[f"{name}.weight"].dtype) for name in (UP, DOWN, UP.replace("up_proj", "gate_proj"))}
    assert list(kinds.values()) == ["torch.int8", "torch.float8_e4m3fn", "torch.int32"]
    assert f"{UP}.weight_scale_2" in found and f"{DOWN}.weight_scale_2" not in found


def test_an_unedited_plan_changes_nothing(folder: Path, tmp_path: Path) -> None:
    base = ("-s", "nvfp4")
    plan = written(tmp_path, lambda plan: None, "torch", "plan", str(folder / "m"), *base)
    ids = tmp_path / "ids.npz"
    np.savez(ids, input_ids=np.arange(128).reshape(2, 64) % 90)
    data = ("--data", ids, "--seq-len", "16", "--samples", "4")
    for name, given in (("a", ()), ("b", ("--plan-from", plan))):
        assert told("torch", "quantize-files", folder / "m", "-o", tmp_path / name, *base, *data, *given) == 0
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_an_edited_plan_of_a_graph_is_carried_out(folder: Path, tmp_path: Path) -> None:
    """int16 for one tensor, float for a weight, a scale that is given; the rest is as it would have been."""

    def edit(plan: dict[str, Any]) -> None:
        row(plan, "x")["spec"].update(format="int16", method="percentile", settings=[["percentile", 60.0]])
        row(plan, "b")["given"] = [0.25, 0]
        without(plan, "v")

    model, base = folder / "m.onnx", ("--preset", "A8W8", "--random")
    plan = written(tmp_path, edit, "onnx", "plan", str(model), "--preset", "A8W8")
    runs = {"plan": ("--plan-from", str(plan)), "same": ()}
    for name, given in runs.items():
        kept = tmp_path / f"{name}_made.json"
        assert told("onnx", "quantize", model, "-o", tmp_path / f"{name}.onnx", *base, *given, "--plan", kept) == 0
    made = onnx.load(tmp_path / "plan.onnx")
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in made.graph.initializer}
    assert "v" in stored and "w_quantized" in stored and stored["x_zero_point"].dtype == np.int16
    assert stored["b_scale"] == 0.25
    before, after = (json.loads((tmp_path / f"{name}_made.json").read_text()) for name in ("same", "plan"))
    assert row(after, "w")["scale"] == row(before, "w")["scale"]
    assert row(after, "x")["range"][1] < 0.8 * row(before, "x")["range"][1]
    assert row(after, "x")["reason"] == after["floats"]["v"] == "the plan that was given"
    assert [node["quantized"] for node in after["nodes"] if node["op_type"] == "MatMul"] == [True, False]
    options = ("--preset", "A8W8", "--plan-from", str(tmp_path / "plan_made.json"))
    again = json.loads(written(tmp_path, lambda plan: None, "onnx", "plan", str(model), *options).read_text())
    assert row(again, "x")["spec"]["format"] == "int16" and again["nodes"] == after["nodes"]


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "A8W8_CPU", "A16W8", "BFP16", "S8S8_AAWS", "with settings"])
def test_a_plan_that_was_made_makes_the_same_model(preset: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the ranges and scales that it has then, which are found anew; what was edited in them is told."""
    searched = {"WeightCalibrateMethod": "MinMSE", "MinMSEModeFloatScale": "Percentile"}
    preset, options = ("A8W8", searched) if preset == "with settings" else (preset, {})
    config = get_default_config(preset)
    config.print_summary = False
    config.extra_options.update({"UseRandomData": True, **options})
    quantizer = ModelQuantizer(Config(global_quant_config=config))
    first = quantizer.run(models.cnn())
    assert any(one.spec.settings for one in first.plan) == bool(options)
    again = quantizer.run(models.cnn(), plan=Plan.from_json(first.plan.to_json()))
    assert again.proto == first.proto and again.plan.to_json() == first.plan.to_json()
    assert "found anew" not in caplog.text
    for key, value in (("range", [-77.0, 78.0]), ("scale", 7.5)):
        edited = json.loads(first.plan.to_json())
        rows = [one for one in edited["tensors"] if one["role"] == "activation" and one[key] is not None]
        for one in rows[1:2]:
            one[key] = value
            caplog.clear()
            changed = quantizer.run(models.cnn(), plan=Plan.from_json(json.dumps(edited)))
            assert changed.proto == first.proto
            assert f"those of 1 tensors are others than the file's ({one['name']!r}: {key} " in caplog.text
        assert rows or preset == "BFP16"


TORCH: dict[str, tuple[Edit, str]] = {
    "name": (lambda plan: row(plan, f"{UP}.weight").update(name="model.layers.0.mlp.up_prj.weight"), "Did you mean"),
    "scale": (lambda plan: row(plan, f"{UP}.weight").update(scale=1.0), "scale is found from weights and samples"),
    "group": (lambda plan: row(plan, f"{UP}.weight").update(group=f"{DOWN}.weight"), "shared_scale_groups"),
    "node": (lambda plan: plan["nodes"][1].update(quantized=not plan["nodes"][1]["quantized"]), "only explain"),
    "axis": (
        lambda plan: row(plan, f"{UP}.weight")["spec"].update(granularity={"kind": "Group", "axis": 1, "size": 48}),
        "group_size=48 does not divide",
    ),
    "no words": (
        lambda plan: row(plan, f"{UP}.weight")["spec"].update(format="mxfp4", granularity={"kind": "Tensor"}),
        "no configuration of the torch flow means mxfp4",
    ),
}


@pytest.mark.parametrize("case", TORCH)
def test_what_a_checkpoint_cannot_have_is_one_sentence(
    folder: Path, tmp_path: Path, capsys: Capture, case: str
) -> None:
    edit, sentence = TORCH[case]
    plan = written(tmp_path, edit, "torch", "plan", str(folder / "m"), "-s", "int4_wo_32")
    base = ("-s", "int4_wo_32", "--plan-from", plan)
    assert told("torch", "quantize-files", folder / "m", "-o", tmp_path / "q", *base) == 1
    err = capsys.readouterr().err
    assert sentence in " ".join(err.split()) and "Traceback" not in err and not (tmp_path / "q").exists()


ONNX: dict[str, tuple[Edit, str]] = {
    "name": (lambda plan: row(plan, "x").update(name="xx"), "unknown tensor of the plan 'xx'"),
    "role": (lambda plan: row(plan, "w").update(role="activation"), "it is a constant"),
    "axis": (
        lambda plan: row(plan, "w")["spec"].update(granularity={"kind": "Channel", "axis": 5}),
        "the granularity names axis 5",
    ),
    "activation per channel": (
        lambda plan: row(plan, "x")["spec"].update(granularity={"kind": "Channel", "axis": 0}),
        "an activation has one scale per tensor",
    ),
    "group": (
        lambda plan: (row(plan, "b").update(group="x"), row(plan, "b")["spec"].update(format="int16")),
        "it shares the range of 'x'",
    ),
    "readers": (lambda plan: row(plan, "x").update(readers=["nobody"]), "the node 'nobody' does not read it"),
    "node": (lambda plan: plan["nodes"][0].update(quantized=False), "only explain"),
    "given": (lambda plan: row(plan, "x").update(given=[float("nan"), 0]), "is not finite"),
    "no scale": (lambda plan: row(plan, "x").update(given=[-0.5, 0]), "is not more than 0"),
    "no code": (lambda plan: row(plan, "x").update(given=[0.5, 300]), "no code of int8 (-128 to 127)"),
    "twice": (lambda plan: plan["tensors"].append(dict(row(plan, "x"), group="b")), "two rows of it"),
    "real zero": (lambda plan: row(plan, "w")["spec"].update(real_zero=True), "ONNX has neither"),
    "two stages": (lambda plan: row(plan, "w")["spec"].update(second=dict(row(plan, "x")["spec"])), "ONNX has neither"),
    "three stages": (
        lambda plan: row(plan, "w")["spec"].update(
            second={**row(plan, "x")["spec"], "second": dict(row(plan, "x")["spec"])}
        ),
        "two stages at most",
    ),
    "run time": (lambda plan: row(plan, "w")["spec"].update(dynamic=True), "dynamic is for ranges at run time"),
    "search": (
        lambda plan: row(plan, "w")["spec"].update(method="percentile"),
        "unknown calibration method of a tensor of the role weight 'percentile'",
    ),
    "setting": (lambda plan: row(plan, "x")["spec"].update(settings=[["persentile", 9]]), "unknown setting"),
    "setting of a constant": (lambda plan: row(plan, "w")["spec"].update(settings=[["bins", 9]]), "unknown setting"),
    "no rounding": (lambda plan: row(plan, "w")["spec"].update(rounding="even"), "unknown rounding 'even'"),
    "rounding": (
        lambda plan: row(plan, "x")["spec"].update(rounding="half_up"),
        "unknown rounding in int8 of a tensor of the role activation 'half_up'",
    ),
    "learned": (lambda plan: row(plan, "x")["spec"].update(method="LSQObserver"), "LSQObserver"),
}


@pytest.mark.parametrize("case", ONNX)
def test_what_a_graph_cannot_have_is_one_sentence(folder: Path, tmp_path: Path, capsys: Capture, case: str) -> None:
    edit, sentence = ONNX[case]
    plan = written(tmp_path, edit, "onnx", "plan", str(folder / "m.onnx"), "--preset", "A8W8")
    base = ("--preset", "A8W8", "--random", "--plan-from", plan)
    assert told("onnx", "quantize", folder / "m.onnx", "-o", tmp_path / "q.onnx", *base) == 1
    err = capsys.readouterr().err
    assert sentence in " ".join(err.split()) and "Traceback" not in err and not (tmp_path / "q.onnx").exists()


FIELDS: dict[str, list[Any]] = {
    "symmetric": [True, False],
    "narrow": [True, False],
    "dynamic": [True],
    "reduced": [True],
    "real_zero": [True],
    "rounding": list(ROUNDINGS),
    "settings": [[["percentile", 60.0]], [["mode", "MostCommon"]], [["bins", 9]]],
    "granularity": [{"kind": "Channel", "axis": 1}, {"kind": "Group", "axis": 0, "size": 4}, {"kind": "Token"}],
    "format": ["int4", "uint8", "int16", "fp8_e4m3", "bfloat16", "mxfp4"],
}


@pytest.mark.parametrize("preset", ["A8W8", "U8U8_AAWA", "BFP16"])
def test_what_a_row_says_is_what_is_made(preset: str) -> None:
    """Another line about a tensor is another graph, or is refused: nothing is said that nothing carries out."""
    rng = np.random.default_rng(3)  # its own: what is a tie does not hang on the tests before
    ties = np.arange(-63.5, 64, 0.5)[rng.permutation(255)[:64]].reshape(8, 8).astype(np.float32)
    ties[0, 0], ties[1] = 127, ties[1] / 8  # a scale of 1, and halves between two codes
    model = models.model(GRAPH, {"w": ties, "v": WEIGHTS["v"]})
    samples = [{"x": rng.standard_t(3, size=(64, 8)).astype(np.float32)} for _ in range(3)]
    config = get_default_config(preset)
    config.extra_options["PrintSummary"] = False

    def made(plan: Plan | None) -> tuple[Any, Plan]:
        result = ModelQuantizer(Config(global_quant_config=config)).run(model, None, samples, plan=plan)
        graph = result.proto.graph if result.proto is not None else onnx.GraphProto()
        return ([*map(str, graph.node)], [*map(str, graph.initializer)]), result.plan

    first, plan = made(None)
    told = json.loads(plan.to_json())
    for name, field, value in [(name, key, one) for name in "wx" for key, values in FIELDS.items() for one in values]:
        edited = json.loads(json.dumps(told))
        row(edited, name)["spec"][field] = value
        try:
            graph, after = made(Plan.from_dict(edited))
        except QuarkError:
            continue
        if after.tensors[name].spec.describe() != plan.tensors[name].spec.describe():
            assert graph != first, f"{name}: {field}={value} changes nothing"


@pytest.mark.parametrize("preset", ["MATMUL_NBITS", "UINT8_DYNAMIC_QUANT"])
def test_other_modes_say_that_they_do_not(folder: Path, tmp_path: Path, capsys: Capture, preset: str) -> None:
    plan = written(tmp_path, lambda plan: None, "onnx", "plan", str(folder / "m.onnx"), "--preset", preset)
    base = ("-p", preset, "--random", "--plan-from", plan)
    assert told("onnx", "quantize", folder / "m.onnx", "-o", tmp_path / "q.onnx", *base) == 1
    assert "a plan is carried out by static quantization" in " ".join(capsys.readouterr().err.split())
