"""Graph mode: embeddings, and what belongs to eager mode: the reason, and that the way which is named works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.torch_flow.export.networks import llama
from torch import nn

from quark.errors import ConfigError
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    GPTQConfig,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
)
from quark.torch.quantization.config.type import QuantFlow, QuantizationMode

CHANNEL = Int8PerChannelSpec(0, symmetric=True).to_quantization_spec()
TENSOR = Int8PerTensorSpec().to_quantization_spec()
GRAPH = QuantizationMode.fx_graph_mode
WEIGHTS = QLayerConfig(weight=CHANNEL)
CACHED = QLayerConfig(output_tensors=TENSOR)


class Attention(nn.Module):
    """Words, and attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16, padding_idx=0)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v


def network() -> Attention:
    torch.manual_seed(0)
    return Attention().eval()


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 32, (3, 7), generator=generator) for _ in range(4)]


def quantized(mode: QuantizationMode, **fields: Any) -> nn.Module:
    return ModelQuantizer(QConfig(WEIGHTS, quant_mode=mode, **fields)).quantize_model(network(), samples())


@torch.no_grad()
@pytest.mark.parametrize(
    "fields", [{"layer_type_quant_config": {nn.Embedding: WEIGHTS}}, {"layer_quant_config": {"words": WEIGHTS}}]
)
def test_an_embedding_is_quantized_where_it_is_named(fields: dict[str, Any]) -> None:
    graph, eager = quantized(GRAPH, **fields), quantized(QuantizationMode.eager_mode, **fields)
    plain = quantized(GRAPH)
    words = graph.get_submodule("words")
    rows = network().words.weight
    step = rows.abs().amax(1, keepdim=True).clamp_min(1e-9) / 127.5  # the padding row is zero
    found = words(torch.arange(32))
    assert torch.allclose(found, (rows / step).round().clamp(-128, 127) * step, atol=1e-6)
    assert 0 < (found - rows).abs().max() < step.max()
    assert words.padding_idx == 0
    for ids in samples():
        assert torch.allclose(graph(ids), eager(ids), atol=1e-6)
        assert not torch.equal(graph(ids), plain(ids))
    assert torch.equal(plain.get_submodule("words")(torch.arange(32)), rows)  # not by the global configuration


@pytest.mark.parametrize(
    ("field", "value", "way"),
    [
        ("kv_cache_quant_config", {"*k_proj": CACHED}, r"no cache object.*layer_quant_config=\{'\*k_proj'"),
        ("softmax_quant_spec", TENSOR, r"an operator as any other.*layer_quant_config=\{'\*softmax'"),
        ("algo_config", [GPTQConfig()], r"a graph has no blocks; quant_mode=eager_mode has it"),
        ("shared_scale_groups", [["q_proj", "k_proj"]], r"scales of their own; quant_mode=eager_mode has it"),
    ],
)
def test_fields_of_eager_mode_are_refused_with_the_reason(field: str, value: Any, way: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} belongs to eager_mode.*{way}"):
        quantized(GRAPH, **{field: value})


@torch.no_grad()
def test_keys_and_values_in_a_graph_are_outputs_of_their_projections() -> None:
    both = QLayerConfig(weight=CHANNEL, output_tensors=TENSOR)
    graph = quantized(GRAPH, layer_quant_config={"*k_proj": both, "*v_proj": both})
    eager = quantized(QuantizationMode.eager_mode, kv_cache_quant_config={"*k_proj": CACHED, "*v_proj": CACHED})
    plain = quantized(GRAPH)
    for ids in samples():
        assert torch.allclose(graph(ids), eager(ids), atol=1e-6)
        assert not torch.equal(graph(ids), plain(ids))


@torch.no_grad()
def test_probabilities_in_a_graph_are_outputs_of_an_operator() -> None:
    graph = quantized(GRAPH, layer_quant_config={"*softmax": QLayerConfig(output_tensors=TENSOR)})
    node = next(node for node in graph.graph.nodes if "softmax" in node.name and node.op == "call_module")
    seen: list[torch.Tensor] = []
    point = graph.get_submodule(str(node.target))
    with_hook = point.register_forward_hook(lambda module, args, result: seen.append(result))
    graph(samples()[0])
    with_hook.remove()
    codes = seen[0] / point.quantizer.scale
    assert torch.allclose(codes, codes.round(), atol=1e-3)
    assert len(codes.round().unique()) > 4


def test_per_block_is_refused_with_what_works() -> None:
    with pytest.raises(ConfigError, match=r"quant_flow=per_block is not available.*direct_quantize_checkpoint\(source"):
        ModelQuantizer(QConfig(WEIGHTS, quant_flow=QuantFlow.per_block))


@pytest.mark.slow
@torch.no_grad()
def test_a_language_model_becomes_a_graph_without_its_cache() -> None:
    model = llama(num_hidden_layers=1)
    ids = torch.arange(24).reshape(2, 12)
    config = QConfig(
        QLayerConfig(weight=CHANNEL, input_tensors=TENSOR),
        layer_type_quant_config={nn.Embedding: WEIGHTS},
        quant_mode=GRAPH,
    )
    graph = ModelQuantizer(config).quantize_model(model, [ids])
    expected = model(ids).logits
    assert model.config.use_cache is True
    assert 0 < (graph(ids).logits - expected).norm() < 0.1 * expected.norm()
