"""A config.json that does not fit its tensors: every number of it changed, refused by name or really harmless."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.consumers import tiny

from quark.errors import ModelError
from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors
from quark.torch.export.checkpoint import read_checkpoint
from quark.torch.files.named import misspelt
from quark.torch.files.quantize import quantize_checkpoint
from quark.torch.files.skeleton import read_skeleton
from quark.torch.forecast import forecast
from quark.torch.language import load_model, load_tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gemma3_text": {**SIZES, "head_dim": 8, "sliding_window": 8},
}
IDS = (torch.arange(24) * 7 % 64)[None]
#: The fields that say how large tensors are, or how many: the files know better.
KNOWN = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "num_key_value_heads")


def folder_of(kind: str, folder: Path) -> Any:
    """A tiny model of a type in a folder; what its config.json holds."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(4 if value.dim() > 1 else 1)
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def numbers(node: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from numbers(value, (*before, name))
        elif isinstance(value, int):
            yield (*before, name), value


def values_for(old: int) -> list[Any]:
    return [not old, "text", None, 2] if isinstance(old, bool) else [0, -1, 2 * old, 1 << 40, "text", None]


def put(folder: Path, config: Any, path: tuple[str, ...], value: Any) -> None:
    changed = json.loads(json.dumps(config))
    node = changed
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(changed))


def refused(folder: Path, action: Any) -> bool:
    """Whether an action is refused, in a sentence that names the folder."""
    try:
        action()
    except ModelError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
        return True
    return False


@torch.no_grad()
def answers(folder: Path) -> torch.Tensor:
    return load_model(folder)(IDS).logits


@pytest.mark.parametrize("name", KNOWN)
def test_a_size_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    config = folder_of("llama", tmp_path)
    for value in (0, -1, 2 * config[name], 1 << 40):
        put(tmp_path, config, (name,), value)
        assert refused(tmp_path, lambda: load_model(tmp_path)), (name, value)
        assert refused(tmp_path, lambda: read_skeleton(read_checkpoint(tmp_path))), (name, value)


@pytest.mark.parametrize("name", ["attention_bias", "mlp_bias", "tie_word_embeddings"])
def test_a_switch_that_does_not_fit_is_refused_or_harmless(name: str, tmp_path: Path) -> None:
    config = folder_of("llama", tmp_path)
    wanted = answers(tmp_path)
    put(tmp_path, config, (name,), not config[name])
    if not refused(tmp_path, lambda: load_model(tmp_path)):
        assert torch.equal(answers(tmp_path), wanted)
    elif name != "tie_word_embeddings":
        assert refused(tmp_path, lambda: read_skeleton(read_checkpoint(tmp_path)))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("gpt2", "tie_word_embeddings", False), ("gpt2", "n_head", -1), ("mixtral", "num_experts_per_tok", 0),
     ("mixtral", "num_experts_per_tok", 5), ("mixtral", "num_local_experts", 0),
     ("mixtral", "num_local_experts", 1 << 40), ("llama", "max_position_embeddings", 0),
     ("llama", "rms_norm_eps", -1.0), ("llama", "rope_parameters.rope_theta", 0.0),
     ("llama", "rope_parameters.rope_theta", float("nan"))],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused_by_both_readers(kind: str, name: str, value: float, tmp_path: Path) -> None:
    put(tmp_path, folder_of(kind, tmp_path), tuple(name.split(".")), value)
    assert refused(tmp_path, lambda: load_model(tmp_path))
    assert refused(tmp_path, lambda: read_skeleton(read_checkpoint(tmp_path)))


@pytest.mark.parametrize("value", [32000, "absent", None])
def test_a_padding_token_outside_of_the_vocabulary_is_named(value: Any, tmp_path: Path) -> None:
    """Phi-3's class has 32000 of its own, whatever the vocabulary."""
    made = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.Phi3Config(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2, **made)  # fmt: skip
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    entries = json.loads(path.read_text()) | {"pad_token_id": value}
    path.write_text(json.dumps({name: one for name, one in entries.items() if one != "absent"}))
    for read in (load_model, lambda folder: read_skeleton(read_checkpoint(folder))):
        with (
            nullcontext()
            if value is None
            else pytest.raises(ModelError, match=r"vocab_size is 64.*pad_token_id, .* null")
        ):
            read(tmp_path)


