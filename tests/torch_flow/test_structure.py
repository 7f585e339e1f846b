"""The structure of small random models, against what their architectures are known to be."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import DataError
from quark.torch.structure import NormGroup, Structure, find_structure

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZES, "intermediate_size": 128}
GROUPED = {**WIDE, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 16}
SMALL = {"vocab_size": 128, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
QKV = {"input_layernorm": "self_attn.q_proj self_attn.k_proj self_attn.v_proj"}
GATED = {**QKV, "post_attention_layernorm": "mlp.gate_proj mlp.up_proj"}
VALUE = ("self_attn.v_proj", "self_attn.o_proj")
UP = ("mlp.up_proj", "mlp.down_proj")
# settings, path of the blocks, norm → layers in a block, final norm, pairs with the first and the last channel
ARCHITECTURES: dict[str, tuple[dict[str, Any], str, dict[str, str], str, dict[tuple[str, str], tuple[int, int]]]] = {
    "Llama": (WIDE, "model.layers", GATED, "model.norm", {VALUE: (0, 63), UP: (0, 127)}),
    "Mistral": (GROUPED, "model.layers", GATED, "model.norm", {VALUE: (0, 31), UP: (0, 127)}),
    "Qwen2": (GROUPED, "model.layers", GATED, "model.norm", {VALUE: (0, 31), UP: (0, 127)}),
    "Qwen3": (HEADS, "model.layers", GATED, "model.norm", {VALUE: (0, 31), UP: (0, 127)}),
    "Gemma": (HEADS, "model.layers", GATED, "model.norm", {VALUE: (0, 31), UP: (0, 127)}),
    "Gemma2": (
        HEADS, "model.layers", {**QKV, "pre_feedforward_layernorm": "mlp.gate_proj mlp.up_proj"}, "model.norm",
        {VALUE: (0, 31), UP: (0, 127)},
    ),
    "Mixtral": ({**GROUPED, "num_local_experts": 4}, "model.layers", QKV, "model.norm", {VALUE: (0, 31)}),
    "Phi": (
        WIDE, "model.layers", {"input_layernorm": f"{QKV['input_layernorm']} mlp.fc1"}, "model.final_layernorm",
        {("self_attn.v_proj", "self_attn.dense"): (0, 63)},
    ),
    "Phi3": (
        {**GROUPED, "pad_token_id": 0, "eos_token_id": 1}, "model.layers",
        {"input_layernorm": "self_attn.qkv_proj", "post_attention_layernorm": "mlp.gate_up_proj"}, "model.norm",
        {("self_attn.qkv_proj", "self_attn.o_proj"): (96, 127), ("mlp.gate_up_proj", "mlp.down_proj"): (128, 255)},
    ),
    "OPT": (
        {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}, "model.decoder.layers",
        {"self_attn_layer_norm": QKV["input_layernorm"], "final_layer_norm": "fc1"}, "model.decoder.final_layer_norm",
        {("self_attn.v_proj", "self_attn.out_proj"): (0, 63), ("fc1", "fc2"): (0, 127)},
    ),
    "GPT2": (
        {**SMALL, "n_embd": 64, "n_positions": 64}, "transformer.h", {"ln_1": "attn.c_attn", "ln_2": "mlp.c_fc"},
        "transformer.ln_f", {("attn.c_attn", "attn.c_proj"): (128, 191)},
    ),
    "GPTNeoX": (
        WIDE, "gpt_neox.layers",
        {"input_layernorm": "attention.query_key_value", "post_attention_layernorm": "mlp.dense_h_to_4h"},
        "gpt_neox.final_layer_norm", {("attention.query_key_value", "attention.dense"): (32, 191)},
    ),
    "Bloom": (
        {**SMALL, "hidden_size": 64}, "transformer.h",
        {"input_layernorm": "self_attention.query_key_value", "post_attention_layernorm": "mlp.dense_h_to_4h"},
        "transformer.ln_f", {("self_attention.query_key_value", "self_attention.dense"): (32, 191)},
    ),
    "Falcon": (
        SIZES, "transformer.h", {"input_layernorm": "self_attention.query_key_value mlp.dense_h_to_4h"},
        "transformer.ln_f", {("self_attention.query_key_value", "self_attention.dense"): (80, 95)},
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    cls = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model = cls(cls.config_class(**ARCHITECTURES[name][0])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter))
    return model


@pytest.fixture(scope="module", params=ARCHITECTURES)
def found(request: pytest.FixtureRequest) -> tuple[str, nn.Module, Structure]:
    model = build(request.param)
    before = copy.deepcopy(model.state_dict())
    structure = find_structure(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return request.param, model, structure


def test_norms_and_what_reads_them(found: tuple[str, nn.Module, Structure]) -> None:
    name, _, structure = found
    _, path, norms, last, _ = ARCHITECTURES[name]
    offset = 1.0 if name.startswith("Gemma") else 0.0
    expected = [
        NormGroup(f"{path}.{k}.{norm}", tuple(f"{path}.{k}.{layer}" for layer in layers.split()), offset, f"{path}.{k}")
        for k in range(2)
        for norm, layers in norms.items()
    ]
    assert structure.blocks == path
    assert sorted(structure.groups, key=str) == sorted([*expected, NormGroup(last, ("lm_head",), offset)], key=str)


def test_pairs_and_their_channels(found: tuple[str, nn.Module, Structure]) -> None:
    name, _, structure = found
    _, path, _, _, pairs = ARCHITECTURES[name]
    ends = {(pair.source, pair.target): (int(pair.channels[0]), int(pair.channels[-1])) for pair in structure.pairs}
    assert ends == {(f"{path}.{k}.{a}", f"{path}.{k}.{b}"): both for k in range(2) for (a, b), both in pairs.items()}


def test_folding_along_the_structure_keeps_the_answers(found: tuple[str, nn.Module, Structure]) -> None:
    """The meaning of groups and pairs, by the weights themselves, with scales that are not powers of two."""
    _, model, structure = found
    modules, ids = (
        dict(model.named_modules()),
        torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(4)),
    )
    conv1d = lambda module: type(module).__name__ == "Conv1D"  # noqa: E731
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        for module in modules.values():  # a head that is tied to the embedding must not drag it along
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.clone())
        for group in structure.groups:
            norm = modules[group.norm]
            s = 0.5 + torch.rand(norm.weight.shape, generator=generator)
            norm.weight.copy_((norm.weight + group.offset) / s - group.offset)
            if getattr(norm, "bias", None) is not None:
                norm.bias.div_(s)
            for layer in group.linears:
                weight = modules[layer].weight
                weight.mul_(s[:, None] if conv1d(modules[layer]) else s)
        for pair in structure.pairs:
            source, target = modules[pair.source], modules[pair.target]
            s = torch.ones(source.weight.shape[1 if conv1d(source) else 0])
            s[pair.channels] = 0.5 + torch.rand(len(s), generator=generator)[pair.channels]
            source.weight.div_(s if conv1d(source) else s[:, None])
            if source.bias is not None:
                source.bias.div_(s)
            target.weight.mul_(s[pair.channels, None] if conv1d(target) else s[pair.channels])
        after = model(input_ids=ids).logits
    assert not torch.equal(after, before)
    assert torch.allclose(after, before, atol=2e-4 * float(before.abs().max()))


class Experts(nn.Module):
    """A router and experts, of which each token takes one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict({k: nn.Linear(width, width) for k in ("in1", "out1")}) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).reshape(-1, x.shape[-1])
        choice, out = self.router(h).argmax(-1).clamp(max=2), torch.zeros_like(h)  # the last expert is never reached
        for k, expert in enumerate(self.experts):
            rows = choice == k
            out[rows] = expert["out1"](expert["in1"](h[rows]).relu())
        return x + out.reshape(x.shape)


