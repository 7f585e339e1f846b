"""What a GGUF file has of tensors that llama.cpp keeps otherwise than transformers: arrays, by the configuration.

A change works on the numbers of a tensor and on its codes and scales alike, so it only moves rows (or whole heads of
columns); what computes (``-exp``) is for tensors that are never quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

Change = Callable[[np.ndarray, Any], np.ndarray]


def same(x: np.ndarray, _: Any) -> np.ndarray:
    """What only has another name."""
    return x


def decay(x: np.ndarray, _: Any) -> np.ndarray:
    """The factor of a state's decay, of its logarithm."""
    return -np.exp(x)


def column(x: np.ndarray, _: Any) -> np.ndarray:
    """A number a head [heads] as [heads, 1]."""
    return x.reshape(-1, 1)


def decay_column(x: np.ndarray, config: Any) -> np.ndarray:
    """``decay`` a head."""
    return column(decay(x, config), config)


def in_groups(count: str) -> Change:
    """A norm of groups, a row a group; ``count`` is the key of the configuration that says how many."""
    return lambda x, config: x.reshape(getattr(config, count), -1)


def halves(heads: str, x: np.ndarray, config: Any) -> np.ndarray:
    """Of each head the rows that are turned together, half of the turned ones apart; they lie side by side."""
    found = x.reshape(getattr(config, heads), -1, *x.shape[1:])
    part = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    size = int(found.shape[1] * part)
    turned = found[:, :size].reshape(len(found), size // 2, 2, *x.shape[1:]).swapaxes(1, 2)
    return np.concatenate([turned.reshape(found[:, :size].shape), found[:, size:]], 1).reshape(x.shape)


HALVES = {
    f"{name}.{slot}": partial(halves, heads)
    for name, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads"))
    for slot in ("weight", "bias")
}


def first_half(x: np.ndarray, _: Any) -> np.ndarray:
    """The first half of the rows."""
    return x[: len(x) // 2]


def second_half(x: np.ndarray, _: Any) -> np.ndarray:
    """The second half of the rows."""
    return x[len(x) // 2 :]


def of_latent(keys: bool, x: np.ndarray, config: Any) -> np.ndarray:
    """What makes keys, or values, of what is behind the latent part, head by head; keys are turned."""
    heads = x.reshape(config.num_attention_heads, -1, x.shape[-1])
    size = config.qk_nope_head_dim
    return heads[:, :size].swapaxes(1, 2) if keys else heads[:, size:]


ABSORBED = {"kv_b_proj.weight": {"attn_k_b": partial(of_latent, True), "attn_v_b": partial(of_latent, False)}}


def third(number: int) -> Change:
    """A third of the rows of a convolution [rows, 1, width]."""
    return lambda x, _: np.split(x, 3)[number].reshape(len(x) // 3, 1, -1)


def by_head(which: slice, x: np.ndarray, config: Any) -> np.ndarray:
    """Of rows that lie head by head of the keys (queries, keys, values, gates of each) some of these four, each as a
    whole behind the other."""
    keys, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // keys * config.linear_value_head_dim
    heads = x.reshape(keys, 2 * (key + value), *x.shape[1:])
    parts = np.split(heads, (key, 2 * key, 2 * key + value), 1)
    return np.concatenate([part.reshape(-1, *x.shape[1:]) for part in parts[which]])


QKV, GATE = partial(by_head, slice(0, 3)), partial(by_head, slice(3, 4))


def for_all_words(x: np.ndarray, config: Any) -> np.ndarray:
    """A table of fewer words than the vocabulary has: the others have its first row, as Gemma 3n reads it."""
    return np.concatenate([x, np.repeat(x[:1], config.vocab_size - len(x), 0)])


def tiled(x: np.ndarray, config: Any) -> np.ndarray:
    """Rows of heads of values, those of a key's head together: the first of every key's, the second of every key's, ...

    Columns likewise, where ``x`` is the transposed of such."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    heads = x.reshape(keys, values // keys, len(x) // values, *x.shape[1:])
    return heads.swapaxes(0, 1).reshape(x.shape)


def tiled_decay(x: np.ndarray, config: Any) -> np.ndarray:
    """``decay`` of heads of values."""
    return tiled(decay(x, config), config)


def tiled_behind(x: np.ndarray, config: Any) -> np.ndarray:
    """Rows of queries and keys, which stay, and of heads of values."""
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([x[:first], tiled(x[first:], config)])


def tiled_across(x: np.ndarray, config: Any) -> np.ndarray:
    """Columns of heads of values; of a block of numbers each, where they are scales."""
    return tiled(np.ascontiguousarray(x.T), config).T
