"""The architectures that a GGUF file is written for, one row a model type, and the numbers of a configuration.

Each row was compared with transformers in a real llama.cpp (``tests/consumers/llama_table.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from quark.dataclass import dataclass


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
        gating: how scores of experts are made, where llama.cpp is told: a name of ``gguf.ExpertGatingFuncType``.
        partial: a part of each head may be rotated.
        divisors: llama.cpp reads what the frequencies of rotary embedding are divided by (Llama 3.1).
        yarn_unit: what llama.cpp is told for an ``mscale_all_dim`` of 1; 0: it has none.
        numbers: further keys of the configuration, and their method of ``GGUFWriter``.
        constants: methods of ``GGUFWriter``, and what the model has in its code.
        encoder: the classes of transformers that end where llama.cpp does, with a hidden state for each token; empty:
            a decoder, whose class is not asked for.
        left: beginnings of names of tensors that llama.cpp does not compute with.
        also: an architecture of the ``gguf`` package whose names llama.cpp reads here, too.
        behind_padding: positions are counted behind the number of the padding token, and the file has the rows from
            there.
        around: windows lie on both sides of a token, and the first layer of every period sees all.
    """

    name: str
    interleaved: bool = False
    shifted: bool = False
    window: bool = False
    activations: tuple[str, ...] = ("silu",)
    expert_length: str = ""
    fixed: Mapping[str, object] = field(default_factory=dict)
    period: int = 0
    gating: str = ""
    partial: bool = False
    divisors: bool = False
    yarn_unit: float = 0.0
    numbers: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    encoder: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    also: str = ""
    behind_padding: bool = False
    around: bool = False