class Stack(nn.Module):
    """Blocks on floats."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_experts() -> None:
    torch.manual_seed(0)
    model = Stack(Experts(), Experts())
    structure = find_structure(model, torch.randn(4, 32, 16))
    group = next(group for group in structure.groups if group.block == "blocks.1")
    assert group.norm == "blocks.1.norm"
    assert {"blocks.1.router", *(f"blocks.1.experts.{k}.in1" for k in range(4))} == set(group.linears)
    pairs = {(pair.source, pair.target) for pair in structure.pairs if pair.block == "blocks.1"}
    assert pairs == {(f"blocks.1.experts.{k}.in1", f"blocks.1.experts.{k}.out1") for k in range(4)}


class Leaky(nn.Module):
    """A norm that somebody else reads too, and a layer whose channels are mixed before the next reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return h + self.second(self.first(h).cumsum(-1))


def test_what_is_read_elsewhere_or_mixed_is_not_found() -> None:
    torch.manual_seed(0)
    structure = find_structure(Stack(Leaky(), Leaky()), torch.randn(2, 5, 16))
    assert structure.blocks == "blocks"
    assert structure.groups == () and structure.pairs == ()


class Sometimes(nn.Module):
    """Blocks built alike, one of which hands its norm on past the layer that reads it, or permutes its channels."""

    def __init__(self, leaks: bool = False, turned: bool = False) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.leaks, self.turned = leaks, turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        y = self.first(h)
        return x + self.second(y.flip(-1) if self.turned else y) + (1e-2 * h if self.leaks else 0)


