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
from quark.torch.export.gguf_numbers import keys_by_layer
from quark.torch.export.gguf_row import Architecture
from quark.torch.export.gguf_table import ARCHITECTURES, BIASES, NUMBERS

#: Settings of YaRN that llama.cpp has as constants, and architectures that differ in them by no more than it allows.
YARN: dict[str, tuple[object, tuple[str, ...]]] = {
    "beta_fast": (32, ()), "beta_slow": (1, ()), "truncate": (True, ("gpt-oss",)),
}  # fmt: skip
OTHERS = "--format onnx for onnxruntime-genai, quark or compressed-tensors for transformers and vLLM"
DYNAMIC = (  # by the definition of its frequencies
    "it changes with the length of a text, which no file for llama.cpp says. Up to max_position_embeddings ({length}) "
    "it is the plain one: for such texts set rope_type to 'default' in config.json, or use another format"
)
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "activation")
NO_EPS, NONE_LEAST = ("qwen2vl",), 1e-6  # no epsilon in norms, whatever the file says
LEAST = 1e-5  # an epsilon of norms that answers as 1e-6 does, to within 1e-4
#: A least step of states, which transformers has in texts but not in the words that follow: moves answers by 1e-3.
LEAST_STEP = 0.001
PROPORTIONAL, LONG = "proportional", "longrope"
DIVIDED = ("llama3", PROPORTIONAL)  # kinds that are told by what frequencies are divided by
PARTS = {"mimo_v2_flash": 0.334}  # of each head that are rotated where a configuration does not say; the others: whole
STILL = 1e30  # what a frequency is divided by that turns nothing
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


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


def head_size(config: Any) -> int:
    """Numbers in a head of attention."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    if getattr(config, "is_heterogeneous", False):  # layers have heads of their own
        config = config.per_layer_config[0]
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_of(config: Any) -> dict[str, Any]:
    """What the configuration says about rotary embedding; of several kinds of layers that of the full ones."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in found:
        found = dict(found["full_attention"])
    return {"rope_theta": getattr(config, "rope_theta", 10000.0), **found}