@pytest.mark.parametrize("value", ["64", 64.0, -1, 7])
def test_a_value_that_its_class_refuses_is_refused_by_what_reads_tokenizers(value: Any, tmp_path: Path) -> None:
    put(tmp_path, folder_of("llama", tmp_path), ("hidden_size",), value)
    with pytest.raises(ModelError, match="describes no model that"):
        load_tokenizer(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_number_is_refused_or_does_what_it_says(kind: str, tmp_path: Path) -> None:
    """No traceback of another library, whatever a number becomes; what the files' reader refuses the other does too."""
    config = folder_of(kind, tmp_path)
    for path, old in numbers(config):
        for value in values_for(old):
            put(tmp_path, config, path, value)
            loaded = refused(tmp_path, lambda: load_model(tmp_path))
            read = refused(tmp_path, lambda: read_skeleton(read_checkpoint(tmp_path)))
            assert loaded or not read, (path, value)


def change(folder: Path, name: str, value: torch.Tensor) -> None:
    """Another tensor in place of ``name`` in the files of a folder, or one more."""
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: value}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama", "model.layers.1.mlp.up_proj.weight"), ("llama", "model.norm.weight"),
     ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w2.weight"), ("gpt2", "transformer.h.0.mlp.c_fc.bias")],
)  # fmt: skip
def test_integers_in_the_place_of_floats_are_refused_by_both_readers(
    kind: str, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """They would be codes, of nobody knows what; as floats they are other weights."""
    folder_of(kind, tmp_path)
    change(tmp_path, name, (load_file(tmp_path / "model.safetensors")[name] * 100).to(dtype))
    for read in (load_model, lambda folder: read_skeleton(read_checkpoint(folder))):
        with pytest.raises(ModelError, match=rf"{re.escape(name)}' is u?int\d+, and .*config.json"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.other.weight", "model.layers.2.mlp.up_proj.weight"])
def test_a_tensor_of_a_layer_that_the_model_lacks_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    folder_of("llama", tmp_path)
    change(tmp_path, name, torch.ones(32, 32))
    config = LLMTemplate.get("llama").get_config("int8_wo_per_channel")
    for read in (load_model, lambda folder: quantize_checkpoint(folder, tmp_path / "made", config)):
        with pytest.raises(ModelError, match=f"{re.escape(name)}', for which .*config.json' has no layer"):
            read(tmp_path)
    assert not (tmp_path / "made").exists()


def renamed_folder(kind: str, cls: str, folder: Path) -> Any:
    """A tiny model whose tensors have other names in files, or are made of others."""
    config = transformers.AutoConfig.for_model(kind, **SIZES, image_size=16, patch_size=8, pad_token_id=0)
    model = getattr(transformers, cls)(config)
    model.save_pretrained(folder)
    return model


def test_a_layer_too_many_is_refused_where_transformers_changes_names(tmp_path: Path) -> None:
    """Files of ViT say vit.encoder.layer.1.attention.attention.key; its class says vit.layers.1.attention.k_proj."""
    renamed_folder("vit", "ViTForImageClassification", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 1}))
    config = LLMTemplate.get("llama").get_config("int8_wo_per_channel")
    for work in (lambda: quantize_checkpoint(tmp_path, tmp_path / "made", config),
                 lambda: forecast(read_checkpoint(tmp_path), config)):  # fmt: skip
        with pytest.raises(ModelError, match=r"vit.encoder.layer.1.*', for which .*config.json' has no layer"):
            work()


