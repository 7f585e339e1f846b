"""Every model type of transformers' registry as a small random model: found there, by no list of ours.

A configuration with its class's own defaults is made small entry by entry, by what its names mean (sizes, counts of
layers, heads and experts, token ids). The weights are normal, wide enough that every layer moves the logits: norms near
one, and matrices that keep the size of what passes.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

VOCABULARY = 128
HIDDEN, INNER, HEADS, KEYS, HEAD = 64, 128, 4, 2, 16
LAYERS = 2
EXPERTS = 4
TASKS = (  # attributes of transformers.models.auto.modeling_auto, in the order in which a model type is looked up
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
RULES: tuple[tuple[str, int], ...] = (  # last words of a name; the first row that fits decides
    ("vocab_size num_embeddings_vocab vocab_size_per_layer_input", VOCABULARY),
    ("rotary_dim", 8),
    ("experts_per_tok experts_per_token selected_experts moe_topk moe_k top_k_experts num_active_experts", 2),
    ("routed_experts local_experts num_experts n_experts", EXPERTS),
    ("shared_experts shared_expert", 1),
    ("n_group topk_group n_groups expert_group num_groups", 1),
    ("first_k_dense_replace num_dense_layers layer_start_index layers_start mlp_only_layers_count", 1),
    ("linear_num_key_heads linear_num_value_heads", HEADS),
    ("num_key_value_heads num_kv_heads multi_query_group_num n_kv_heads kv_n_heads", KEYS),
    ("num_heads attention_heads n_heads n_head nhead", HEADS),
    ("qk_nope_head_dim qk_rope_head_dim v_head_dim qk_head_dim head_dim d_head d_kv", HEAD),
    ("attention_head_size attention_head_dim kv_channels", HEAD),
    ("lora_rank low_rank low_rank_dim time_step_rank dt_rank", 32),
    ("hidden_layers num_layers n_layers n_layer encoder_layers decoder_layers depth", LAYERS),
    ("intermediate_size ffn_dim n_inner inner_dim ffn_hidden_size d_ff d_inner mlp_dim dim_feedforward", INNER),
    ("expert_hidden_size mlp_hidden_size", INNER),
    ("hidden_size d_model n_embd hidden_dim embed_dim embed_dims emb_dim word_embed_proj_dim embedding_size", HIDDEN),
    ("lru_width projection_dim project_dim width dim", HIDDEN),
    ("state_size d_state", 16),
    ("max_position_embeddings n_positions max_seq_len max_sequence_length n_ctx seq_length", 256),
    ("max_source_positions max_target_positions", 256),
    ("chunk_size sliding_window attention_window window_size index_topk block_size", 16),
    ("image_size img_size", 32),
    ("patch_size", 8),
)
PATTERNS = [(re.compile(rf"(.*_)?({words.replace(' ', '|')})"), value) for words, value in RULES]


def model_types() -> Iterator[tuple[str, str]]:
    """(model type, name of the class) of everything that the registry can make, each type once."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    tables = [getattr(modeling_auto, name) for name in TASKS]
    for model_type in CONFIG_MAPPING_NAMES:
        found = next((table[model_type] for table in tables if model_type in table), None)
        if found is not None:
            yield model_type, found if isinstance(found, str) else found[0]


def rule(name: str) -> int | None:
    """What a rule makes of an entry; None: it stays."""
    return next((value for pattern, value in PATTERNS if pattern.fullmatch(name)), None)


def shrunk(values: dict[str, Any], sees: bool = False) -> dict[str, Any]:
    """A configuration as a dictionary, made small; ``sees``: it is part of one with a vision tower."""
    sees = sees or "vision_config" in values
    small = {name: entry(name, value, sees) for name, value in values.items() if name not in DERIVED}
    for name, value in ABSENT.items():
        if name in small and small[name] is None:
            small[name] = value
    for name, value in small.items():
        if isinstance(value, dict) and name.startswith("rope_") and (sees or "mrope_section" in value):
            half = int((small.get("head_dim") or HEAD) * value.get("partial_rotary_factor", 1.0)) // 2
            small[name] = {**value, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    if "kv_lora_rank" in small and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    for heads, size, factor in STATES:
        if heads in small and size in small and factor in small:
            small[size] = int(small[factor]) * small.get("hidden_size", HIDDEN) // small[heads]
            small.update({name: small[factor] * HIDDEN for name in ("mamba_d_ssm",) if name in small})
    small.update({name: value for name, value in PERIODS.items() if name in small})
    return clipped(small)


DERIVED = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices", "transformers_version")
ABSENT = {
    "head_dim": HEAD, "num_key_value_heads": KEYS, "n_routed_experts": EXPERTS, "vocab_size": VOCABULARY,
    "prediction_length": 4, "pad_token_id": 0,
    "num_experts_per_tok": 2, "attn_layer_indices": [1],
}  # fmt: skip
STATES = (  # heads x size of a head is the expanded width
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "mamba_expand"),
    ("num_heads", "head_dim", "expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
)
PERIODS = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attention_types": [[["global", "local"], 1]],
}


def entry(name: str, value: Any, sees: bool) -> Any:
    """One entry made small."""
    if isinstance(value, dict) and "model_type" in value:
        return shrunk(value, sees)
    if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
        return {key: item for key, item in value.items() if int(key) < LAYERS}
    wanted = rule(name)
    if type(value) is int and wanted is not None:
        return min(value, wanted) if value > 0 else value
    if (type(value) is int and name.endswith("token_id")) or name.endswith("_token_index"):
        return value if value is None or value < VOCABULARY else value % 16 + 64
    if isinstance(value, list) and wanted is not None and all(type(item) is int for item in value):
        return [min(item, wanted) for item in value]
    return value