MOE = "moe_intermediate_size"
LATENT = {"q_lora_rank": "add_q_lora_rank", "kv_lora_rank": "add_kv_lora_rank"}  # attention of DeepSeek
GELU = ("gelu_pytorch_tanh",)
NOT_CAUSAL = {"add_causal_attention": False}
BERT = Architecture(
    "bert",
    activations=("gelu",),
    fixed={"is_decoder": False},
    encoder=("BertModel",),
    left=("pooler.",),
    numbers={"type_vocab_size": "add_token_type_count"},
    constants=NOT_CAUSAL,
)
ARCHITECTURES = {
    "llama": Architecture("llama", divisors=True, interleaved=True),
    "mistral": Architecture("llama", divisors=True, interleaved=True),
    "mixtral": Architecture("llama", divisors=True, interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen2_moe": Architecture("qwen2moe", expert_length="moe_intermediate_size", fixed={"norm_topk_prob": False}),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe", expert_length="moe_intermediate_size", fixed={"norm_topk_prob": True}),
    "gemma": Architecture("gemma", shifted=True, activations=GELU),
    "gemma2": Architecture("gemma2", shifted=True, window=True, activations=GELU, period=2),
    "gemma3_text": Architecture("gemma3", shifted=True, window=True, activations=GELU, period=6),
    "phi3": Architecture("phi3", partial=True),
    "gpt_oss": Architecture("gpt-oss", window=True, expert_length="intermediate_size", period=2),
    "granite": Architecture("granite", divisors=True, interleaved=True),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", fixed={"norm_topk_prob": False, "clip_qkv": None}),
    "stablelm": Architecture("stablelm", partial=True),
    "starcoder2": Architecture("starcoder2", activations=GELU),
    "smollm3": Architecture("smollm3", interleaved=True),
    "arcee": Architecture("arcee", divisors=True, interleaved=True, activations=("relu2",)),
    "cohere": Architecture("command-r", fixed={"use_qk_norm": False}),
    "cohere2": Architecture("cohere2", window=True, period=4),
    "ernie4_5": Architecture("ernie4_5"),
    "dots1": Architecture("dots1", expert_length=MOE, gating="SIGMOID"),
    "exaone4": Architecture("exaone4", divisors=True, fixed={"sliding_window": None}),
    "glm4": Architecture("glm4", partial=True),
    "glm4_moe": Architecture("glm4moe", partial=True, expert_length=MOE, gating="SIGMOID"),
    "granitemoe": Architecture("granitemoe", divisors=True, interleaved=True),
    "helium": Architecture("llama", divisors=True),
    "hunyuan_v1_dense": Architecture("hunyuan-dense"),
    "hunyuan_v1_moe": Architecture("hunyuan-moe", expert_length="intermediate_size"),
    "jais2": Architecture("jais2", activations=("relu2",)),
    "ministral": Architecture("llama", divisors=True, interleaved=True),
    "ministral3": Architecture("mistral3", interleaved=True, yarn_unit=1.0),
    "minimax_m2": Architecture("minimax-m2", partial=True, expert_length="intermediate_size", gating="SIGMOID"),
    "nemotron": Architecture("nemotron", partial=True, shifted=True, activations=("relu2",)),
    "olmo": Architecture("olmo", interleaved=True, constants={"add_layer_norm_eps": 1e-5}),
    "olmo3": Architecture("olmo2", window=True, period=4),
    "phi": Architecture("phi2", partial=True, activations=("gelu_new",), fixed={"qk_layernorm": False}),
    "seed_oss": Architecture("seed_oss"),
    "bert": BERT,
    "roberta": replace(BERT, encoder=("RobertaModel",), behind_padding=True),
    "xlm-roberta": replace(BERT, encoder=("XLMRobertaModel",), behind_padding=True),
    "nomic_bert": replace(
        BERT, name="nomic-bert", activations=("silu",), fixed={}, encoder=("NomicBertModel",), also="bert"
    ),
    "eurobert": Architecture("eurobert", encoder=("EuroBertModel",), constants=NOT_CAUSAL),
    "modernbert": Architecture(
        "modern-bert",
        activations=("gelu",),
        encoder=("ModernBertModel",),
        window=True,
        period=3,
        around=True,
        constants=NOT_CAUSAL,
    ),
    "deepseek_v3": Architecture("deepseek2", expert_length=MOE, gating="SIGMOID", yarn_unit=0.1, numbers=LATENT),
}
# key of config.json → method of GGUFWriter; the first key that is there counts
NUMBERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hidden_size",), "add_embedding_length"),
    (("num_hidden_layers", "n_layer"), "add_block_count"),
    (("intermediate_size",), "add_feed_forward_length"),
    (("num_attention_heads", "n_head"), "add_head_count"),
    (("num_key_value_heads", "num_attention_heads", "n_head"), "add_head_count_kv"),
    (("rms_norm_eps",), "add_layer_norm_rms_eps"),
    (("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"), "add_layer_norm_eps"),
    (("vocab_size",), "add_vocab_size"),
    (("num_local_experts", "num_experts", "n_routed_experts"), "add_expert_count"),
    (("num_experts_per_tok",), "add_expert_used_count"),
    (("shared_expert_intermediate_size",), "add_expert_shared_feed_forward_length"),
    (("attn_logit_softcapping",), "add_attn_logit_softcapping"),
    (("final_logit_softcapping",), "add_final_logit_softcapping"),
    (("embedding_multiplier",), "add_embedding_scale"),
    (("residual_multiplier",), "add_residual_scale"),
    (("attention_multiplier",), "add_attention_scale"),
    (("logits_scaling",), "add_logit_scale"),
    (("logit_scale",), "add_logit_scale"),
    (("use_parallel_residual",), "add_parallel_residual"),
    (("clip_qkv",), "add_clamp_kqv"),
    (("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), "add_expert_shared_count"),
    (("routed_scaling_factor",), "add_expert_weights_scale"),
    (("norm_topk_prob",), "add_expert_weights_norm"),
    (("first_k_dense_replace",), "add_leading_dense_block_count"),
    (("n_group",), "add_expert_group_count"),
    (("topk_group",), "add_expert_group_used_count"),
)