def made_behind(folder: Path) -> dict[str, Any]:
    """A DeepSeek-V3 of two layers, the second one of experts; its config.json, which says that one head follows."""
    sizes = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
    experts = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, **sizes, **experts, moe_intermediate_size=16, first_k_dense_replace=1,
        num_nextn_predict_layers=1,
    )  # fmt: skip
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("a layer less", r"'model.layers.1.input_layernorm.weight', for which .*config.json' has no layer"),
        ("a layer less, a head", None),
        ("a weight less", r"lacks the tensor 'model.layers.0.mlp.down_proj.weight'"),
    ],
)
def test_a_layer_is_no_head_and_nothing_is_made_of_what_is_not_there(
    change: str, sentence: str | None, tmp_path: Path
) -> None:
    """DeepSeek-V3 has heads behind its layers, and experts that are put together while they are loaded."""
    found, file = made_behind(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    if change == "a weight less":
        del tensors["model.layers.0.mlp.down_proj.weight"]
    else:
        (tmp_path / "config.json").write_text(json.dumps({**found, "num_hidden_layers": 1}))
    if change.endswith("head"):
        tensors["model.layers.1.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, file, {"format": "pt"})
    config = LLMTemplate.get("deepseek_v3").get_config("int8_wo_per_channel")
    for work in (lambda: load_model(tmp_path), lambda: forecast(read_checkpoint(tmp_path), config),
                 lambda: quantize_checkpoint(tmp_path, tmp_path / "made", config)):  # fmt: skip
        with nullcontext() if sentence is None else pytest.raises(ModelError, match=sentence):
            work()


@pytest.mark.parametrize("kind, base", [("gpt2", "transformer."), ("llama", "model."), ("mixtral", "model.")])
def test_names_of_the_model_inside_are_read_and_written_in_full(kind: str, base: str, tmp_path: Path) -> None:
    """As GPT-2 was published: without ``transformer.``; and as old Llamas were, with a table in every layer."""
    folder_of(kind, tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = {name.removeprefix(base): value for name, value in load_file(file).items()}
    if kind != "gpt2":
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)
    save_file(tensors, file, {"format": "pt"})
    config = LLMTemplate.get(kind).get_config("int8_wo_per_channel")
    with torch.no_grad():
        made = ModelQuantizer(config).quantize_model(load_model(tmp_path / "source"))
        export_safetensors(made, tmp_path / "memory")
    quantize_checkpoint(tmp_path / "source", tmp_path / "files", config)
    wanted, found = (load_file(tmp_path / one / "model.safetensors") for one in ("memory", "files"))
    assert {name for name in found if "inv_freq" not in name} == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert torch.equal(answers(tmp_path / "files"), made(IDS).logits)


@pytest.mark.parametrize(
    "kind, source, lacking",
    [
        ("inkling2_text", "experts.w13_weight", "experts.0.gate_proj.weight"),  # of whose halves experts are made
        ("camembert", "word_embeddings.weight", "lm_head.decoder.weight"),  # which the head shares
        ("nemotron_h_omni", "embeddings.weight", "embeddings.weight"),  # that gives others first values
    ],
)
def test_what_is_made_of_others_is_lacking_without_them(kind: str, source: str, lacking: str, tmp_path: Path) -> None:
    tiny.tiny_model(kind, dict(tiny.model_types())[kind]).save_pretrained(tmp_path)
    read_skeleton(read_checkpoint(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if source not in k}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"lacks the tensor '.*{lacking}'"):
        read_skeleton(read_checkpoint(tmp_path))


def test_a_plan_knows_weights_that_transformers_makes_of_others(tmp_path: Path) -> None:
    model = renamed_folder("jina_embeddings_v3", "JinaEmbeddingsV3Model", tmp_path)
    config = LLMTemplate.for_model(model).get_config("int8_wo_per_channel")
    with pytest.raises(ModelError, match="transformers makes it of other tensors"):
        quantize_checkpoint(tmp_path, tmp_path / "made", config)
    found = forecast(read_checkpoint(tmp_path), config)
    assert not found.by_files and found.float_bytes == sum(4 * value.numel() for value in model.parameters())
    with torch.no_grad():
        made = ModelQuantizer(config).quantize_model(model, [{"input_ids": IDS[:, :8]}])
    export_safetensors(made, tmp_path / "made")
    tensors = load_file(tmp_path / "made" / "model.safetensors").values()
    assert found.needs.written == sum(value.numel() * value.element_size() for value in tensors)


def test_other_tensors_that_the_model_lacks_are_left_behind_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does: a result that holds them was read by no program of ours."""
    folder_of("llama", tmp_path)
    change(tmp_path, "unknown.bias", torch.ones(4))
    quantize_checkpoint(tmp_path, tmp_path / "made", LLMTemplate.get("llama").get_config("int8_wo_per_channel"))
    assert "LlamaForCausalLM has no place for 1 tensors" in caplog.text and "'unknown.bias'" in caplog.text
    quantized = ModelQuantizer(LLMTemplate.get("llama").get_config("int8_wo_per_channel"))
    assert torch.equal(answers(tmp_path / "made"), quantized.quantize_model(load_model(tmp_path))(IDS).logits)


def test_what_transformers_passes_over_by_rule_stays_as_it_is(tmp_path: Path) -> None:
    """GPT-NeoX passes over masks (``attention.bias``); a matrix of such a name was taken for a layer, and quantized."""
    config = transformers.GPTNeoXConfig(**{**SIZES, "num_key_value_heads": 4})
    transformers.GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "source")
    name, value = "gpt_neox.layers.0.attention.bias.weight", torch.randn(32, 32)
    change(tmp_path / "source", name, value)
    scheme = LLMTemplate.for_model(load_model(tmp_path / "source")).get_config("int8_wo_per_channel")
    quantize_checkpoint(tmp_path / "source", tmp_path / "made", scheme)
    found = load_file(tmp_path / "made" / "model.safetensors")
    assert torch.equal(found[name], value) and not any(key.startswith(f"{name}_") for key in found)
    assert load_model(tmp_path / "made")(IDS).logits.isfinite().all()


BAD_NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "a type nobody has": ({"model_type": "lama"}, "model_type is 'lama', .*Did you mean 'llama'"),
    "a type that is no text": ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
    "no type": ({"model_type": None}, "names no model_type. LlamaForCausalLM takes 'llama'"),
    "another class": ({"architectures": ["Qwen2ForCausalLM"]}, "two models: .*'llama', .*'Qwen2ForCausalLM'.*'qwen2'"),
    "a slip": ({"architectures": ["LlamaForCasualLM"]}, r"\['LlamaForCasualLM'\], .*mean 'LlamaForCausalLM'\?"),
    "another type": ({"model_type": "qwen2"}, "two models: .*'qwen2', .*'LlamaForCausalLM'.*Qwen2ForCausalLM"),
    "no class": ({"architectures": None}, r"names no architectures, .*\['LlamaForCausalLM'\] is usual"),
    "no class, no text": ({"architectures": None, "model_type": "vit"}, "no architectures, .*has ViTForImageClass"),
    "no floats": ({"dtype": "int4"}, r"dtype is 'int4', in which no model computes. Allowed: float32, float16, bf"),
    "no type of numbers": ({"torch_dtype": 3, "dtype": None}, "torch_dtype is 3, in which no model computes"),
}


@pytest.mark.parametrize("changes, sentence", BAD_NAMES.values(), ids=BAD_NAMES)
def test_names_of_two_models_or_none_are_refused_by_all_that_takes_a_folder(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """evaluate and sensitivity load what plan and quantize-files read the headers of."""
    found = folder_of("llama", tmp_path)
    config = LLMTemplate.get("llama").get_config("int8_wo_per_channel")
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in {**found, **changes}.items() if v is not None}))
    for work in (load_model, lambda folder: forecast(read_checkpoint(folder), config),
                 lambda folder: quantize_checkpoint(folder, tmp_path / "made", config)):  # fmt: skip
        with pytest.raises(ModelError, match=sentence):
            work(tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_class_that_transformers_lacks_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other programs may have it: vLLM has heads that predict tokens by names of their own."""
    found = folder_of("llama", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**found, "architectures": ["LlamaForCausalLMEagle3"]}))
    assert load_model(tmp_path)(IDS).logits.isfinite().all()
    assert "'LlamaForCausalLMEagle3', which transformers does not have. Did you mean 'LlamaForCausalLM'?" in caplog.text


