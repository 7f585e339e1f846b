"""Scales of layers with many outputs are told apart by some of them: as good, and judged in full at the end."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.torch_flow.test_files import llama

from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.algorithms import judge
from quark.torch.quantization.config.config import AWQConfig, QConfig

pytest.importorskip("transformers")
IDS = [{"input_ids": torch.randint(5, 120, (2, 24), generator=torch.Generator().manual_seed(k))} for k in range(3)]


def spread() -> Any:
    """A model some of whose channels are large, for which scales are made."""
    model = llama()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "layernorm" in name:
                value.mul_(torch.exp(torch.randn(value.shape, generator=generator)))
    return model


def error(algorithms: list[Any] | None) -> float:
    """Mean squared error of the logits of the quantized model."""
    model = spread()
    config: QConfig = replace(LLMTemplate.get("llama").get_config("int4_wo_32"), algo_config=algorithms)
    with torch.no_grad():
        expected = [model(**ids).logits for ids in IDS]
        quantized = ModelQuantizer(config).quantize_model(copy.deepcopy(model), IDS if algorithms else None)
        answers = [quantized(**ids).logits for ids in IDS]
    return sum(float((a - b).square().mean()) for a, b in zip(answers, expected, strict=True))


@pytest.mark.usefixtures("few_candidates")
def test_a_part_of_the_outputs_chooses_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    without, whole = error(None), error([AWQConfig()])
    seen: set[int] = set()
    weight = judge.ScaleJudge.weight

    def watched(self: judge.ScaleJudge, item: Any) -> torch.Tensor:
        found = weight(self, item)
        seen.add(len(found))
        return found

    monkeypatch.setattr(judge, "OUTPUTS", 32)
    monkeypatch.setattr(judge.ScaleJudge, "weight", watched)
    part = error([AWQConfig()])
    assert 32 in seen and max(seen) > 32  # candidates by some outputs, the chosen ones by all
    assert part < without and part < 1.25 * whole
