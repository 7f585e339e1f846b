"""transformers' integration test of quark: models of its hub are small ones that this package quantizes and exports.

The test needs no more of the quantized model than that it is a Llama with int8 weights and activations, exported by
quark; what it compares with words that a model of 8 billion parameters wrote, and what needs a GPU, cannot be run here.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

FLOAT, QUANTIZED = "unsloth/Meta-Llama-3.1-8B-Instruct", "amd/Llama-3.1-8B-Instruct-w-int8-a-int8-sym-test"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
HOME = tempfile.TemporaryDirectory()


@cache
def folders() -> dict[str, str]:
    """Name on the hub -> folder of the stand-in."""
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=4, **SIZES))
    float_folder, folder = Path(HOME.name) / "float", Path(HOME.name) / "quantized"
    model.save_pretrained(float_folder)
    tokens = [{"input_ids": torch.randint(0, 128, (1, 16))}]
    config = LLMTemplate.for_model(model).get_config("int8")
    export_safetensors(ModelQuantizer(config).quantize_model(model, tokens), folder)
    return {FLOAT: str(float_folder), QUANTIZED: str(folder)}


def pytest_configure(config: Any) -> None:
    """Names of the hub become folders in every loader that the test calls."""
    for loader in (transformers.AutoConfig, transformers.AutoModelForCausalLM):
        plain = loader.from_pretrained

        def found(name: str, *positional: Any, plain: Any = plain, **given: Any) -> Any:
            return plain(folders().get(name, name), *positional, **given)

        loader.from_pretrained = found