@pytest.mark.parametrize(
    "name, slip",
    [
        *((name, True) for name in ("LlamaForCausalLN", "LlamaForCasualLM", "LamaForCausalLM", "LlamaForrCausalLM")),
        *((name, False) for name in ("LLaMAForCausalLM", "LlamaForCausalLM2", "EagleLlamaForCausalLM", "OfMine")),
    ],
)
def test_a_slip_in_the_name_of_a_class_is_refused(name: str, slip: bool) -> None:
    assert (misspelt(name, "llama") == "LlamaForCausalLM") is slip and (slip or misspelt(name, "llama") is None)


@pytest.mark.slow
def test_every_pair_of_the_registry_is_one_model() -> None:
    from transformers.models.auto import modeling_auto

    from quark.torch.files.named import check_named

    tables = [table for name, table in vars(modeling_auto).items() if re.fullmatch("MODEL_.*MAPPING_NAMES", name)]
    pairs = {(kind, one) for table in tables for kind, names in table.items()
             for one in ([names] if isinstance(names, str) else names)}  # fmt: skip
    assert len(pairs) > 1000
    for kind, name in sorted(pairs):
        check_named(Path(), {"model_type": kind, "architectures": [name]})


@pytest.mark.parametrize("kind", ["deepseek_v3", "axk1", "llama"])
def test_a_size_of_heads_that_no_tensor_shows(kind: str, tmp_path: Path) -> None:
    """DeepSeek's is that of the rotated part: no tensor has it, and with another the model does not run."""
    model: Any = tiny.made(kind, dict(tiny.model_types())[kind], {})
    folder = tmp_path / "m"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    read_skeleton(read_checkpoint(folder))
    load_model(folder)
    wrong = r"the tensor" if kind == "llama" else r"head_dim is 24, with which the layers do not fit.*makes \d+ of"
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": 24}))
    for read in (load_model, lambda folder: read_skeleton(read_checkpoint(folder))):
        with pytest.raises(ModelError, match=wrong):
            read(folder)


@pytest.mark.parametrize("text", ["{not json", "[1, 2]", "null"])
def test_a_broken_generation_config(text: str, tmp_path: Path) -> None:
    """transformers names ``config.json``, or says nothing and takes another; file by file it was copied."""
    folder_of("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    for read in (load_model, lambda folder: read_skeleton(read_checkpoint(folder))):
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            read(tmp_path)
