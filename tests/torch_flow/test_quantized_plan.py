"""A quantized folder is read back into the plan that it was made by, in our format and in others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.torch_flow.export.networks import llama

from quark.cli import main
from quark.config.plan import Plan, TensorPlan
from quark.config.plan_diff import differences, read_plan
from quark.config.tensor import TensorSpec
from quark.errors import QuarkError
from quark.torch.files.quantized_plan import plan_of
from quark.torch.observer import SearchObserver
from quark.torch.plan_rows import stages_in

CASES = (
    *(("int4_wo_32", "quark"), ("int8_wo_per_channel", "quark"), ("mxfp4", "quark")),
    *(("int4_wo_32", "compressed-tensors"), ("uint4_wo_32", "awq"), ("uint4_wo_32", "gptq"), ("ptpc_fp8", "modelopt")),
)


def told(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.parametrize(("scheme", "format"), CASES)
def test_the_plan_of_a_folder_is_that_it_was_made_by(tmp_path: Path, scheme: str, format: str) -> None:
    llama().save_pretrained(tmp_path / "m")
    base = ("-s", scheme, "--format", format)
    made = tmp_path / "plan.json"
    assert told("torch", "plan", tmp_path / "m", *base, "--plan", made) == 0
    assert told("torch", "quantize-files", tmp_path / "m", "-o", tmp_path / "q", *base) == 0
    assert list(differences(read_plan(made), plan_of(tmp_path / "q"))) == []
    if format == "quark":
        given = ("--plan-from", tmp_path / "q")
        assert told("torch", "quantize-files", tmp_path / "m", "-o", tmp_path / "again", *base, *given) == 0
        one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("q", "again"))
        assert one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


def test_a_float_folder_is_no_plan(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "m")
    with pytest.raises(QuarkError, match="is float"):
        plan_of(tmp_path / "m")
    assert "quantization_config" not in json.loads((tmp_path / "m" / "config.json").read_text())


@pytest.mark.parametrize("observer", [(), ("PerTensorMinMaxObserver",)])
def test_a_stage_whose_observer_nobody_names_gets_that_of_its_method(observer: tuple[str, ...]) -> None:
    spec = TensorSpec("int8", method="percentile", second=TensorSpec("int4", method="minmax"))
    plan = Plan()
    plan.put(TensorPlan("layer.weight", "weight", spec, "asked for", observer=observer))
    stages = stages_in(plan, "layer.weight")
    assert [stage.spec.format for stage in stages] == ["int8", "int4"]
    assert all(stage.observer is SearchObserver for stage in stages)
