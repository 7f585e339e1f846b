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


def shuffled(stored: Stored) -> Stored:
    """The first tensor of codes with its rows the other way round."""
    name = next(name for name in stored if name.endswith(("qweight", "weight_packed", "weight")))
    return {**stored, name: stored[name].flip(0).contiguous()}


def doubled(stored: Stored) -> Stored:
    """Scales twice as large."""
    name = next(name for name in stored if name.endswith(("scales", "weight_scale", "weight_scale_inv")))
    return {**stored, name: (stored[name].float() * 2).to(stored[name].dtype)}


FORMATS = {
    "awq": ("int4_wo_32",), "gptq": ("int4_wo_32", "int8_wo_per_channel"), "gptq_v2": ("uint4_wo_32",),
    "fp8": ("fp8_block",), "compressed-tensors": ("int4_wo_32", "fp8_block", "nvfp4", "mxfp4_weight_only", "ptpc_int8"),
}  # fmt: skip


@pytest.mark.parametrize("broken", [None, shuffled, doubled])
@pytest.mark.parametrize(("format", "scheme"), [(name, one) for name, own in FORMATS.items() for one in own])
def test_formats_of_other_programs_are_decoded_by_their_own_rules(
    format: str, scheme: str, broken: Callable[[Stored], Stored] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the file is what the program decodes: large tensors in windows of rows."""
    from quark.torch.export import compressed_tensors, huggingface, shards, verify

    def write_broken(folder: Path, items: list[shards.Item], *rest: Any) -> list[str]:
        coded = next(item for item in items if len(item.form) > 1 and any("scale" in name for name in item.form))
        bad = shards.Item(coded.form, lambda: broken(coded.make()))  # type: ignore[misc]
        return shards.write_shards(folder, [bad if item is coded else item for item in items], *rest)

    own = compressed_tensors if format == "compressed-tensors" else huggingface
    if broken is not None:
        monkeypatch.setattr(own, "write_shards", write_broken)
    monkeypatch.setattr(verify, "WHOLE", 1 << 12)
    model = quantized(scheme)
    write: dict[str, Any] = {"compressed-tensors": compressed_tensors.export_compressed_tensors}
    export = write.get(format, lambda model, folder: export_safetensors(model, folder, custom_mode=format))
    if broken is None:
        export(model, tmp_path / "m")
        return
    with pytest.raises(ModelError, match="does not read back"):
        export(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()