def test_what_is_found_in_a_block_is_proved_in_those_that_are_built_alike() -> None:
    torch.manual_seed(0)
    model = Stack(Sometimes(), Sometimes(leaks=True), Sometimes(turned=True), Sometimes())
    structure = find_structure(model, torch.randn(2, 9, 16))
    assert [group.norm for group in structure.groups] == [f"blocks.{k}.norm" for k in (0, 2, 3)]
    forward = list(range(16))
    assert [pair.channels.tolist() for pair in structure.pairs] == [forward, forward, forward[::-1], forward]


def test_experiments_see_a_short_window_and_one_block_of_a_kind_is_searched() -> None:
    """A padded batch: no experiment runs on more than 64 tokens of it, nor on a masked one; further blocks cost two."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 4})).eval()
    expected = find_structure(model)
    calls: dict[int, list[torch.Tensor]] = {k: [] for k in range(4)}
    for k, block in enumerate(model.model.layers):
        block.register_forward_pre_hook(lambda module, args, k=k: calls[k].append(args[0]))
    ids, mask = torch.randint(1, 128, (3, 200)), torch.ones(3, 200, dtype=torch.long)
    ids[:, :150], mask[:, :150] = 0, 0
    ids[1, 100:150], mask[1, 100:150] = 7, 1
    found = find_structure(model, {"input_ids": ids, "attention_mask": mask})
    assert [replace(pair, channels=None) for pair in found.pairs] == [replace(p, channels=None) for p in expected.pairs]
    assert all(torch.equal(a.channels, b.channels) for a, b in zip(found.pairs, expected.pairs, strict=True))
    assert found.groups == expected.groups
    assert {x.shape[:2] for x in calls[0]} == {(1, 64), (1, 1)}
    start = model.get_input_embeddings()(ids[1:2, 100:164])
    assert all(torch.equal(x, start) for x in calls[0] if x.shape[1] == 64)
    counts = [len(calls[k]) for k in range(4)]  # two experiments each; the rest is the way of the samples
    assert counts[1] == counts[2] <= 8 and counts[3] <= 8 and counts[0] > 2 * counts[1]


def test_a_model_without_blocks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    structure = find_structure(model, torch.randn(64, 8))
    assert structure.blocks == ""
    assert structure.groups == (NormGroup("0", ("1",)),)
    assert [(pair.source, pair.target) for pair in structure.pairs] == [("1", "3")]


def test_no_sample_can_be_made() -> None:
    with pytest.raises(DataError, match="give a sample"):
        find_structure(Stack(Leaky()))
