"""Names in files against those that transformers writes: what a model becomes in a file, and what comes back of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto

from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors, import_model_from_safetensors, language
from quark.torch.export import card, model_files, original, places
from quark.torch.files.quantize import quantize_checkpoint

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
}
#: Experts by model type: more than ten where their order would show.
EXPERTS = {
    "mixtral": {"num_local_experts": 12},
    "qwen2_moe": {"num_experts": 3, "shared_expert_intermediate_size": 16},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "phimoe": {"num_local_experts": 3},
    "llama": {},
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_tensors_in_a_file_are_those_that_transformers_writes(kind: str, tmp_path: Path) -> None:
    """By name and shape on the way out; on the way in every value returns to its place, whatever the order."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **SIZES, **EXPERTS[kind])
    )
    model.save_pretrained(tmp_path)
    file, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    form = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
    assert sorted(original.names_of(model).written(form)) == sorted(file)
    items = [original.Item({name: entry}, lambda name=name: {name: state[name]}) for name, entry in form.items()]
    written = original.outside_items(items, original.names_of(model))
    assert {name: entry for item in written for name, entry in item.form.items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in file.items()
    }
    made = {name: value for item in written for name, value in item.make().items()}
    assert all(torch.equal(made[name], value) for name, value in file.items())

    held = {name: [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])] for name in state}
    for order in (sorted(file), sorted(file, reverse=True)):
        checkpoint = SimpleNamespace(tensors=lambda order=order: ((name, file[name]) for name in order))
        found = dict(places.inside(model, held, checkpoint, "quark"))  # type: ignore[arg-type]
        assert set(found) == set(state)
        assert all(torch.equal(found[name], value) for name, value in state.items())
    lacking = SimpleNamespace(tensors=lambda: ((name, file[name]) for name in sorted(file)[1:]))
    assert len(dict(places.inside(model, held, lacking, "quark"))) == len(state) - 1  # type: ignore[arg-type]


@pytest.mark.parametrize("own", model_files.HUB_NAMES)
def test_classes_have_the_name_that_their_checkpoints_have_on_the_hub(own: str, tmp_path: Path) -> None:
    """vLLM looks for that name, which differs from the class of transformers; both are known when a folder is read."""
    outside = model_files.HUB_NAMES[own]
    assert outside != own and outside.lower() == own.lower() and not hasattr(transformers, outside)
    assert model_files.name_outside(own, None) == model_files.name_outside(own, [own]) == outside
    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("MAPPING_NAMES")]
    assert not any(outside in str(list(table.values())) for table in tables), "a registry of transformers has it"
    assert model_files.class_named(outside) is model_files.class_named(own) is getattr(transformers, own)
    assert language._kind({"architectures": [outside]}) is language._kind({"architectures": [own]})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [outside]}))
    assert card.loader_of(tmp_path) == ("AutoModelForCausalLM" if own.endswith("CausalLM") else own)


@pytest.mark.parametrize(
    ("own", "given", "outside"),
    [
        ("LlamaForCausalLM", ["LLaMAForCausalLM"], "LLaMAForCausalLM"),
        ("LlamaForCausalLM", ["MistralForCausalLM"], "LlamaForCausalLM"),
        ("LlamaForCausalLM", [1, None], "LlamaForCausalLM"),
        ("MptForCausalLM", ["MPTForCausalLM"], "MPTForCausalLM"),
        ("PhimoeForCausalLM", ["PHIMOEForCausalLM"], "PHIMOEForCausalLM"),
    ],
)
def test_a_class_is_spelled_as_its_source_spells_it(own: str, given: Any, outside: str) -> None:
    """And found again, with no table of ours."""
    assert model_files.name_outside(own, given) == outside
    assert model_files.name_inside(outside) == own
    assert model_files.name_inside("NoSuchForCausalLM") == "NoSuchForCausalLM"


def test_phimoe_under_its_name_on_the_hub_is_quantized_from_files_and_read_again(tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model("phimoe", **SIZES, **EXPERTS["phimoe"])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "s")
    told = json.loads((tmp_path / "s" / "config.json").read_text())
    (tmp_path / "s" / "config.json").write_text(json.dumps({**told, "architectures": ["PhiMoEForCausalLM"]}))
    model = language.load_model(tmp_path / "s")
    scheme = LLMTemplate.for_model(model).get_config("fp8")
    ids = [torch.arange(16)[None]]
    quantized = ModelQuantizer(scheme).quantize_model(model, ids)
    export_safetensors(quantized, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["architectures"] == ["PhiMoEForCausalLM"]
    quantize_checkpoint(tmp_path / "s", tmp_path / "f", scheme, samples=ids)
    wanted = quantized(input_ids=ids[0]).logits
    for folder in "mf":
        found = import_model_from_safetensors(None, tmp_path / folder)(input_ids=ids[0]).logits
        assert torch.equal(found, wanted)
