"""What llama.cpp wants of a model type beyond the names of its tensors, which the ``gguf`` package maps.

Each row was compared with transformers in a real llama.cpp (``tests/torch_flow/export/test_llama_cpp.py``): the package
has names for many more architectures, but a network whose rotary embedding, norms or experts are laid out otherwise
would be read without a word and answer nonsense, so a type without a row is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quark.errors import ConfigError, ModelError, unknown


@dataclass(frozen=True)
class Architecture:
    """A model type.

    Attributes:
        name: of the architecture in GGUF.
        interleaved: rotary embedding turns neighbours of a head, so rows of queries and keys change their order.
        shifted: norms multiply with 1 + weight, and the file has the sum.
        window: llama.cpp knows its sliding window.
        activations: values of ``hidden_act`` that llama.cpp computes.
        expert_length: key of the configuration with the width of an expert, where it is written.
        fixed: what llama.cpp takes for granted: values of the configuration, where it has the key.
        period: every so many layers one sees all tokens, the others a window; 0: nothing is taken for granted.
    """

    name: str
    interleaved: bool = False
    shifted: bool = False
    window: bool = False
    activations: tuple[str, ...] = ("silu",)
    expert_length: str = ""
    fixed: Mapping[str, object] = field(default_factory=dict)
    period: int = 0


GELU = ("gelu_pytorch_tanh",)
ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),
    "mistral": Architecture("llama", interleaved=True),
    "mixtral": Architecture("llama", interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen2_moe": Architecture("qwen2moe", expert_length="moe_intermediate_size", fixed={"norm_topk_prob": False}),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe", expert_length="moe_intermediate_size", fixed={"norm_topk_prob": True}),
    "gemma": Architecture("gemma", shifted=True, activations=GELU),
    "gemma2": Architecture("gemma2", shifted=True, window=True, activations=GELU, period=2),
    "gemma3_text": Architecture("gemma3", shifted=True, window=True, activations=GELU, period=6),
    "phi3": Architecture("phi3", window=True),
    "gpt_oss": Architecture("gpt-oss", window=True, expert_length="intermediate_size", period=2),
    "granite": Architecture("granite", interleaved=True),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", fixed={"norm_topk_prob": False, "clip_qkv": None}),
    "stablelm": Architecture("stablelm"),
    "starcoder2": Architecture("starcoder2", activations=GELU),
    "smollm3": Architecture("smollm3", interleaved=True),
}
# key of config.json → method of GGUFWriter; the first key that is there counts
NUMBERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("max_position_embeddings",), "add_context_length"),
    (("hidden_size",), "add_embedding_length"),
    (("num_hidden_layers",), "add_block_count"),
    (("intermediate_size",), "add_feed_forward_length"),
    (("num_attention_heads",), "add_head_count"),
    (("num_key_value_heads", "num_attention_heads"), "add_head_count_kv"),
    (("rms_norm_eps",), "add_layer_norm_rms_eps"),
    (("layer_norm_eps", "norm_epsilon"), "add_layer_norm_eps"),
    (("vocab_size",), "add_vocab_size"),
    (("num_local_experts", "num_experts"), "add_expert_count"),
    (("num_experts_per_tok",), "add_expert_used_count"),
    (("shared_expert_intermediate_size",), "add_expert_shared_feed_forward_length"),
    (("attn_logit_softcapping",), "add_attn_logit_softcapping"),
    (("final_logit_softcapping",), "add_final_logit_softcapping"),
    (("embedding_multiplier",), "add_embedding_scale"),
    (("residual_multiplier",), "add_residual_scale"),
    (("attention_multiplier",), "add_attention_scale"),
    (("logits_scaling",), "add_logit_scale"),
    (("use_parallel_residual",), "add_parallel_residual"),
)
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def architecture_of(model_type: str) -> Architecture:
    """The row of a model type.

    Raises:
        ConfigError: none.
    """
    if model_type not in ARCHITECTURES:
        raise ConfigError(unknown("model_type", model_type, ARCHITECTURES))
    return ARCHITECTURES[model_type]


def head_size(config: Any) -> int:
    """Numbers in a head of attention."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_of(config: Any) -> dict[str, Any]:
    """What the configuration says about rotary embedding; of several kinds of layers that of the full ones."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in found:
        found = dict(found["full_attention"])
    return {"rope_theta": getattr(config, "rope_theta", 10000.0), **found}


def rotated_size(config: Any) -> int:
    """Numbers of a head that are rotated."""
    part = rope_of(config).get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return int(head_size(config) * (1.0 if part is None else part))


def check_network(config: Any, row: Architecture) -> None:
    """What llama.cpp computes is what the model computes.

    Raises:
        ModelError: an activation function or a rotary embedding that it does not have for this architecture.
    """
    gate = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", row.activations[0])
    if gate not in row.activations:
        raise ModelError(f"hidden_act is {gate!r}, and llama.cpp computes {row.activations[0]!r} in {row.name!r}")
    if row.interleaved and rotated_size(config) != head_size(config):
        raise ModelError(f"a part of each head is rotated, which llama.cpp does not do in {row.name!r}")
    for key, wanted in row.fixed.items():
        if getattr(config, key, wanted) != wanted:
            raise ModelError(
                f"{key} is {getattr(config, key)!r}, and llama.cpp takes {wanted!r} for granted in {row.name!r}"
            )
    check_layers(config, row)


def check_layers(config: Any, row: Architecture) -> None:
    """Layers that differ from each other differ as llama.cpp has it.

    Raises:
        ModelError: they do not.
    """
    layers, name = range(config.num_hidden_layers), row.name
    kinds = getattr(config, "layer_types", None) or []
    full = [(number + 1) % row.period == 0 for number in layers] if row.period else []
    if row.period and [kind == "full_attention" for kind in kinds] != full:
        raise ModelError(
            f"layer_types is {kinds}, and in {name!r} llama.cpp lets every layer number {row.period} see all"
        )
    rotated = list(getattr(config, "no_rope_layers", None) or [])
    if name == "smollm3" and rotated != [int((number + 1) % 4 != 0) for number in layers]:
        raise ModelError(f"no_rope_layers is {rotated}, and in {name!r} llama.cpp rotates all but every fourth layer")
    if name == "olmoe" and config.num_key_value_heads != config.num_attention_heads:
        raise ModelError(f"num_key_value_heads is not num_attention_heads, which llama.cpp needs in {name!r}")
    scalar, heads = getattr(config, "query_pre_attn_scalar", None), config.num_attention_heads
    large = {"gemma2": 46, "gemma3": 62}.get(name) == config.num_hidden_layers  # those of 27 B
    if scalar is not None and scalar != (config.hidden_size / heads if large else head_size(config)):
        raise ModelError(f"query_pre_attn_scalar is {scalar}, which llama.cpp does not have in {name!r} of this size")
    local = (getattr(config, "rope_parameters", None) or {}).get("sliding_attention")
    if name == "gemma3" and local and (local.get("rope_theta"), local.get("rope_type", "default")) != (1e4, "default"):
        raise ModelError(
            f"the rotary embedding of sliding layers is {local}; llama.cpp has rope_theta 10000 in {name!r}"
        )


def slides(config: Any) -> bool:
    """Whether some layers see a window only."""
    kinds = getattr(config, "layer_types", None)
    told = any("sliding" in kind for kind in kinds) if kinds else getattr(config, "use_sliding_window", True)
    return bool(getattr(config, "sliding_window", None)) and bool(told)


def add_numbers(writer: Any, config: Any, row: Architecture) -> None:
    """The numbers of a network."""
    for keys, method in NUMBERS:
        value = next((found for key in keys if (found := getattr(config, key, None)) is not None), None)
        if value is not None:
            getattr(writer, method)(value)
    head = head_size(config)
    writer.add_rope_dimension_count(rotated_size(config))
    writer.add_key_length(head)
    writer.add_value_length(head)
    if row.expert_length:
        writer.add_expert_feed_forward_length(getattr(config, row.expert_length))
    if row.window and slides(config):
        writer.add_sliding_window(config.sliding_window)
    add_rope(writer, config)


def add_rope(writer: Any, config: Any) -> None:
    """The rotary embedding.

    Raises:
        ModelError: a scaling that the file cannot say.
    """
    import gguf

    rope = rope_of(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "yarn":
        add_yarn(writer, rope)
    elif kind not in ("default", "llama3"):
        known = "'default', 'linear', 'yarn' and 'llama3'"
        raise ModelError(f"the rotary embedding is scaled by {kind!r}; {known} can be written")


def add_yarn(writer: Any, rope: dict[str, Any]) -> None:
    """YaRN.

    Raises:
        ModelError: a setting that llama.cpp does not know.
    """
    import gguf

    if strange := [key for key in ("mscale", "mscale_all_dim", "attention_factor") if rope.get(key) is not None]:
        raise ModelError(f"the rotary embedding is scaled by 'yarn' with {strange[0]}, which cannot be written")
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(float(rope["factor"]))
    writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
    for key, method in (
        ("beta_fast", "add_rope_scaling_yarn_beta_fast"),
        ("beta_slow", "add_rope_scaling_yarn_beta_slow"),
    ):
        if rope.get(key) is not None:
            getattr(writer, method)(float(rope[key]))


def rope_factors(config: Any) -> np.ndarray | None:
    """What frequencies are divided by, one a pair (Llama 3.1); None: they are not."""
    rope = rope_of(config)
    if rope.get("rope_type") != "llama3":
        return None
    factor, low, high, length = (float(rope[key]) for key in LLAMA3)
    size = rotated_size(config)
    frequency = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((length * frequency / (2 * np.pi) - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def turned_rows(name: str, config: Any, row: Architecture) -> Callable[[np.ndarray], np.ndarray]:
    """What happens to the rows of a tensor: queries and keys interleave the halves of each head."""
    if not row.interleaved or not (".q_proj." in name or ".k_proj." in name):
        return lambda x: x
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    return lambda x: x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
