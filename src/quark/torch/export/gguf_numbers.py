"""Numbers of a GGUF file that follow from a configuration: functions of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter as key
from typing import Any

import numpy as np


def always(value: object) -> Callable[[Any], Any]:
    """What does not follow from a configuration."""
    return lambda _: value


def dense_first(config: Any) -> int:
    """How many layers come before the first with experts."""
    return [*config.mlp_layer_types, "sparse"].index("sparse")


def keys_by_layer(config: Any) -> list[int]:
    """Heads of keys of each layer; 0: it has no attention."""
    kinds = getattr(config, "layer_types", None) or config.layers_block_type
    return [config.num_key_value_heads if kind in ("full_attention", "attention") else 0 for kind in kinds]


def shared_by_layer(config: Any) -> list[int]:
    """One key for all heads in each layer with attention."""
    return [min(count, 1) for count in keys_by_layer(config)]


def widths_by_layer(config: Any) -> list[int]:
    """The width of what each layer of Nemotron-H has between two products; 0: it is of another kind."""
    widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    return [widths.get(kind, 0) for kind in config.layer_types]


def heads_of(kind: str) -> Callable[[Any], int]:
    """The width of heads in Gemma 4's layers of a kind."""
    return lambda config: int(config.per_layer_config[config.layer_types.index(kind)].head_dim)


def doubled_where_shared(config: Any) -> list[int]:
    """The width of what each layer of Gemma 4 has between two products."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    double = 2 if config.use_double_wide_mlp else 1
    return [config.intermediate_size * (double if layer >= first else 1) for layer in range(config.num_hidden_layers)]


def doubled_where_sliding(config: Any) -> list[int]:
    """Heads of keys of each layer of MiMo-V2."""
    return [config.num_key_value_heads * (1 if kind == "full_attention" else 2) for kind in config.layer_types]


def sparse_first(config: Any) -> list[float]:
    """How much of what the layers of Gemma 3n have between two products is 0, as llama.cpp has it."""
    return [0.95 if layer < 10 else 0.0 for layer in range(config.num_hidden_layers)]


def keys_of_none(config: Any) -> dict[str, tuple[int, ...]]:
    """Keys, their norms, and values of layers of Gemma 3n that take those of others."""
    whole = config.num_key_value_heads * config.head_dim, config.hidden_size
    shapes = {"k": whole, "v": whole, "k_norm": (config.head_dim,)}
    layers = range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers)
    return {f"blk.{layer}.attn_{name}": shape for layer in layers for name, shape in shapes.items()}


def routed(name: str) -> Callable[[Any], int]:
    """A number of what chooses experts; 0 where no layer has them."""
    return lambda config: int(getattr(config, name)) if "moe" in config.layer_types else 0


def falcon_keys(config: Any) -> int:
    """Heads of keys of Falcon, in its new form and in its two old ones."""
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def groups_asked(config: Any) -> tuple[int, int]:
    """Groups of experts of DeepSeek-V2, and of how many experts are chosen; "greedy" chooses from all at once."""
    whole = config.topk_method == "greedy" or not config.n_group
    return (1, 1) if whole else (int(config.n_group), int(config.topk_group))


def adjusted_width(config: Any) -> int:
    """The width that LFM2's code makes of the one that is told."""
    width, factor, step = config.intermediate_size, config.block_ffn_dim_multiplier, config.block_multiple_of
    if not config.block_auto_adjust_ff_dim:
        return int(width)
    width = int(2 * width / 3)
    return int(width if factor is None else step * -(-int(factor * width) // step))


def product(*names: str) -> Callable[[Any], np.ndarray]:
    """Numbers of a configuration, multiplied with each other; None: 1."""
    return lambda config: np.array(math.prod(1.0 if (one := getattr(config, name)) is None else one for name in names))


def inner_width(config: Any) -> int:
    """The width of Falcon-H1's states."""
    return int(config.mamba_expand * config.hidden_size if config.mamba_d_ssm is None else config.mamba_d_ssm)


def state_multipliers(config: Any) -> np.ndarray:
    """By what Falcon-H1 multiplies gates, inputs, both matrices of a state and time steps, row by row."""
    width, matrix = inner_width(config), config.mamba_n_groups * config.mamba_d_state
    counts = (width, width, matrix, matrix, config.mamba_n_heads)
    return np.repeat(np.array(config.ssm_multipliers) * config.ssm_in_multiplier, counts)


def state(width: Callable[[Any], object], rank: str, size: str, kernel: str, groups: str = "") -> dict[str, Any]:
    """The numbers of layers with a state: its width, and the keys of the others."""
    told = {"add_ssm_time_step_rank": rank, "add_ssm_state_size": size, "add_ssm_conv_kernel": kernel}
    told |= {"add_ssm_group_count": groups} if groups else {}
    return {"add_ssm_inner_size": width, **{method: key(name) for method, name in told.items()}}