def rotated_size(config: Any) -> int:
    """Numbers of a head that are rotated."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.qk_rope_head_dim)
    rope = rope_of(config)
    if rope.get("rope_type") == PROPORTIONAL:  # the others have a frequency of 0
        return head_size(config)
    return int(head_size(config) * part_of(rope, config))


def part_of(rope: dict[str, Any], config: Any) -> float:
    """The part of each head that is rotated."""
    told = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    return float(PARTS.get(getattr(config, "model_type", ""), 1.0) if told is None else told)


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
    local = local_rope(config)
    part = part_of(rope_of(config), config) if row.partial else 1.0
    plain = (local.get("rope_type", "default"), part_of(local, config)) == ("default", part)
    if (row.around or name in ("gemma3n", "gemma4", "mimo2")) and local and not plain:
        raise ModelError(f"the rotary embedding of sliding layers is {local}, and no file for llama.cpp says it")
    if (
        name in ("gemma3", "gemma-embedding")
        and local
        and (local.get("rope_theta"), local.get("rope_type", "default")) != (1e4, "default")
    ):
        raise ModelError(
            f"the rotary embedding of sliding layers is {local}; llama.cpp has rope_theta 10000 in {name!r}"
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
    if row.derived.get("add_head_count_kv") is keys_by_layer and len({*map(bool, keys_by_layer(config))}) < 2:
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


def local_rope(config: Any) -> dict[str, Any]:
    """What the configuration says about rotary embedding of layers that see a window, where it is another one."""
    return dict((getattr(config, "rope_parameters", None) or {}).get("sliding_attention") or {})


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


def add_rope(writer: Any, config: Any, row: Architecture) -> None:
    """The rotary embedding.

    Raises:
        ModelError: a scaling that the file cannot say.
    """
    import gguf

    rope = rope_of(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    kind = rope.get("rope_type", "default")
    if kind == "linear" and row.yarn_unit:
        raise ModelError(
            f"the rotary embedding is scaled by 'linear', which llama.cpp takes for 'yarn' in {row.name!r}"
        )
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "yarn":
        add_yarn(writer, rope, row)
    elif kind in DIVIDED and not row.divisors:
        raise ModelError(f"the rotary embedding is scaled by {kind!r}, which llama.cpp does not read in {row.name!r}")
    elif kind == LONG and row.long:
        add_longrope(writer, rope, config.max_position_embeddings)
    elif kind not in ("default", *DIVIDED):
        known = "'default', 'linear', 'yarn' and 'llama3' can be written. Use another format"
        why = DYNAMIC.format(length=config.max_position_embeddings) if kind == "dynamic" else known
        raise ModelError(f"the rotary embedding is scaled by {kind!r}; {why} ({OTHERS})")


def add_longrope(writer: Any, rope: dict[str, Any], length: int) -> None:
    """LongRoPE: its factors are tensors."""
    import gguf

    original = int(rope["original_max_position_embeddings"])
    factor = rope.get("factor") or length / original
    scale = rope.get("attention_factor") or (
        math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    )
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(scale)


def add_yarn(writer: Any, rope: dict[str, Any], row: Architecture) -> None:
    """YaRN.

    Raises:
        ModelError: a setting that llama.cpp does not know.
    """
    import gguf

    told = {key: rope[key] for key in ("mscale", "mscale_all_dim", "attention_factor") if rope.get(key) is not None}
    scale = told.get("mscale_all_dim")
    if told != ({"mscale": scale, "mscale_all_dim": scale} if row.yarn_unit and scale is not None else {}):
        raise ModelError(
            f"the rotary embedding is scaled by 'yarn' with {told}, which cannot be written for {row.name!r}"
        )
    if row.yarn_unit and scale is None:
        raise ModelError(
            f"the rotary embedding is scaled by 'yarn' without mscale and mscale_all_dim, and llama.cpp takes both for "
            f"granted in {row.name!r}"
        )
    for key, (wanted, names) in YARN.items():
        if row.name not in names and rope.get(key, wanted) not in (wanted, None):
            raise ModelError(
                f"the rotary embedding is scaled by 'yarn' with {key}={rope[key]!r}, and llama.cpp has {wanted!r}, "
                f"whatever the file says"
            )
    if scale is not None:
        writer.add_rope_scaling_yarn_log_mul(row.yarn_unit * float(scale))
    if rope.get("llama_4_scaling_beta") is not None:
        writer.add_attn_temperature_scale(float(rope["llama_4_scaling_beta"]))
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(float(rope["factor"]))
    writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
    for key, method in (
        ("beta_fast", "add_rope_scaling_yarn_beta_fast"),
        ("beta_slow", "add_rope_scaling_yarn_beta_slow"),
    ):
        if rope.get(key) is not None:
            getattr(writer, method)(float(rope[key]))


def long_factors(config: Any) -> dict[str, np.ndarray]:
    """The factors of LongRoPE by the names that they have in a file; none: it is another embedding."""
    rope = rope_of(config)
    kinds = ("long", "short") if rope.get("rope_type") == LONG else ()
    return {f"rope_factors_{kind}": np.array(rope[f"{kind}_factor"], np.float32) for kind in kinds}


def rope_factors(config: Any, row: Architecture) -> np.ndarray | None:
    """What frequencies are divided by, one a pair; None: they are not."""
    rope = rope_of(config)
    if rope.get("rope_type") not in DIVIDED and row.name != "gemma4":
        return None
    size = row.derived["add_key_length"](config) if "add_key_length" in row.derived else rotated_size(config)
    if rope.get("rope_type") not in DIVIDED:  # llama.cpp wants numbers there
        return np.ones(size // 2, np.float32)
    if rope["rope_type"] == PROPORTIONAL:  # pairs behind a part of the head are not turned
        turned = int(rope.get("partial_rotary_factor", 1.0) * size // 2)
        return np.where(np.arange(size // 2) < turned, rope.get("factor", 1.0), STILL).astype(np.float32)
    factor, low, high, length = (float(rope[key]) for key in LLAMA3)
    frequency = 1.0 / rope["rope_theta"] ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((length * frequency / (2 * np.pi) - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


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
