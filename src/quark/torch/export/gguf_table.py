"""The architectures that a GGUF file is written for, one row a model type, and the numbers of a configuration.

Each row was compared with transformers in a real llama.cpp (``tests/consumers/llama_table.py``).
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter as key

from quark.torch.export import gguf_changes as changes
from quark.torch.export.gguf_numbers import (
    always,
    dense_first,
    doubled_where_shared,
    doubled_where_sliding,
    falcon_keys,
    groups_asked,
    heads_of,
    keys_of_none,
    product,
    sparse_first,
)
from quark.torch.export.gguf_row import Architecture
from quark.torch.export.gguf_states import ABSORBED, EPS, MOE, SHARED, STATES

BIASES = (  # keys with which layers have biases, or see what follows
    "attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "bias", "conv_bias", "use_conv_bias",
    "mamba_conv_bias", "mamba_proj_bias", "projectors_bias", "use_bidirectional_attention",
)  # fmt: skip
HEAD_SIZES = ("add_key_length", "add_value_length", "add_rope_dimension_count")
LATENT = {"q_lora_rank": "add_q_lora_rank", "kv_lora_rank": "add_kv_lora_rank"}  # attention of DeepSeek
GELU = ("gelu_pytorch_tanh",)
SECTIONS = {"add_rope_dimension_sections": lambda config: [*config.rope_parameters["mrope_section"], 0]}
WINDOWS = {  # layers that see a window, and their rotary embedding
    "add_sliding_window_pattern": lambda config: [kind != "full_attention" for kind in config.layer_types],
    "add_rope_freq_base_swa": lambda config: float(config.rope_parameters["sliding_attention"]["rope_theta"]),
}
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
GEMMA3 = Architecture("gemma3", shifted=True, window=True, activations=GELU, period=6)
T5 = Architecture(
    "t5encoder",
    encoder=("T5EncoderModel",),
    fixed={
        "relative_attention_max_distance": 128,
        "dense_act_fn": lambda config: "gelu_new" if config.is_gated_act else "relu",
    },
    constants=NOT_CAUSAL,
    numbers={"relative_attention_num_buckets": "add_relative_attn_buckets_count"},
    derived={
        "add_context_length": always(512),  # there is no longest text
        "add_feed_forward_length": key("d_ff"),
        "add_layer_norm_rms_eps": key("layer_norm_epsilon"),
    },
)
ARCHITECTURES = {
    "llama": Architecture("llama", biases=("attention_bias", "mlp_bias"), long=True, divisors=True, interleaved=True),
    "mistral": Architecture("llama", divisors=True, interleaved=True),
    "mixtral": Architecture("llama", divisors=True, interleaved=True),
    "qwen2": Architecture("qwen2"),
    "qwen2_moe": Architecture("qwen2moe", expert_length="moe_intermediate_size", fixed={"norm_topk_prob": False}),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe", expert_length="moe_intermediate_size", fixed={"norm_topk_prob": True}),
    "qwen2_vl_text": Architecture("qwen2vl", small_eps=EPS, derived=SECTIONS),
    "qwen2_5_vl_text": Architecture("qwen2vl", small_eps=EPS, derived=SECTIONS),
    "qwen3_vl_text": Architecture("qwen3vl", derived=SECTIONS),
    "qwen3_vl_moe_text": Architecture(
        "qwen3vlmoe", expert_length=MOE, fixed={"norm_topk_prob": True}, derived=SECTIONS
    ),
    "hunyuan_vl_text": Architecture("hunyuan_vl", derived=SECTIONS),
    "paddleocr_vl_text": Architecture("paddleocr", derived=SECTIONS),
    "glm4v_text": Architecture("glm4", partial=True, derived=SECTIONS, changed=changes.HALVES),
    "glm4v_moe_text": Architecture(
        "glm4moe", biases=("attention_bias",), partial=True, expert_length=MOE, gating="SIGMOID", derived=SECTIONS
    ),
    "gemma": Architecture("gemma", shifted=True, activations=GELU),
    "gemma2": Architecture("gemma2", shifted=True, window=True, activations=GELU, period=2),
    "gemma3_text": replace(
        GEMMA3,
        both_ways=replace(
            GEMMA3,
            name="gemma-embedding",
            encoder=("Gemma3TextModel",),
            biases=("use_bidirectional_attention",),
            constants=NOT_CAUSAL,
            derived={"add_sliding_window": lambda config: 2 * (config.sliding_window - 1)},
        ),
    ),
    "gemma4_text": Architecture(
        "gemma4",
        biases=("use_bidirectional_attention",),  # "vision": among the numbers of a picture
        also="qwen3moe",  # names of experts
        expert_length=MOE,
        numbers={"top_k_experts": "add_expert_used_count"},
        split={
            "router.scale": {"ffn_gate_inp.scale": changes.same},
            "router.per_expert_scale": {"ffn_down_exps.scale": changes.same},
        },
        window=True,
        activations=GELU,
        divisors=True,
        derived={
            **WINDOWS,
            "add_shared_kv_layers": key("num_kv_shared_layers"),
            "add_final_logit_softcapping": lambda config: config.final_logit_softcapping or 0.0,  # 30 is taken for none
            "add_embedding_length_per_layer_input": lambda config: config.hidden_size_per_layer_input or 0,
            "add_head_count_kv": lambda config: [int(one.num_key_value_heads) for one in config.per_layer_config],
            "add_feed_forward_length": doubled_where_shared,
            **dict.fromkeys(HEAD_SIZES, heads_of("full_attention")),
            **{f"{method}_swa": heads_of("sliding_attention") for method in HEAD_SIZES},
        },
    ),
    "gemma3n_text": Architecture(
        "gemma3n",
        window=True,
        activations=GELU,
        period=5,
        fixed={
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_correct_scale": True,
            "laurel_rank": 64,
            "hidden_size_per_layer_input": 256,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": sparse_first,
            "intermediate_size": lambda config: [config.intermediate_size[0]] * config.num_hidden_layers,
            "num_kv_shared_layers": lambda config: max(0, config.num_hidden_layers - 20),
        },
        changed={"embed_tokens_per_layer.weight": changes.for_all_words},
        unread=keys_of_none,
        derived={
            "add_feed_forward_length": lambda config: config.intermediate_size[0],
            "add_rope_freq_base_swa": lambda config: float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        },
    ),
    "mimo_v2_flash": Architecture(
        "mimo2",
        window=True,
        partial=True,
        expert_length=MOE,
        gating="SIGMOID",
        fixed={"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        derived={**WINDOWS, "add_head_count_kv": doubled_where_sliding},
        scaled={"v_proj.weight": product("attention_value_scale")},
    ),
    "phi3": Architecture("phi3", partial=True, long=True),
    "gpt_oss": Architecture(
        "gpt-oss",
        fixed={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        window=True,
        expert_length="intermediate_size",
        period=2,
    ),
    "granite": Architecture("granite", biases=("attention_bias", "mlp_bias"), divisors=True, interleaved=True),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe", fixed={"norm_topk_prob": False, "clip_qkv": None}),
    "stablelm": Architecture("stablelm", partial=True),
    "starcoder2": Architecture("starcoder2", fixed={"use_bias": True}, activations=GELU),
    "smollm3": Architecture("smollm3", interleaved=True),
    "arcee": Architecture("arcee", divisors=True, interleaved=True, activations=("relu2",)),
    "cohere": Architecture("command-r", fixed={"use_qk_norm": False}),
    "cohere2": Architecture("cohere2", whole_heads=True, window=True, period=4),
    "ernie4_5": Architecture("ernie4_5"),
    "dots1": Architecture("dots1", expert_length=MOE, gating="SIGMOID"),
    "exaone4": Architecture("exaone4", divisors=True, fixed={"sliding_window": None}),
    "glm4": Architecture("glm4", biases=("attention_bias",), partial=True),
    "glm4_moe": Architecture("glm4moe", biases=("attention_bias",), partial=True, expert_length=MOE, gating="SIGMOID"),
    "granitemoe": Architecture("granitemoe", biases=("attention_bias",), divisors=True, interleaved=True),
    "helium": Architecture("llama", biases=("attention_bias", "mlp_bias"), divisors=True),
    "hunyuan_v1_dense": Architecture("hunyuan-dense"),
    "hunyuan_v1_moe": Architecture("hunyuan-moe", expert_length="intermediate_size"),
    "jais2": Architecture("jais2", fixed={"attention_bias": True, "mlp_bias": True}, activations=("relu2",)),
    "ministral": Architecture("llama", divisors=True, interleaved=True),
    "ministral3": Architecture("mistral3", interleaved=True, yarn_unit=1.0),
    "minimax_m2": Architecture("minimax-m2", partial=True, expert_length="intermediate_size", gating="SIGMOID"),
    "nemotron": Architecture(
        "nemotron",
        whole_heads=True,
        biases=("attention_bias", "mlp_bias"),
        partial=True,
        shifted=True,
        activations=("relu2",),
    ),
    "olmo": Architecture("olmo", interleaved=True, constants={"add_layer_norm_eps": 1e-5}),
    "olmo3": Architecture("olmo2", window=True, period=4),
    "phi": Architecture("phi2", partial=True, activations=("gelu_new",), fixed={"qk_layernorm": False}),
    "seed_oss": Architecture("seed_oss", biases=("attention_bias",)),
    "bert": BERT,
    "roberta": replace(BERT, encoder=("RobertaModel",), behind_padding=True),
    "xlm-roberta": replace(BERT, encoder=("XLMRobertaModel",), behind_padding=True),
    "camembert": replace(BERT, encoder=("CamembertModel",), behind_padding=True),
    "distilbert": replace(
        BERT,
        encoder=("DistilBertModel",),
        numbers={"hidden_dim": "add_feed_forward_length"},
        constants={**NOT_CAUSAL, "add_layer_norm_eps": 1e-12, "add_token_type_count": 1},
    ),
    "nomic_bert": replace(
        BERT, name="nomic-bert", activations=("silu",), fixed={}, encoder=("NomicBertModel",), also="bert"
    ),
    "jina_embeddings_v3": replace(BERT, name="jina-bert-v3", encoder=("JinaEmbeddingsV3Model",), also="bert", fixed={}),
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
    "t5": T5,
    "mt5": replace(T5, encoder=("MT5EncoderModel",)),
    "umt5": replace(T5, encoder=("UMT5EncoderModel",)),
    "deepseek_v3": Architecture(
        "deepseek2",
        fixed={"rope_interleave": True},
        expert_length=MOE,
        gating="SIGMOID",
        yarn_unit=0.1,
        small_eps=EPS,
        numbers=LATENT,
    ),
    "deepseek_v2": Architecture(
        "deepseek2",
        expert_length=MOE,
        gating="SOFTMAX",
        yarn_unit=0.1,
        small_eps=EPS,
        numbers=LATENT,
        fixed={"norm_topk_prob": False},
        derived={
            "add_expert_group_count": lambda config: groups_asked(config)[0],
            "add_expert_group_used_count": lambda config: groups_asked(config)[1],
        },
    ),
    "youtu": Architecture(
        "deepseek2",
        yarn_unit=0.1,
        small_eps=EPS,
        numbers=LATENT,
        fixed={"rope_interleave": True},
        derived={
            "add_leading_dense_block_count": key("num_hidden_layers"),
            "add_expert_feed_forward_length": key("intermediate_size"),
            "add_expert_count": always(1),
            "add_expert_used_count": always(1),
            "add_expert_shared_count": always(0),
        },
    ),
    "glm4_moe_lite": Architecture(
        "deepseek2",
        expert_length=MOE,
        yarn_unit=0.1,
        gating="SIGMOID",
        small_eps=EPS,
        numbers=LATENT,
        fixed={"rope_interleave": True},
        derived={"add_leading_dense_block_count": dense_first},
    ),
    "mistral4": Architecture(
        "mistral4",
        expert_length=MOE,
        gating="SOFTMAX",
        yarn_unit=0.1,
        small_eps=EPS,
        numbers=LATENT,
        fixed={"rope_interleave": True},
        derived={
            "add_attn_temperature_length": lambda config: config.rope_parameters.get(
                "original_max_position_embeddings", config.max_position_embeddings
            )
        },
    ),
    "glm_moe_dsa": Architecture(
        "glm-dsa",
        expert_length=MOE,
        gating="SIGMOID",
        small_eps=EPS,
        numbers={
            **LATENT,
            "index_n_heads": "add_indexer_head_count",
            "index_head_dim": "add_indexer_key_length",
            "index_topk": "add_indexer_top_k",
        },
        fixed={
            "indexer_types": lambda config: ["full"] * config.num_hidden_layers,
            "max_position_embeddings": lambda config: min(config.max_position_embeddings, (1 << 20) - 1),  # else shared
        },
        derived={**ABSORBED, "add_head_count_kv": always(1), "add_leading_dense_block_count": dense_first},
        split=changes.ABSORBED,
    ),
    "minicpm3": Architecture(
        "minicpm3",
        long=True,
        small_eps=EPS,
        numbers=LATENT,
        fixed={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    "glm": Architecture("chatglm", whole_heads=True, biases=("attention_bias",), partial=True),
    "solar_open": Architecture(
        "glm4moe", biases=("attention_bias",), partial=True, expert_length=MOE, gating="SIGMOID"
    ),
    "granitemoeshared": Architecture(
        "granitemoe", biases=("attention_bias",), divisors=True, interleaved=True, **SHARED
    ),
    "ernie4_5_moe": Architecture(
        "ernie4_5-moe",
        expert_length=MOE,
        numbers={
            "moe_num_experts": "add_expert_count",
            "moe_k": "add_expert_used_count",
            "moe_layer_interval": "add_interleave_moe_layer_step",
            "moe_layer_start_index": "add_leading_dense_block_count",
        },
        derived={
            "add_expert_shared_feed_forward_length": lambda config: (
                config.moe_intermediate_size * config.moe_num_shared_experts
            )
        },
    ),
    "exaone_moe": Architecture(
        "exaone-moe",
        fixed={"num_shared_experts": 1},
        window=True,
        period=4,
        expert_length=MOE,
        gating="SIGMOID",
        derived={"add_leading_dense_block_count": dense_first},
    ),
    "afmoe": Architecture(
        "afmoe",
        window=True,
        period=4,
        expert_length=MOE,
        gating="SIGMOID",
        fixed={"mup_enabled": True},
        numbers={"num_dense_layers": "add_leading_dense_block_count", "route_scale": "add_expert_weights_scale"},
        constants={"add_expert_weights_norm": True},
    ),
    "llama4_text": Architecture(
        "llama4",
        expert_length="intermediate_size",
        period=4,
        fixed={"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True},
        numbers={"interleave_moe_layer_step": "add_interleave_moe_layer_step"},
        derived={"add_feed_forward_length": key("intermediate_size_mlp")},
    ),
    "apertus": Architecture(
        "apertus",
        divisors=True,
        activations=("xielu",),
        told={f"act_fn.{name}": f"add_xielu_{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")},
    ),
    "mpt": Architecture(
        "mpt",
        activations=("gelu",),
        derived={
            "add_context_length": key("max_seq_len"),
            "add_feed_forward_length": lambda config: config.expansion_ratio * config.d_model,
            "add_max_alibi_bias": key("attn_config.alibi_bias_max"),
        },
    ),
    "bloom": Architecture(
        "bloom",
        by_head=True,
        fixed={"apply_residual_connection_post_layernorm": False},
        derived={
            "add_context_length": always(2048),
            "add_feed_forward_length": lambda config: 4 * config.hidden_size,
        },
    ),
    "gpt_neox": Architecture(
        "gptneox", fixed={"attention_bias": True}, partial=True, by_head=True, activations=("gelu",)
    ),
    "falcon": Architecture(
        "falcon",
        by_head=True,
        activations=("gelu",),
        fixed={"alibi": False, "parallel_attn": True},
        derived={"add_head_count_kv": falcon_keys, "add_feed_forward_length": key("ffn_hidden_size")},
    ),
    "gpt2": Architecture(
        "gpt2",
        activations=("gelu_new", *GELU),
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        derived={
            "add_context_length": key("n_positions"),
            "add_feed_forward_length": lambda config: config.n_inner or 4 * config.n_embd,
        },
    ),
    "gpt_bigcode": Architecture(
        "starcoder",
        activations=GELU,
        fixed={"multi_query": True, "scale_attn_weights": True},
        derived={
            "add_context_length": key("n_positions"),
            "add_feed_forward_length": lambda config: config.n_inner or 4 * config.n_embd,
            "add_head_count_kv": always(1),
        },
    ),
    **STATES,
}
DECODERS = [name for name, row in ARCHITECTURES.items() if not row.encoder]
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