def clipped(values: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry per layer: one of each kind that there is, and as many layers."""
    listed = next((name for name in ("layer_types", "block_types", "layers_block_type") if values.get(name)), None)
    counts = [name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values]
    if listed is None or not counts:
        return values
    kinds = values[listed]
    distinct = list(dict.fromkeys(kinds))
    kept = distinct if len(distinct) >= LAYERS else [*distinct, *distinct][:LAYERS]
    for name, value in values.items():
        if isinstance(value, list) and len(value) == len(kinds):
            values[name] = value[: len(kept)]
    return {**values, listed: kept, **dict.fromkeys(counts, len(kept))}


def tiny_config(model_type: str, class_name: str, more: dict[str, Any]) -> Any:
    """The configuration of a model type, made small."""
    import transformers
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    own = getattr(transformers, class_name).config_class
    cls = cls if own is None or issubclass(cls, own) else own  # the language model of a larger one has its own
    values = shrunk(cls().to_dict())
    for name in ("model_type", "transformers_version", "architectures", "_name_or_path", "dtype"):
        values.pop(name, None)
    for name in EVERYWHERE:
        values = everywhere(values, name, more[name]) if name in more else values
    return cls(**{**copy.deepcopy(values), **{key: value for key, value in more.items() if key not in EVERYWHERE}})


def everywhere(values: dict[str, Any], name: str, wanted: int) -> dict[str, Any]:
    """A configuration with an entry changed in all of its parts."""
    made = {key: everywhere(value, name, wanted) if isinstance(value, dict) else value for key, value in values.items()}
    return {**made, name: wanted} if name in made else made


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal but for what kernels round otherwise from call to call."""
    return float((found - wanted).norm()) <= 1e-4 * float(wanted.norm())


def again(model: Any) -> nn.Module:
    """The float model that transformers reads where it wrote this one."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded: nn.Module = type(model).from_pretrained(folder, dtype=torch.float32)
        return loaded


def tiny_model(model_type: str, class_name: str, checked: bool = False) -> nn.Module:
    """A small random model that answers, in ``eval()``; ``checked``: transformers reads its float files as it was.

    Raises:
        ValueError: none of the variants that are tried is a model that answers.
    """
    from huggingface_hub import errors

    reasons = []
    for more in VARIANTS:
        try:
            model = made(model_type, class_name, more)
            inputs = inputs_of(model)
            found = answer(model, inputs)
            if bool(found.isfinite().all()) and (not checked or near(answer(again(model), inputs), found)):
                return model
            reasons.append("not finite, or another one when transformers reads the float model that it wrote")
        except (*FAULTS, errors.StrictDataclassError) as error:
            reasons.append(f"{type(error).__name__}: {str(error)[:200]}")
    raise ValueError(reasons[0])


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    {"num_hidden_layers": 3},
    {"num_key_value_heads": HEADS},  # in all parts: conversions that cut queries, keys and values into equal parts
    {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,  # the last layers of both kinds read the caches of the first
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": INNER,
    },
)
EVERYWHERE = ("num_key_value_heads",)
FAULTS = (ValueError, TypeError, AttributeError, RuntimeError, IndexError, KeyError, ImportError)


def made(model_type: str, class_name: str, more: dict[str, Any]) -> nn.Module:
    """A model, whether it answers or not."""
    import transformers

    config = tiny_config(model_type, class_name, more)
    torch.manual_seed(0)
    with torch.device("meta"):
        count = sum(value.numel() for value in getattr(transformers, class_name)(config).parameters())
    if count > 20_000_000:
        raise ValueError(f"{count} parameters")
    model: nn.Module = getattr(transformers, class_name)(config).eval().float()
    stir(model)
    return model


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """Random values with which every layer matters."""
    generator = torch.Generator().manual_seed(1)
    for value in model.parameters():  # rows of padding are zeroed below, as loading does
        if value.dim() > 1 and value.is_floating_point():
            fan = value.shape[-1] if value.dim() == 2 else value[0].numel() if value.dim() > 3 else value.shape[-1]
            value.copy_(torch.randn(value.shape, generator=generator) * max(fan, 1) ** -0.5)
        elif value.dim() == 1 and value.is_floating_point() and value.numel():
            value.add_(torch.randn(value.shape, generator=generator).to(value.dtype) * 0.1)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """What a model is asked: tokens, or pixels, or both where it is an encoder and a decoder."""
    generator = torch.Generator().manual_seed(2)
    name = getattr(model, "main_input_name", "input_ids")
    ids = torch.randint(3, 60, (2, 24), generator=generator)
    if name == "input_ids":
        found = {"input_ids": ids}
        return {**found, "decoder_input_ids": ids[:, :12]} if model.config.is_encoder_decoder else found
    if name == "pixel_values":
        config = getattr(model.config, "vision_config", model.config)
        size = getattr(config, "image_size", 32) or 32
        height, width = (size, size) if isinstance(size, int) else size[:2]
        channels = getattr(config, "num_channels", 3) or 3
        return {"pixel_values": torch.randn((2, channels, height, width), generator=generator)}
    raise ValueError(f"main input {name!r}")


def answer(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first floating tensor of a model's output, [samples, ...]."""
    torch.manual_seed(3)  # some models draw masks
    with torch.no_grad():
        output: Any = model(**inputs)
    values = list(output.values()) if hasattr(output, "values") else list(output)
    known = dict(output) if hasattr(output, "items") else {}
    names = [name for name in ("logits", "last_hidden_state") if known.get(name) is not None]
    chosen = known[names[0]] if names else next(value for value in values if isinstance(value, torch.Tensor))
    return chosen.detach().float()
