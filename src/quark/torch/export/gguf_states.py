"""The rows of ``gguf_table.py`` of networks whose layers have a state: Mamba, short convolutions, gated delta rules,
and hybrids of these with attention."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter as key
from typing import Any

import numpy as np

from quark.torch.export import gguf_changes as changes
from quark.torch.export.gguf_numbers import (
    adjusted_width,
    always,
    dense_first,
    inner_width,
    keys_by_layer,
    product,
    routed,
    shared_by_layer,
    state,
    state_multipliers,
    widths_by_layer,
)
from quark.torch.export.gguf_row import Architecture

MOE = "moe_intermediate_size"
EPS = ("rms_norm_eps",)
SHARED: dict[str, Any] = {
    "numbers": {"shared_intermediate_size": "add_expert_shared_feed_forward_length"},
    "split": {
        "shared_mlp.input_linear.weight": {"ffn_gate_shexp": changes.first_half, "ffn_up_shexp": changes.second_half}
    },
}
NO_ATTENTION: dict[str, Any] = {  # Mamba reads texts of any length
    "add_context_length": always(1 << 20),
    "add_feed_forward_length": always(0),
    "add_head_count": always(0),
    "add_layer_norm_rms_eps": key("layer_norm_epsilon"),
}
MAMBA = Architecture(
    "mamba",
    fixed={"use_conv_bias": True},
    changed={"A_log": changes.decay},
    derived={**NO_ATTENTION, **state(key("intermediate_size"), "time_step_rank", "state_size", "conv_kernel")},
)
HYBRID = Architecture(
    "granitehybrid",
    partial=True,
    interleaved=True,
    fixed={"mamba_conv_bias": True},
    derived={
        **state(
            lambda config: int(config.mamba_expand * config.hidden_size),
            "mamba_n_heads", "mamba_d_state", "mamba_d_conv", "mamba_n_groups",
        ),
        "add_head_count_kv": keys_by_layer,
    },
    changed={
        "A_log": changes.decay_column,
        "mamba.D": changes.column,
        "mamba.norm.weight": changes.in_groups("mamba_n_groups"),
    },
)  # fmt: skip
SHORT: dict[str, Any] = {"add_shortconv_l_cache": key("conv_L_cache"), "add_head_count_kv": keys_by_layer,
         "add_layer_norm_rms_eps": key("norm_eps")}  # fmt: skip
QWEN3_NEXT = Architecture(
    "qwen3next",
    small_eps=EPS,
    shifted=True,
    partial=True,
    period=4,
    expert_length=MOE,
    fixed={"norm_topk_prob": True, "decoder_sparse_step": 1},
    derived={
        **state(
            lambda config: config.linear_num_value_heads * config.linear_value_head_dim,
            "linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim", "linear_num_key_heads",
        ),
        "add_full_attention_interval": always(4),
    },
    changed={"A_log": changes.decay},
    split={"in_proj_qkvz.weight": {"attn_qkv": changes.QKV, "attn_gate": changes.GATE}},
)  # fmt: skip
QWEN3_5 = replace(
    QWEN3_NEXT,
    name="qwen35",
    derived={**QWEN3_NEXT.derived, "add_rope_dimension_sections": always([11, 11, 10, 0])},  # equal for text
    split={},
    across={"linear_attn.out_proj.weight": "linear_value_head_dim"},
    changed={
        "A_log": changes.tiled_decay,
        "in_proj_qkv.weight": changes.tiled_behind,
        "conv1d.weight": changes.tiled_behind,
        "out_proj.weight": changes.tiled_across,
        **dict.fromkeys(("dt_bias", "in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"), changes.tiled),
    },
)
ABSORBED: dict[str, Any] = {  # one key for all heads, of which what they share is a part
    "add_key_length": lambda config: config.kv_lora_rank + config.qk_rope_head_dim,
    "add_value_length": key("kv_lora_rank"),
    "add_key_length_mla": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim,
    "add_value_length_mla": key("v_head_dim"),
}
KIMI = Architecture(
    "kimi-linear",
    expert_length=MOE,
    gating="SIGMOID",
    small_eps=EPS,
    fixed={
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "linear_num_heads": key("num_attention_heads"),
        "q_lora_rank": None,
    },
    numbers={"kv_lora_rank": "add_kv_lora_rank"},
    derived={
        **ABSORBED,
        "add_head_count_kv": shared_by_layer,
        "add_leading_dense_block_count": dense_first,
        "add_ssm_conv_kernel": key("linear_conv_kernel_dim"),
        "add_kda_head_dim": key("linear_head_dim"),
    },
    changed={"A_log": changes.decay_column},
    split={
        **changes.ABSORBED,
        "conv1d.weight": {f"ssm_conv1d_{name}": changes.third(number) for number, name in enumerate("qkv")},
    },
)
STATES = {
    "granitemoehybrid": replace(
        HYBRID,
        partial=False,
        derived={
            **HYBRID.derived,
            "add_rope_scaling_finetuned": lambda config: config.position_embedding_type == "rope",
        },
        **SHARED,
    ),
    "bamba": HYBRID,
    "falcon_h1": Architecture(
        "falcon-h1",
        fixed={"mamba_conv_bias": True},
        derived=state(inner_width, "mamba_n_heads", "mamba_d_state", "mamba_d_conv", "mamba_n_groups"),
        changed=HYBRID.changed,
        scaled={
            "gate_proj.weight": lambda config: np.array(config.mlp_multipliers[0]),
            "down_proj.weight": lambda config: np.array(config.mlp_multipliers[1]),
            "k_proj.weight": product("key_multiplier", "attention_in_multiplier"),
            "q_proj.weight": product("attention_in_multiplier"),
            "v_proj.weight": product("attention_in_multiplier"),
            "o_proj.weight": product("attention_out_multiplier"),
            "out_proj.weight": product("ssm_out_multiplier"),
            "in_proj.weight": state_multipliers,
            "embed_tokens.weight": product("embedding_multiplier"),
            "lm_head.weight": product("lm_head_multiplier"),
        },
    ),
    "lfm2": Architecture("lfm2", derived={**SHORT, "add_feed_forward_length": adjusted_width}),
    "lfm2_moe": Architecture(
        "lfm2moe",
        expert_length=MOE,
        gating="SIGMOID",
        fixed={"norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
        numbers={"num_dense_layers": "add_leading_dense_block_count"},
        derived=SHORT,
    ),
    "kimi_linear": KIMI,
    "mamba": MAMBA,
    "falcon_mamba": replace(
        MAMBA, constants={"add_ssm_dt_b_c_rms": True}, small_eps=("layer_norm_epsilon", "mixer_rms_eps")
    ),
    "mamba2": Architecture(
        "mamba2",
        fixed={"use_conv_bias": True},
        derived={
            **NO_ATTENTION,
            **state(
                lambda config: int(config.expand * config.hidden_size),
                "num_heads",
                "state_size",
                "conv_kernel",
                "n_groups",
            ),
        },
        changed={
            "A_log": changes.decay_column,
            "mixer.D": changes.column,
            "mixer.norm.weight": changes.in_groups("n_groups"),
        },
    ),
    "jamba": Architecture(
        "jamba",
        fixed={"mamba_conv_bias": True, "mamba_expand": 2},
        derived={
            **state(
                lambda config: config.mamba_expand * config.hidden_size,
                "mamba_dt_rank",
                "mamba_d_state",
                "mamba_d_conv",
            ),
            "add_head_count_kv": keys_by_layer,
        },
        changed={"A_log": changes.decay},
    ),
    "nemotron_h": Architecture(
        "nemotron_h_moe",
        expert_length=MOE,
        gating="SIGMOID",
        fixed={
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "use_conv_bias": True,
            "moe_latent_size": None,
            "sliding_window": None,
        },
        numbers={"moe_shared_expert_intermediate_size": "add_expert_shared_feed_forward_length"},
        derived={
            **state(
                lambda config: config.mamba_num_heads * config.mamba_head_dim,
                "mamba_num_heads",
                "ssm_state_size",
                "conv_kernel",
                "n_groups",
            ),
            "add_layer_norm_rms_eps": key("layer_norm_epsilon"),
            "add_head_count_kv": keys_by_layer,
            "add_feed_forward_length": widths_by_layer,
            "add_expert_count": routed("n_routed_experts"),
            "add_expert_used_count": routed("num_experts_per_tok"),
            "add_expert_group_count": routed("n_group"),
            "add_expert_group_used_count": routed("topk_group"),
        },
        changed={
            "A_log": changes.decay_column,
            "mixer.D": changes.column,
            "mixer.norm.weight": changes.in_groups("n_groups"),
        },
    ),
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": replace(QWEN3_5, expert_length=""),
    "qwen3_5_moe_text": replace(QWEN3_5, name="qwen35moe"),
}
