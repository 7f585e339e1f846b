"""Heads for multi-token prediction, which transformers leaves in the file: no command loses or changes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.torch_flow.test_folders_by_rules import blocks
from tests.torch_flow.test_other_programs import entry

from quark.cli import main
from quark.torch.language import load_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings("ignore")
HEADS = ("model.layers.61.", "model.layers.2.")  # where transformers knows it, and behind the last of this model
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}


def deepseek(folder: Path, coded: bool = False, place: str = HEADS[0]) -> dict[str, torch.Tensor]:
    """A small DeepSeek-V3 with a head at ``place``, its matrices in blocks of FP8 or float; the head."""
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=2, n_group=1, topk_group=1, num_experts_per_tok=1, vocab_size=64,
        first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, num_nextn_predict_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    head = {
        name.replace("model.layers.1.", place): torch.randn(value.shape).to(value.dtype)
        for name, value in tensors.items()
        if "layers.1." in name
    }
    head |= {f"{place}{name}.weight": torch.randn(64).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")}
    head |= {f"{place}eh_proj.weight": torch.randn(64, 128).bfloat16()}
    tensors |= head
    draw = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if coded and "proj" in name and "eh_proj" not in name]:
        parts, value = blocks(tensors[name], draw, powers=True)
        tensors |= {name: parts["weight"], f"{name}_scale_inv": parts["weight_scale_inv"]}
        head |= {name: value.bfloat16()} if name in head else {}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if coded:
        entry(folder, quantization_config=FP8)
    return head


@pytest.mark.parametrize("place", HEADS)
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("form", ["quark", "compressed-tensors"])
@pytest.mark.parametrize("command", ["quantize", "quantize-files", "convert"])
def test_they_are_kept_in_float(command: str, form: str, coded: bool, place: str, tmp_path: Path) -> None:
    head = deepseek(tmp_path / "q", coded or command == "convert", place)
    words = [] if command == "convert" else ["--scheme", "ptpc_fp8"]
    words += ["-o", str(tmp_path / "out"), "--format", form, "--for", "vllm"]
    assert main(["torch", command, str(tmp_path / "q"), *words]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name in found if name.startswith(place)} == head.keys()
    assert [name for name, value in head.items() if not torch.equal(found[name].float(), value.float())] == []
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    floats = set(said.get("exclude") or said.get("ignore"))
    assert {name.removesuffix(".weight") for name, value in head.items() if value.dim() == 2} <= floats
    assert load_model(tmp_path / "out") is not None
