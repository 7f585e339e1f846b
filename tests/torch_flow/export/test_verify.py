"""Exports read themselves back: whatever the writer does wrong is an error, and no folder appears."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.errors import ModelError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export import state
from quark.torch.export.api import export_safetensors

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 128, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
Stored = Mapping[str, torch.Tensor]


def quantized(scheme: str) -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=512)).eval()
    config = LLMTemplate.for_model(model).get_config(scheme)
    return ModelQuantizer(config).quantize_model(model, [torch.randint(0, 128, (2, 16))])


def a_nibble(stored: Stored) -> Stored:
    """The first two codes of every word change places."""
    word = stored[""]
    return {**stored, "": (word & ~0xFF) | (word & 0xF) << 4 | (word >> 4) & 0xF}


def a_scale(stored: Stored) -> Stored:
    """Every scale is doubled."""
    return {**stored, "scale": stored["scale"] * 2}


def turned_around(stored: Stored) -> Stored:
    """Codes the other way round."""
    return {**stored, "": stored[""].flip(0).contiguous()}


def transposed(stored: Stored) -> Stored:
    """Square codes are transposed."""
    codes = stored[""]
    return {**stored, "": codes.T.contiguous() if codes.shape[0] == codes.shape[1] else codes}


@pytest.mark.parametrize("scheme", ["int4_wo_32", "fp8", "mxfp4", "int8_wo_per_channel", "nvfp4", "int4_fp8", "mx6"])
def test_what_is_right_is_written(scheme: str, tmp_path: Path) -> None:
    export_safetensors(quantized(scheme), tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("scheme", "broken"),
    [
        ("int4_wo_32", a_nibble), ("int4_wo_32", a_scale), ("int4_wo_32", turned_around),
        ("int8_wo_per_channel", transposed), ("int8_wo_per_channel", a_scale), ("mxfp4", turned_around),
    ],
)  # fmt: skip
def test_a_broken_writer_writes_nothing(
    scheme: str, broken: Callable[[Stored], Stored], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = quantized(scheme), state.store
    monkeypatch.setattr(state, "store", lambda *arguments: broken(store(*arguments)))
    with pytest.raises(ModelError, match="does not read back"):
        export_safetensors(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    export_safetensors(model, tmp_path / "m", verify=False)
    assert (tmp_path / "m").exists()
