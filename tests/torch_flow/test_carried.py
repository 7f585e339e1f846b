"""Codes of a folder that was quantized before: kept where the new grid holds their values, else measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.torch_flow.export.networks import llama
from tests.torch_flow.export.test_reload import quantized
from tests.torch_flow.test_foreign import SIZES, gpt_oss, write

from quark.cli import main
from quark.torch import LLMTemplate
from quark.torch.export.api import import_model_from_safetensors
from quark.torch.files.foreign import quantized_model
from quark.torch.quantized_layer import quantized_layers

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")
COMMANDS = ("quantize", "quantize-files")
#: The scheme of a source, its formats, and the schemes that hold its values: codes are kept there.
KEPT = {
    "int4_wo_32": (("quark", "awq", "gptq", "gptq_v2", "compressed-tensors"), ("int4_wo_32", "uint4_wo_32")),
    "uint4_wo_32": (("quark", "awq", "gptq_v2", "compressed-tensors"), ("uint4_wo_32",)),
    "int8_wo_per_channel": (("quark", "gptq", "compressed-tensors"), ("int8_wo_per_channel",)),
    "fp8_block": (("fp8", "compressed-tensors"), ("fp8_block",)),
    "ptpc_fp8": (("quark", "compressed-tensors"), ("ptpc_fp8",)),
    "mxfp4_weight_only": (("quark", "compressed-tensors"), ("mxfp4_weight_only",)),
}
QUICK = {
    ("int4_wo_32", "gptq", "uint4_wo_32"),
    ("uint4_wo_32", "compressed-tensors", "uint4_wo_32"),
    ("fp8_block", "fp8", "fp8_block"),
}
CASES = [
    pytest.param(first, format, second, marks=() if (first, format, second) in QUICK else pytest.mark.slow)
    for first, (formats, schemes) in KEPT.items()
    for format in formats
    for second in schemes
]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: quantized(llama(**SIZES), LLMTemplate.get("llama").get_config(name)) for name in KEPT}


def run(command: str, source: Path, target: Path, scheme: str, capsys: Any, *more: str) -> dict[str, Any]:
    given = ["--scheme", scheme, *more, "--json"]
    assert main(["torch", command, str(source), "-o", str(target), *given]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(("first", "format", "second"), CASES)
def test_codes_are_kept(first: str, format: str, second: str, models: Any, tmp_path: Path, capsys: Any) -> None:
    model = models[first]
    write(model, tmp_path / "source", format)
    wanted = {name: layer.fake_quantized()._parameters["weight"].detach() for name, layer in quantized_layers(model)}
    for command in COMMANDS:
        told = run(command, tmp_path / "source", tmp_path / command, second, capsys)
        assert (told["carried_over"], told["quantized_again"], told["loss_to_source"]) == (len(wanted), 0, 0), command
        again = import_model_from_safetensors(None, tmp_path / command)
        found = {name: layer.fake_quantized()._parameters["weight"] for name, layer in quantized_layers(again)}
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), command
        if format == "quark" and first == second:
            files = (load_file(tmp_path / name / "model.safetensors") for name in ("source", command))
            before, after = files
            assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quantize", "quantize-files", "source"]


def test_what_does_not_fit_is_quantized_again_and_measured(models: Any, tmp_path: Path, capsys: Any) -> None:
    model = models["int4_wo_32"]
    write(model, tmp_path / "source", "gptq")
    layers = ("--layer", "*down_proj=fp8_block")
    for command in COMMANDS:
        told = run(command, tmp_path / "source", tmp_path / command, "int4_wo_32", capsys, *layers)
        again = import_model_from_safetensors(None, tmp_path / command)
        error = total = 0.0
        old, new = (dict(quantized_layers(one)) for one in (model, again))
        for name, layer in old.items():
            before, after = (one.fake_quantized()._parameters["weight"].detach().double() for one in (layer, new[name]))
            error, total = error + float((after - before).square().sum()), total + float(before.square().sum())
            assert name.endswith("down_proj") or torch.equal(before, after)
        assert told["quantized_again"] == sum(name.endswith("down_proj") for name in old) > 0
        assert told["carried_over"] == len(old) - told["quantized_again"]
        assert told["loss_to_source"] == pytest.approx((error / total) ** 0.5) and told["loss_to_source"] > 0.001


def test_a_broken_scale_is_seen(models: Any, tmp_path: Path) -> None:
    """A grid that does not give the values back is not kept, whatever the folder says."""
    from quark.torch.fake_quantize import calibrate_with, make_quantizer, parts
    from quark.torch.files.carried import codes_under

    layer = next(layer for _, layer in quantized_layers(models["int4_wo_32"]))
    value, made = layer.fake_quantized()._parameters["weight"].detach(), layer.weight_quantizer
    part = next(iter(parts(made)))
    known = {"0.scale": part.scale.reshape(-1), "0.zero_point": part.zero_point.reshape(-1)}
    quantizer = make_quantizer((part.stage,), "w", True)
    calibrate_with(quantizer, value)
    assert codes_under(quantizer, value, known) is not None
    before = next(iter(parts(quantizer))).scale.clone()
    wrong = known["0.scale"].clone()
    wrong[7] *= 1.001
    assert codes_under(quantizer, value, {**known, "0.scale": wrong}) is None
    assert codes_under(quantizer, value, {"0.scale": known["0.scale"][1:]}) is None
    assert torch.equal(next(iter(parts(quantizer))).scale, before)


def test_experts_of_gpt_oss_keep_their_values(tmp_path: Path, capsys: Any) -> None:
    gpt_oss(tmp_path / "source")
    for command in COMMANDS:
        told = run(
            command, tmp_path / "source", tmp_path / command, "mxfp4_weight_only", capsys, "--exclude-only", "*head"
        )
        assert told["carried_over"] == 6 and told["quantized_again"] == 0
    wanted = quantized_model(tmp_path / "source")
    found = import_model_from_safetensors(None, tmp_path / "quantize-files")
    new = dict(quantized_layers(found))
    for name, layer in quantized_layers(wanted):
        pair = [one.fake_quantized()._parameters["weight"] for one in (layer, new[name])]
        assert torch.equal(*pair), name
