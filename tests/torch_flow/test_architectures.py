"""Small random models of the architectures of transformers, through the flow: nothing about them is in a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Int8PerChannelSpec, Int8PerTensorSpec, QConfig, QLayerConfig

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 128}
GROUPED = {**WIDE, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
ARCHITECTURES: dict[str, tuple[dict[str, Any], int]] = {  # and the number of layers that can be quantized
    "GPT2LMHeadModel": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}, 9),
    "LlamaForCausalLM": (WIDE, 15),
    "MistralForCausalLM": (GROUPED, 15),
    "OPTForCausalLM": ({**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}, 13),
    "GPTNeoXForCausalLM": (WIDE, 9),
    "BloomForCausalLM": ({"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}, 9),
    "FalconForCausalLM": (SIZES, 9),
    "PhiForCausalLM": (WIDE, 13),
    "GemmaForCausalLM": (HEADS, 15),
    "Qwen2ForCausalLM": (GROUPED, 15),
    "Qwen3ForCausalLM": (HEADS, 15),
    "BertModel": (WIDE, 13),
}
CHANNEL = Int8PerChannelSpec(0, True).to_quantization_spec()
STRATEGIES = {
    "static": QLayerConfig(input_tensors=Int8PerTensorSpec().to_quantization_spec(), weight=CHANNEL),
    "per token": QLayerConfig(
        input_tensors=Int8PerChannelSpec(1, True, is_dynamic=True).to_quantization_spec(), weight=CHANNEL
    ),
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, name)
    return model(model.config_class(**ARCHITECTURES[name][0])).eval()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture(name: str, strategy: str) -> None:
    model, sample = build(name), {"input_ids": torch.randint(5, 120, (2, 12))}
    run: Callable[[], torch.Tensor] = lambda: model(**sample)[0]  # noqa: E731
    with torch.no_grad():
        before = run()
        ModelQuantizer(QConfig(STRATEGIES[strategy])).quantize_model(model, [sample])
        after = run()
        layers = [module for module in model.modules() if type(module).__name__.startswith("Quant")]
        assert len(layers) == ARCHITECTURES[name][1]
        assert 0 < (after - before).norm() < 0.05 * before.norm()
        ModelQuantizer.freeze(model)
        assert torch.equal(run(), after)
