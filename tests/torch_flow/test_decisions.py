"""The torch flow decides in one ``Plan``: in memory, in graphs and file by file; what runs is read off it."""

from __future__ import annotations

import pytest
import torch
from tests.torch_flow.export.networks import llama
from torch import nn

from quark.config.plan import Plan
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.config.model import SLOTS, QConfig, QLayerConfig
from quark.torch.config.schemes import ROWS, scheme
from quark.torch.config.specs import Int8PerTensorSpec
from quark.torch.config.type import QuantizationMode
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.files.decision import decide
from quark.torch.graph.point import points
from quark.torch.matching import Match, match

INT8 = Int8PerTensorSpec().to_quantization_spec()


class Branches(nn.Module):
    """Two branches that a concatenation joins, one of them read by two operators."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.cat([self.one(x), self.two(x)], 1))
        return y


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_plan_file_says_what_runs(name: str) -> None:
    """Read back from JSON a plan runs the same stages, of linear layers and of transposed ones."""
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(nn.Linear(128, 128), Conv1D(128, 128))
    found = match(model, QConfig(scheme(name)))
    read = Plan.from_json(found.plan.to_json())
    assert len(found.quantized) == 2
    for item in found.quantized:
        assert Match(item.layer, read).stages == item.stages and any(item.stages[slot] for slot in SLOTS)
        told = " on ".join(stage.spec.describe() for stage in reversed(item.stages["weight"]))
        assert read.tensors[f"{item.layer.name}.weight"].spec.describe() == told
    assert len(read.tensors) == sum(bool(item.stages[slot]) for item in found.quantized for slot in SLOTS)


def test_one_plan_in_memory_and_in_files(tmp_path: object) -> None:
    """``quantize_model`` and ``quantize_checkpoint`` write the same decisions, shared scales too."""
    model = llama()
    model.save_pretrained(tmp_path)
    config = LLMTemplate.for_model(model).get_config("nvfp4")
    config.shared_scale_groups = [["q_proj", "k_proj", "v_proj"]]
    config.exclude = [*config.exclude, "*.o_proj"]
    inside = match(model, config).plan
    files = decide(read_checkpoint(tmp_path), config).found.plan  # type: ignore[arg-type]
    assert inside.to_json() == files.to_json()
    groups = {row.name: row.group for row in inside.of_role("weight") if ".layers.0." in row.name}
    first = {name: group for name, group in groups.items() if group == "model.layers.0.self_attn.q_proj.weight"}
    assert {name.split(".")[-2] for name in first} == {"q_proj", "k_proj", "v_proj"} and len(first) < len(groups)
    assert inside.floats["model.layers.0.self_attn.o_proj.weight"] == "exclude: '*.o_proj'"


@pytest.mark.parametrize("where", ["outputs", "inputs"])
def test_the_plan_of_a_graph_names_its_tensors(where: str) -> None:
    slot = {"output_tensors": INT8} if where == "outputs" else {"input_tensors": INT8}
    config = QConfig(QLayerConfig(weight=INT8, **slot), quant_mode=QuantizationMode.fx_graph_mode)
    quantizer = ModelQuantizer(config)
    graph = quantizer.quantize_model(Branches().eval(), [torch.randn(1, 3, 4, 4)])
    plan = quantizer.plan
    assert {row.name for row in plan.of_role("weight")} == {"one.weight", "two.weight", "last.weight"}
    rows = plan.of_role("activation")
    if where == "outputs":
        assert {row.name: row.readers for row in rows} == dict.fromkeys(("one", "two", "cat", "last"))
        assert {row.group for row in rows if row.name in ("one", "two", "cat")} == {"one"}
    else:
        assert {row.name: row.readers for row in rows} == {
            "x": frozenset({"one", "two"}),
            "one": frozenset({"cat"}),
            "two": frozenset({"cat"}),
            "cat": frozenset({"last"}),
        }
    assert plan.nodes["cat"].reason == plan.nodes["one"].reason == "global_quant_config"
    assert len({row.group for row in rows}) == len(list(points(graph)))
