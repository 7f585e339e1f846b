"""Rotary embedding in a GGUF file: what a configuration says of it, what llama.cpp can be told."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quark.errors import ModelError
from quark.torch.export.gguf_row import Architecture

#: Settings of YaRN that llama.cpp has as constants, and architectures that differ in them by no more than it allows.
YARN: dict[str, tuple[object, tuple[str, ...]]] = {
    "beta_fast": (32, ()), "beta_slow": (1, ()), "truncate": (True, ("gpt-oss",)),
}  # fmt: skip
OTHERS = "--format onnx for onnxruntime-genai, quark or compressed-tensors for transformers and vLLM"
DYNAMIC = (  # by the definition of its frequencies
    "it changes with the length of a text, which no file for llama.cpp says. Up to max_position_embeddings ({length}) "
    "it is the plain one: for such texts set rope_type to 'default' in config.json, or use another format"
)
PROPORTIONAL, LONG = "proportional", "longrope"
DIVIDED = ("llama3", PROPORTIONAL)  # kinds that are told by what frequencies are divided by
PARTS = {
    "mimo_v2_flash": 0.334
}  # of each head that are rotated where neither it nor a scaling is told; the others: whole
UNSCALED = ("glm-dsa",)  # where linear scaling and YaRN gave other answers
STILL = 1e30  # what a frequency is divided by that turns nothing
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


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
    plain = rope.get("rope_type", "default") == "default"
    return float((PARTS.get(getattr(config, "model_type", ""), 1.0) if plain else 1.0) if told is None else told)


def local_rope(config: Any) -> dict[str, Any]:
    """What the configuration says about rotary embedding of layers that see a window, where it is another one."""
    return dict((getattr(config, "rope_parameters", None) or {}).get("sliding_attention") or {})


def add_rope(writer: Any, config: Any, row: Architecture) -> None:
    """The rotary embedding.

    Raises:
        ModelError: a scaling that the file cannot say.
    """
    import gguf

    rope = rope_of(config)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    kind = rope.get("rope_type", "default")
    if kind != "default" and row.name in UNSCALED:
        raise ModelError(f"the rotary embedding is scaled by {kind!r}, which llama.cpp does otherwise in {row.name!r}")
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
