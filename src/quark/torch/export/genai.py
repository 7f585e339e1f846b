"""``genai_config.json``: what onnxruntime-genai needs beside a graph with a cache.

Its type ``decoder`` asks nothing of an architecture: what a layer does is in the graph, and only names, sizes and the
settings of the search are told. Layers with 4- and 8-bit weights compute in float32, as they did when the model was
evaluated; without that setting ONNX Runtime rounds their inputs to int8 by its own choice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quark.errors import ModelError
from quark.torch.export.onnx_decoder import caches_said, check_decoder, check_kinds, past_of

CONFIG = "genai_config.json"
EXACT = {"session.qdq_matmulnbits_accuracy_level": "1"}  # 1: float32
#: Fields of the generation settings that its search has too.
SEARCH = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "num_beams", "no_repeat_ngram_size")
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


#: Names in the graph, as ``quark.torch.export.onnx_decoder`` gives them.
INPUTS = {
    "input_ids": "input_ids",
    "attention_mask": "attention_mask",
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
}
OUTPUTS = {
    "logits": "logits",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}


def write_config(model: nn.Module, folder: Path, graph: Path) -> None:
    """Write ``genai_config.json`` into ``folder``.

    Args:
        model: a decoder of transformers.
        folder: where the graph will be read from.
        graph: the file, with inputs and outputs as :mod:`quark.torch.export.onnx_decoder` names them.

    Raises:
        ModelError: a configuration that does not say how long a text may be.
    """
    outer: Any = model.config
    config = outer.get_text_config()
    settings = getattr(model, "generation_config", None) or config
    end = first_of("eos_token_id", settings, config, default=0)
    length = length_of(config)
    padding = end[0] if isinstance(end, list) else end
    heads, size = caches_of(config)
    found = {
        "model": {
            "type": "decoder",
            "bos_token_id": first_of("bos_token_id", settings, config, default=0),
            "eos_token_id": end,
            "pad_token_id": first_of("pad_token_id", settings, config, default=padding),
            "vocab_size": config.vocab_size,
            "context_length": length,
            "decoder": {
                "session_options": {**EXACT, "provider_options": []},
                "filename": graph.name,
                "head_size": size,
                "hidden_size": config.hidden_size,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": cached_layers(graph),
                "inputs": INPUTS,
                "outputs": OUTPUTS,
            },
        },
        "search": {
            **{name: value for name in SEARCH if (value := getattr(settings, name, None)) is not None},
            "max_length": length,
            "past_present_share_buffer": False,  # the graph returns keys and values of all tokens
        },
    }
    (folder / CONFIG).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def length_of(config: Any) -> int:
    """The longest text.

    Raises:
        ModelError: a configuration that does not say it.
    """
    length = next((found for name in LENGTHS if (found := getattr(config, name, None))), None)
    if length is None:
        raise ModelError(
            f"use_cache: config.json does not say the longest text ({', '.join(LENGTHS)}), which onnxruntime-genai is "
            f"told; export it without use_cache"
        )
    return int(length)


def caches_of(config: Any) -> tuple[int, int]:
    """Heads of keys and values, and the size of one."""
    heads = config.num_attention_heads
    return (
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def check_runs(model: nn.Module) -> None:
    """Refuse, before any work, a model that onnxruntime-genai does not run: one token is computed, where there are
    weights, to see what the model keeps of it.

    Args:
        model: float, or a skeleton.

    Raises:
        ModelError: no keys and values of all tokens, or in other shapes than the configuration says.
    """
    check_decoder(model)
    outer: Any = model.config
    config = outer.get_text_config()
    if not hasattr(config, "num_attention_heads"):
        raise ModelError(f"use_cache: {type(model).__name__} has no attention to keep; export it without use_cache")
    if any(parameter.is_meta for parameter in model.parameters()):
        check_kinds(model, caches_said(outer))
        length_of(config)
        return
    wanted, past = caches_of(config), past_of(model, torch.zeros(1, 1, dtype=torch.int64))
    length_of(config)
    for number, tensor in enumerate(past):
        if (found := (tensor.shape[1], tensor.shape[3])) != wanted:
            raise ModelError(
                f"use_cache: layer {number // 2} keeps {found[0]} heads of {found[1]} numbers a token, and "
                f"onnxruntime-genai has one shape for all layers, {wanted[0]} heads of {wanted[1]} by config.json; "
                f"export it without use_cache"
            )


def first_of(name: str, *sources: Any, default: Any = None) -> Any:
    """The field of the first source that has it."""
    return next((value for source in sources if (value := getattr(source, name, None)) is not None), default)


def cached_layers(path: Path) -> int:
    """How many layers of the graph have keys and values."""
    import onnx

    inputs = onnx.load(path, load_external_data=False).graph.input
    return sum(value.name.startswith("past_key_values.") and value.name.endswith(".key") for value in inputs)
