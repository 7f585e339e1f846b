"""What llama.cpp wants of a model type beyond the names of its tensors, which the ``gguf`` package maps.

Each row was compared with transformers in a real llama.cpp (``tests/consumers/llama_table.py``): the package
has names for many more architectures, but a network whose rotary embedding, norms or experts are laid out otherwise
would be read without a word and answer nonsense, so a type without a row is refused.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from quark.errors import ConfigError, ModelError, nearest
from quark.torch.export.gguf_numbers import keys_by_layer, shared_by_layer
from quark.torch.export.gguf_rope import OTHERS, add_rope, head_size, local_rope, part_of, rope_of, rotated_size
from quark.torch.export.gguf_row import Architecture
from quark.torch.export.gguf_table import ARCHITECTURES, BIASES, NUMBERS

ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")
NO_EPS, NONE_LEAST = ("qwen2vl",), 1e-6  # no epsilon in norms, whatever the file says
LEAST = 1e-5  # an epsilon of norms that answers as 1e-6 does, to within 1e-4
#: A least step of states, which transformers has in texts but not in the words that follow: moves answers by 1e-3.
LEAST_STEP = 0.001


def architecture_of(model_type: str) -> Architecture:
    """The row of a model type.

    Raises:
        ConfigError: none.
    """
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"no GGUF file is written for model_type {model_type!r}: only for types that llama.cpp "
            f"was seen to answer like. Use another format ({OTHERS}).{nearest(model_type, ARCHITECTURES)} The types: "
            + ", ".join(ARCHITECTURES)
        )
    return ARCHITECTURES[model_type]


def row_of(config: Any) -> Architecture:
    """The row of a model.

    Raises:
        ConfigError: none.
    """
    row = architecture_of(config.model_type)
    return row.both_ways if row.both_ways and getattr(config, "use_bidirectional_attention", False) else row


def check_network(config: Any, row: Architecture) -> None:
    """What llama.cpp computes is what the model computes.

    Raises:
        ModelError: an activation function or a rotary embedding that it does not have for this architecture.
    """
    named = (getattr(config, "architectures", None) or [""])[0]
    if row.encoder and named not in row.encoder:
        raise ModelError(
            f"the model is a {named or 'model without architectures'}, and of {row.name!r} llama.cpp computes what "
            f"{' or '.join(row.encoder)} does, a hidden state for each token; save that part with save_pretrained"
        )
    gate = next((found for key in ACTIVATIONS if (found := getattr(config, key, None))), row.activations[0])
    if gate not in row.activations:
        raise ModelError(f"hidden_act is {gate!r}, and llama.cpp computes {row.activations[0]!r} in {row.name!r}")
    turns = getattr(config, "num_attention_heads", None) and not getattr(config, "kv_lora_rank", None)
    if turns and not row.partial and rotated_size(config) != head_size(config):
        raise ModelError(f"a part of each head is rotated, which llama.cpp does not do in {row.name!r}")
    for key, wanted in {**dict.fromkeys(read_of(config, BIASES) - {*row.biases}, False), **row.fixed}.items():
        wanted = wanted(config) if callable(wanted) else wanted
        found = getattr(config, key, wanted)
        if (bool(found) if isinstance(wanted, bool) else found) != wanted:
            raise ModelError(f"{key} is {found!r}, and llama.cpp takes {wanted!r} for granted in {row.name!r}")
    check_sizes(config, row)
    check_layers(config, row)
    check_tied(config, row)


def check_tied(config: Any, row: Architecture) -> None:
    """One matrix is multiplied by one number.

    Raises:
        ModelError: a matrix that is embedding and head is multiplied by two.
    """
    factors = [row.factor_of(name, config) for name in ("embed_tokens.weight", "lm_head.weight")]
    first, last = (1.0 if factor is None else float(factor[0, 0]) for factor in factors)
    if first != last and config.tie_word_embeddings:
        raise ModelError(
            f"embeddings and head are one matrix (tie_word_embeddings), which is multiplied by {first:g} and by "
            f"{last:g}, and in {row.name!r} llama.cpp has one for both"
        )


def read_of(config: Any, keys: Iterable[str]) -> set[str]:
    """Those of some keys that the class of a configuration knows: what else a file says builds no layer."""
    known = inspect.signature(type(config).__init__).parameters
    return {key for key in keys if key in known or hasattr(type(config), key)}


def check_layers(config: Any, row: Architecture) -> None:
    """Layers that differ from each other differ as llama.cpp has it.

    Raises:
        ModelError: they do not.
    """
    layers, name = range(config.num_hidden_layers), row.name
    kinds = getattr(config, "layer_types", None) or []
    first = 0 if row.around else 1
    full = [(number + first) % row.period == 0 for number in layers] if row.period else []
    if row.period and [kind == "full_attention" for kind in kinds] != full:
        raise ModelError(
            f"layer_types is {kinds}, and in {name!r} llama.cpp lets every layer number {row.period} see all"
            + (", from the first on" if row.around else "")
        )
    check_kinds(config, row)
    if name == "gemma4":
        check_gemma4(config)
    rotated = list(getattr(config, "no_rope_layers", None) or [])
    if name in ("smollm3", "llama4") and rotated != [int((number + 1) % 4 != 0) for number in layers]:
        raise ModelError(f"no_rope_layers is {rotated}, and in {name!r} llama.cpp rotates all but every fourth layer")
    if name in ("olmoe", "dots1") and config.num_key_value_heads != config.num_attention_heads:
        raise ModelError(f"num_key_value_heads is not num_attention_heads, which llama.cpp needs in {name!r}")
    scalar, heads = getattr(config, "query_pre_attn_scalar", None), getattr(config, "num_attention_heads", 0)
    large = {"gemma2": 46, "gemma3": 62}.get(name) == config.num_hidden_layers  # those of 27 B
    if scalar is not None and scalar != (config.hidden_size / heads if large else head_size(config)):
        raise ModelError(f"query_pre_attn_scalar is {scalar}, which llama.cpp does not have in {name!r} of this size")
    check_local_rope(config, row)


def check_local_rope(config: Any, row: Architecture) -> None:
    """Layers that see a window turn their heads as llama.cpp does: by no scaling, and as far as the others.

    Raises:
        ModelError: they turn them otherwise.
    """
    local, full = local_rope(config), rope_of(config)
    if not local:
        return
    part = part_of(full, config) if row.partial else 1.0
    if (local.get("rope_type", "default"), part_of(local, config)) != ("default", part):
        raise ModelError(f"the rotary embedding of sliding layers is {local}, and no file for llama.cpp says it")
    theta = 1e4 if row.name in ("gemma3", "gemma-embedding") else full["rope_theta"]
    told = row.around or "add_rope_freq_base_swa" in row.derived
    if not told and local.get("rope_theta", theta) != theta:
        raise ModelError(
            f"the rotary embedding of sliding layers is {local}; llama.cpp has rope_theta {theta:g} in {row.name!r}"
        )


def check_sizes(config: Any, row: Architecture) -> None:
    """Numbers of the configuration are such as llama.cpp computes with.

    Raises:
        ModelError: one is not; llama.cpp would end its process, or answer otherwise.
    """
    groups, chosen = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None)
    if chosen is not None and not (chosen == 1 or 0 < chosen < groups):
        raise ModelError(
            f"topk_group is {chosen} and n_group {groups}, and llama.cpp chooses from 1 to n_group - 1 groups"
        )
    for key in ("n_shared_experts", "num_shared_experts"):
        if getattr(config, key, None) == 0:
            raise ModelError(f"{key} is 0, and in {row.name!r} llama.cpp needs shared experts")
    for key in row.small_eps:
        eps, least = getattr(config, key, 0), NONE_LEAST if row.name in NO_EPS else LEAST
        if eps > least:
            raise ModelError(
                f"{key} is {eps}, and norms of a {config.model_type} have another in llama.cpp than in transformers; "
                f"up to {least} both answer alike"
            )
    check_states(config, row)
    if not getattr(config, "num_attention_heads", None):
        return
    sizes = {"qk_nope_head_dim": getattr(config, "qk_nope_head_dim", None) or 0, "head_dim": rotated_size(config)}
    for key, size in sizes.items():
        if size % 2:
            raise ModelError(f"{key} is {size}, and llama.cpp turns pairs of numbers")
    if row.whole_heads and head_size(config) * config.num_attention_heads != config.hidden_size:
        raise ModelError(
            f"head_dim is {head_size(config)}, and in {row.name!r} llama.cpp takes hidden_size / num_attention_heads, "
            f"{config.hidden_size // config.num_attention_heads}, for granted"
        )


def check_states(config: Any, row: Architecture) -> None:
    """Layers with a state are as wide as llama.cpp has them.

    Raises:
        ModelError: they are not.
    """
    if row.name == "mamba" and config.intermediate_size != 2 * config.hidden_size:
        raise ModelError(
            f"intermediate_size is {config.intermediate_size}, and llama.cpp has twice hidden_size in 'mamba'"
        )
    sizes = [getattr(config, f"linear_{kind}_head_dim", None) for kind in ("key", "value")]
    if row.period and sizes[0] != sizes[1]:
        raise ModelError(f"linear_key_head_dim and linear_value_head_dim are {sizes}, which llama.cpp has alike")
    if getattr(config, "mamba_rms_norm", False) and config.mamba_norm_before_gate:
        raise ModelError("mamba_norm_before_gate is True, and llama.cpp has the norm of a state behind its gate")
    limits = getattr(config, "time_step_limit", None)
    if limits is not None and tuple(limits) != (0.0, math.inf):
        raise ModelError(f"time_step_limit is {limits}, and llama.cpp has none")
    least = getattr(config, "time_step_min", 0)
    if row.name == "nemotron_h_moe" and least > LEAST_STEP:
        raise ModelError(
            f"time_step_min is {least}, and llama.cpp has no least time step; up to {LEAST_STEP} both answer alike"
        )
    normed = getattr(config, "use_qk_norm", None)
    if row.name == "llama4" and normed != (config.num_local_experts != 128):
        raise ModelError(f"use_qk_norm is {normed}, and llama.cpp has such norms unless there are 128 experts")


def check_gemma4(config: Any) -> None:
    """Layers of Gemma 4 look where llama.cpp looks.

    Raises:
        ModelError: they look elsewhere.
    """
    kinds, shared = list(config.layer_types), config.num_kv_shared_layers
    if config.use_bidirectional_attention == "all":
        raise ModelError("use_bidirectional_attention is 'all', and in 'gemma4' llama.cpp looks back only")
    if len({*kinds}) < 2:
        raise ModelError(
            f"layer_types is {kinds}, and in 'gemma4' llama.cpp has windows in some layers, in others none"
        )
    before = kinds[: config.num_hidden_layers - shared][-2:]
    if shared and before != ["sliding_attention", "full_attention"]:
        raise ModelError(
            f"num_kv_shared_layers is {shared}, and in 'gemma4' llama.cpp has a sliding and a full layer before those; "
            f"here they are {before}"
        )


def check_kinds(config: Any, row: Architecture) -> None:
    """Layers of several kinds are where llama.cpp has them.

    Raises:
        ModelError: they are elsewhere.
    """
    layers, dense = range(config.num_hidden_layers), list(getattr(config, "mlp_layer_types", None) or [])
    if dense != sorted(dense):
        raise ModelError(f"mlp_layer_types is {dense}, and in {row.name!r} llama.cpp has dense layers first")
    if (
        row.derived.get("add_head_count_kv") in (keys_by_layer, shared_by_layer)
        and len({*map(bool, keys_by_layer(config))}) < 2
    ):
        raise ModelError(
            f"all layers are of one kind, and in {row.name!r} llama.cpp needs some with attention and others"
        )
    if {"mlp", "moe"} <= {*(getattr(config, "layer_types", None) or ())}:
        raise ModelError(f"layer_types is {config.layer_types}, and in {row.name!r} llama.cpp has 'mlp' or 'moe'")
    step, routed = getattr(config, "interleave_moe_layer_step", 0), getattr(config, "moe_layers", None)
    if step and routed is not None and list(routed) != list(layers[step - 1 :: step]):
        raise ModelError(f"moe_layers is {routed}, and in {row.name!r} llama.cpp has experts in layers {step - 1}, ...")
    last = getattr(config, "moe_layer_end_index", None)
    if last is not None and 0 <= last < layers[-1]:
        raise ModelError(
            f"moe_layer_end_index is {last}, and in {row.name!r} llama.cpp has experts up to the last layer"
        )


def first_position(config: Any, row: Architecture) -> int:
    """The row of the table of positions that the first token has."""
    return int(config.pad_token_id) + 1 if row.behind_padding else 0


def context_of(config: Any, row: Architecture) -> int:
    """The longest text: that of the model, or its window where llama.cpp lets every token see all others."""
    length = int(config.max_position_embeddings) - first_position(config, row)
    return min(length, config.sliding_window) if slides(config) and not row.window else length


def slides(config: Any) -> bool:
    """Whether some layers see a window only."""
    kinds = getattr(config, "layer_types", None)
    told = any("sliding" in kind for kind in kinds) if kinds else getattr(config, "use_sliding_window", True)
    return bool(getattr(config, "sliding_window", None)) and bool(told)


def add_numbers(writer: Any, config: Any, row: Architecture) -> None:
    """The numbers of a network."""
    import gguf

    for method, constant in row.constants.items():
        getattr(writer, method)(constant)
    for method, follows in row.derived.items():
        getattr(writer, method)(follows(config))
    told = (*NUMBERS, *(((key,), method) for key, method in row.numbers.items()))
    for keys, method in (entry for entry in told if entry[1] not in row.derived):
        value = next((found for key in keys if (found := getattr(config, key, None)) is not None), None)
        if value is not None:
            getattr(writer, method)(value)
    if row.gating:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType[row.gating])
    if row.expert_length and getattr(config, row.expert_length) is not None:
        writer.add_expert_feed_forward_length(getattr(config, row.expert_length))
    if "add_context_length" not in row.derived:
        writer.add_context_length(context_of(config, row))
    if getattr(config, "num_attention_heads", None):
        add_attention(writer, config, row)


def add_attention(writer: Any, config: Any, row: Architecture) -> None:
    """The numbers of layers of attention."""
    sizes = {
        "add_rope_dimension_count": rotated_size(config),
        "add_key_length": head_size(config),
        "add_value_length": getattr(config, "v_head_dim", None) or head_size(config),
    }
    for method in sizes.keys() - row.derived.keys():
        getattr(writer, method)(sizes[method])
    if row.window and slides(config) and "add_sliding_window" not in row.derived:
        writer.add_sliding_window(config.sliding_window * (2 if row.around else 1))
    if row.around:
        writer.add_sliding_window_pattern(row.period)
        writer.add_rope_freq_base_swa(local_rope(config)["rope_theta"])
    add_rope(writer, config, row)


def turned_rows(name: str, config: Any, row: Architecture) -> Callable[[np.ndarray], np.ndarray]:
    """What happens to the rows of a tensor: queries and keys interleave the halves of each head; positions begin with
    the first."""
    if name.endswith("position_embeddings.weight"):
        return lambda x: x[first_position(config, row) :]
    if found := next((change for ending, change in row.changed.items() if name.endswith(ending)), None):
        return lambda x: found(x, config)
    if row.by_head and ".query_key_value." in name:
        return lambda x: apart(x, config, row)
    if not row.interleaved or not (".q_proj." in name or ".k_proj." in name):
        return lambda x: x
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    return lambda x: neighbours(x, heads, rotated_size(config))


def neighbours(rows: np.ndarray, heads: int, size: int) -> np.ndarray:
    """Of each head the rows that are turned together, side by side; ``size`` of them are turned, the first."""
    found = rows.reshape(heads, -1, *rows.shape[1:])
    turned = found[:, :size].reshape(heads, 2, size // 2, *rows.shape[1:]).swapaxes(1, 2)
    return np.concatenate([turned.reshape(found[:, :size].shape), found[:, size:]], 1).reshape(rows.shape)


def apart(rows: np.ndarray, config: Any, row: Architecture) -> np.ndarray:
    """All queries, then all keys, then all values, of rows that lie head by head of the keys: queries, key, value."""
    count = row.derived.get("add_head_count_kv")
    keys = count(config) if count else config.num_attention_heads
    size, shape = head_size(config), rows.shape[1:]
    heads = rows.reshape(keys, -1, size, *shape)
    return np.concatenate([part.reshape(-1, *shape) for part in (heads[:, :-2], heads[:, -2], heads[:, -1])])
