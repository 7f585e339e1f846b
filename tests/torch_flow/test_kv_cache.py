"""Quantized attention caches: what is in them, that generation keeps them, and whose scales they have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.consumers import tiny

from quark.errors import ConfigError, DataError, ModelError
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export.api import export_compressed_tensors, export_safetensors, import_model_from_safetensors
from quark.torch.files.foreign import quantized_model
from quark.torch.kv_cache import ARGUMENTS, argument_of, exported_scales, role_of
from quark.torch.quantization.config.config import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    RotationConfig,
    Uint8PerTensorSpec,
)

transformers = pytest.importorskip("transformers")

HEADS, HEAD = 2, 16
FP8 = FP8E4M3PerTensorSpec()
TOKEN = Int8PerChannelSpec(1, True, is_dynamic=True)
INT4_HEAD = Int4PerGroupSpec(-1, HEAD, is_dynamic=True)
CHANNEL = Int8PerChannelSpec(-1, True)
FORMATS = {"fp8": FP8, "int8": Int8PerTensorSpec(), "int8 per token": TOKEN, "int4 per head": INT4_HEAD}
FORMATS |= {"int8 per channel": CHANNEL, "mxfp4": OCP_MXFP4Spec(-1)}


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": HEADS, "eos_token_id": None, "initializer_range": 0.1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **heads, **changes})).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(5, 120, (2, 16), generator=torch.Generator().manual_seed(1))


def cache(keys: Any, values: Any = None) -> dict[str, QLayerConfig]:
    keys, values = (QLayerConfig(output_tensors=spec.to_quantization_spec()) for spec in (keys, values or keys))
    return {"*k_proj": keys, "*v_proj": values}


def quantize(model: Any, ids: torch.Tensor, config: dict[str, QLayerConfig], **fields: Any) -> Any:
    config = QConfig(QLayerConfig(), kv_cache_quant_config=config, **fields)
    return ModelQuantizer(config).quantize_model(copy.deepcopy(model), [ids])


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def symmetric(x: torch.Tensor, half: float, low: int, high: int, axes: tuple[int, ...]) -> torch.Tensor:
    """Integers of [low, high] under amax / half over ``axes``, from the definition."""
    scale = x.abs().amax(axes, keepdim=True) / half
    return (x / scale).round().clamp(low, high) * scale


ORACLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of keys [batch, heads, tokens, head size]
    "int8": lambda x: symmetric(x, 127.5, -128, 127, (0, 1, 2, 3)),
    "int8 per token": lambda x: symmetric(x, 127.5, -128, 127, (1, 3)),
    "int4 per head": lambda x: symmetric(x, 7.5, -8, 7, (3,)),
    "int8 per channel": lambda x: symmetric(x, 127.5, -128, 127, (0, 2)),
    "fp8": lambda x: (x / (x.abs().max() / 448)).to(torch.float8_e4m3fn).float() * (x.abs().max() / 448),
}


@pytest.mark.parametrize("name", ORACLES)
@torch.no_grad()
def test_the_cache_holds_quantized_keys_after_rope(name: str, model: Any, ids: torch.Tensor) -> None:
    """The keys and values of the first layer, whose input is that of the float model."""
    quantized = quantize(model, ids, cache(FORMATS[name]), kv_cache_post_rope=True)
    before, after = (net(ids, use_cache=True).past_key_values.layers[0] for net in (model, quantized))
    for plain, stored in ((before.keys, after.keys), (before.values, after.values)):
        torch.testing.assert_close(stored, ORACLES[name](plain), rtol=1e-5, atol=1e-6)
        assert not torch.equal(stored, plain)


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix, orthonormal."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / size**0.5


R3 = {"algo_config": [RotationConfig(r1=False, r3=True)], "kv_cache_post_rope": True}


@pytest.mark.parametrize("name", ORACLES)
@torch.no_grad()
def test_r3_quantizes_turned_keys(name: str, model: Any, ids: torch.Tensor) -> None:
    """Keys k become Q(k H) H^T, values stay as they were."""
    quantized = quantize(model, ids, cache(FORMATS[name]), **R3)
    before, after = (net(ids, use_cache=True).past_key_values.layers[0] for net in (model, quantized))
    turn = hadamard(before.keys.shape[-1])
    expected = ORACLES[name](before.keys @ turn) @ turn.T
    assert error(after.keys, expected) < 2e-3  # ties that the order of sums decides
    assert error(after.keys, ORACLES[name](before.keys)) > 5e-3
    torch.testing.assert_close(after.values, ORACLES[name](before.values), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_r3_helps_keys_with_outliers_and_comes_back_from_a_file(model: Any, ids: torch.Tensor, tmp_path: Any) -> None:
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:  # a frequency pair of each head thirty times as large in keys, as small in queries
        width = layer.self_attn.head_dim
        for k in (1, 1 + width // 2):
            layer.self_attn.k_proj.weight[k::width] *= 30
            layer.self_attn.q_proj.weight[k::width] /= 30
    keys = {"*k_proj": cache(FORMATS["int4 per head"])["*k_proj"]}
    plain, turned = (quantize(twin, ids, keys, **fields) for fields in ({"kv_cache_post_rope": True}, R3))
    wanted = twin(ids).logits
    assert error(turned(ids).logits, wanted) < 0.8 * error(plain(ids).logits, wanted)
    export_safetensors(turned, tmp_path / "r3")
    again = import_model_from_safetensors(copy.deepcopy(twin), tmp_path / "r3")
    assert torch.equal(again(ids).logits, turned(ids).logits)
    with pytest.raises(ModelError, match="rotated keys"):
        export_compressed_tensors(turned, tmp_path / "other")


def test_r3_needs_a_cache_behind_rope(model: Any, ids: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="r3 turns keys"):
        quantize(model, ids, cache(FORMATS["int8"]), algo_config=R3["algo_config"])


@pytest.mark.parametrize("post_rope", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_fifty_tokens_one_by_one_are_those_of_one_pass(
    name: str, post_rope: bool, model: Any, ids: torch.Tensor
) -> None:
    samples = torch.randint(128, (32, 66), generator=torch.Generator().manual_seed(2))
    quantized = quantize(model, samples, cache(FORMATS[name]), kv_cache_post_rope=post_rope)
    made = quantized.generate(ids, max_new_tokens=50, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    assert made.past_key_values.get_seq_length() == 16 + 49
    at_once = quantized(made.sequences, use_cache=False).logits[:, 15:-1]
    assert (at_once.argmax(-1) == made.sequences[:, 16:]).float().mean() > 0.95  # rounding of near ties may differ
    float_logits = model(made.sequences).logits[:, 15:-1]
    assert 0 < error(at_once, float_logits) < (0.6 if "4" in name else 0.08)


@torch.no_grad()
def test_every_cache_class_and_none_give_the_same(model: Any, ids: torch.Tensor) -> None:
    quantized = quantize(model, ids, cache(TOKEN), kv_cache_post_rope=True)
    expected = quantized(ids, use_cache=False).logits
    caches = [None, transformers.DynamicCache(), transformers.StaticCache(quantized.config, max_cache_len=32)]
    for given in caches:
        torch.testing.assert_close(quantized(ids, past_key_values=given).logits, expected, rtol=1e-4, atol=1e-4)
    assert caches[1].get_seq_length() == 16


@torch.no_grad()
def test_before_rope_is_the_output_of_the_projections(model: Any, ids: torch.Tensor) -> None:
    quantized = quantize(model, ids, cache(TOKEN))
    x = torch.randn(2, 5, 64)
    for role in ("k_proj", "v_proj"):
        plain = getattr(model.model.layers[0].self_attn, role)(x)
        stored = getattr(quantized.model.layers[0].self_attn, role)(x)
        torch.testing.assert_close(stored, symmetric(plain, 127.5, -128, 127, (2,)), rtol=1e-5, atol=1e-6)


def test_keys_and_values_differ_where_they_are_told_to(model: Any, ids: torch.Tensor) -> None:
    quantized = quantize(model, ids, cache(CHANNEL, FP8), kv_cache_post_rope=True)
    scales = exported_scales(quantized)
    assert scales["model.layers.0.self_attn.k_proj.output_scale"].shape == (HEADS * HEAD,)
    assert scales["model.layers.1.self_attn.v_proj.output_scale"].shape == ()


@pytest.mark.parametrize("post_rope", [False, True])
def test_a_group_shares_the_largest_scale_and_none_is_below_the_least(
    post_rope: bool, model: Any, ids: torch.Tensor
) -> None:
    alone = exported_scales(quantize(model, ids, cache(FP8), kv_cache_post_rope=post_rope))
    fields: dict[str, Any] = {"kv_cache_group": ["*k_proj", "*v_proj"], "kv_cache_post_rope": post_rope}
    merged = exported_scales(quantize(model, ids, cache(FP8), **fields))
    assert len(alone) == len(merged) == 4
    for layer in (0, 1):
        k, v = (f"model.layers.{layer}.self_attn.{role}.output_scale" for role in ("k_proj", "v_proj"))
        assert alone[k] != alone[v]
        assert merged[k] == merged[v] == torch.maximum(alone[k], alone[v])
    least = float(max(alone.values()).item()) * 2
    raised = exported_scales(quantize(model, ids, cache(FP8), min_kv_scale=least, kv_cache_post_rope=post_rope))
    assert all(value.item() == pytest.approx(least) for value in raised.values())


@torch.no_grad()
def test_a_scale_per_head_is_that_of_its_largest_value(model: Any, ids: torch.Tensor) -> None:
    """In the first layer, whose input is that of the float model: amax / 448 of each head."""
    quantized = quantize(model, ids, cache(FP8E4M3PerChannelSpec(-1)), kv_cache_per_head=True)
    made = model(ids, use_cache=True).past_key_values.layers[0]
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    before = model.model.layers[0].self_attn.k_proj(hidden).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
    for role, values in (("k_proj", before), ("v_proj", made.values)):
        found = exported_scales(quantized)[f"model.layers.0.self_attn.{role}.output_scale"].reshape(HEADS, HEAD)
        amax = values.abs().amax((0, 2, 3))
        assert amax[0] != amax[1]
        torch.testing.assert_close(found, (amax / 448)[:, None].expand(HEADS, HEAD))
    after = quantized(ids, use_cache=True).past_key_values.layers[0].values
    scale = (made.values.abs().amax((0, 2, 3)) / 448)[None, :, None, None]
    torch.testing.assert_close(after, (made.values / scale).to(torch.float8_e4m3fn).float() * scale)


def test_heads_of_unknown_length_are_refused(model: Any, ids: torch.Tensor) -> None:
    entries = cache(FP8E4M3PerChannelSpec(-1))
    broken = copy.deepcopy(model)
    broken.model.layers[1].self_attn.head_dim = None
    with pytest.raises(ModelError, match=r"'model\.layers\.1\.self_attn' \(LlamaAttention\) does not tell how long"):
        quantize(broken, ids, entries, kv_cache_per_head=True)
    broken.model.layers[1].self_attn.head_dim = 24
    with pytest.raises(ModelError, match=r"heads of 24 do not divide the 32 outputs of 'model\.layers\.1.*k_proj'"):
        quantize(broken, ids, entries, kv_cache_per_head=True)


@torch.no_grad()
def test_scales_that_are_exported_are_those_that_ran(model: Any, ids: torch.Tensor) -> None:
    quantized = quantize(model, ids, cache(FP8), kv_cache_group=["*k_proj", "*v_proj"], kv_cache_post_rope=True)
    scale = exported_scales(quantized)["model.layers.0.self_attn.k_proj.output_scale"]
    keys = quantized(ids).past_key_values.layers[0].keys
    codes = (keys / scale).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(codes * scale, keys, rtol=1e-6, atol=0)


def test_excluded_projections_keep_their_cache(model: Any, ids: torch.Tensor) -> None:
    weights = QLayerConfig(weight=Int8PerTensorSpec().to_quantization_spec())
    config = QConfig(weights, exclude=["*self_attn*"], kv_cache_quant_config=cache(FP8))
    quantized = ModelQuantizer(config).quantize_model(copy.deepcopy(model), [ids])
    attention = quantized.model.layers[0].self_attn
    assert attention.k_proj.weight_quantizer is None and attention.k_proj.output_quantizer is not None
    assert type(attention.q_proj) is torch.nn.Linear


def test_weights_stay_quantized_where_the_cache_is(model: Any, ids: torch.Tensor) -> None:
    weights = QLayerConfig(weight=Int8PerTensorSpec().to_quantization_spec())
    for post_rope in (False, True):
        config = QConfig(weights, kv_cache_quant_config=cache(FP8), kv_cache_post_rope=post_rope)
        quantized = ModelQuantizer(config).quantize_model(copy.deepcopy(model), [ids])
        projection = quantized.model.layers[0].self_attn.k_proj
        assert projection.weight_quantizer.stage.spec.format == "int8"
        assert (projection.output_quantizer is None) == post_rope


def test_nothing_is_left_behind_by_an_error(model: Any, ids: torch.Tensor) -> None:
    twin = copy.deepcopy(model)
    before = [name for name, _ in twin.named_modules()]
    for samples in ([], None, [torch.full((1, 4), 500)]):
        config = QConfig(QLayerConfig(), kv_cache_quant_config=cache(FP8), kv_cache_post_rope=True)
        with pytest.raises((DataError, IndexError)):
            ModelQuantizer(config).quantize_model(twin, samples)
        assert [name for name, _ in twin.named_modules()] == before
        assert not twin.model.layers[0].self_attn._forward_pre_hooks
    assert torch.equal(twin(ids).logits, model(ids).logits)


def test_quantizing_twice_is_an_error(model: Any, ids: torch.Tensor) -> None:
    quantized = quantize(model, ids, cache(TOKEN), kv_cache_post_rope=True)
    with pytest.raises(ModelError, match="quantized already"):
        quantize(quantized, ids, cache(TOKEN), kv_cache_post_rope=True)


@pytest.mark.parametrize(
    ("spec", "fields", "words"),
    [
        (Int8PerChannelSpec(-1, True, is_dynamic=True), {}, "ch_axis=1"),
        (Int8PerTensorSpec(is_dynamic=True), {}, "tokens come one at a time"),
        (Int8PerChannelSpec(1, True), {}, "ch_axis=-1"),
        (TOKEN, {"kv_cache_group": ["*k_proj"]}, "static symmetric per_tensor"),
        (Uint8PerTensorSpec(), {"min_kv_scale": 0.1}, "static symmetric per_tensor"),
        (FP8, {"min_kv_scale": -1.0}, "min_kv_scale"),
        (FP8, {"kv_cache_per_head": True}, "kv_cache_per_head needs static symmetric per_channel"),
        (CHANNEL, {"kv_cache_per_head": True, "kv_cache_group": ["*k_proj"]}, "static symmetric per_tensor"),
    ],
)
def test_what_cannot_work_is_said_when_the_configuration_is_made(spec: Any, fields: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        QConfig(QLayerConfig(), kv_cache_quant_config=cache(spec), **fields)


def test_fields_without_a_cache_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_quant_config says that they are not"):
        QConfig(QLayerConfig(), kv_cache_post_rope=True)
    with pytest.raises(ConfigError, match="output_tensors"):
        QConfig(QLayerConfig(), kv_cache_quant_config={"*k_proj": QLayerConfig()})


def test_patterns_that_do_not_fit_the_model(model: Any, ids: torch.Tensor) -> None:
    entry = QLayerConfig(output_tensors=FP8.to_quantization_spec())
    with pytest.raises(ConfigError, match=r"Did you mean '\*k_proj'"):
        quantize(model, ids, {"k_proj": entry})
    with pytest.raises(ConfigError, match="does not seem"):
        quantize(model, ids, {"*o_proj": entry}, kv_cache_post_rope=True)
    with pytest.raises(ModelError, match="no argument for a cache"):
        quantize(PlainAttention(), ids, {"*k_proj": entry}, kv_cache_post_rope=True)
    with pytest.raises(ConfigError, match="group_size=24 does not divide"):
        quantize(model, ids, cache(Int4PerGroupSpec(-1, 24, is_dynamic=True)))


class PlainAttention(torch.nn.Module):
    """An attention without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.k_proj(x)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((f"a.{last}", "k") for last in ("k_proj", "key", "wk")),
        *((f"a.{last}", "v") for last in ("v_proj", "value", "to_v")),
        *((f"a.{last}", "kv") for last in ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "kv_b_proj")),
        *((f"a.{last}", "") for last in ("q_proj", "o_proj", "up_proj", "out_proj", "query")),
    ],
)
def test_what_a_projection_makes(name: str, expected: str) -> None:
    assert "".join(role_of(name)) == expected


FUSED = {
    "GPT2LMHeadModel": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}, "*c_attn"),
    "FalconForCausalLM": (
        {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "*query_key_value",
    ),
}


@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_fused_projections_after_rope(name: str, ids: torch.Tensor) -> None:
    torch.manual_seed(0)
    fields, glob = FUSED[name]
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**fields, bos_token_id=1, eos_token_id=None)).eval()
    entry = {glob: QLayerConfig(output_tensors=FP8.to_quantization_spec())}
    quantized = quantize(model, ids, entry, kv_cache_post_rope=True)
    made = quantized.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    at_once = quantized(made).logits[:, 15:-1]
    assert torch.equal(at_once.argmax(-1), made[:, 16:])
    assert 0 < error(at_once, model(made).logits[:, 15:-1]) < 0.1
    names = {key.rsplit(".", 1)[-1] for key in exported_scales(quantized)}
    assert names == {"output_scale", "output_scale_2"}


class Keyed(torch.nn.Module):
    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        return x if cache is None else cache.update(x, x, 0)[0]


class Recurrent(torch.nn.Module):
    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        return x if cache is None else cache.update_conv_state(x, 0)


def test_the_name_that_all_caches_have_since_transformers_5_24() -> None:
    assert (argument_of(Keyed()), argument_of(Recurrent()), argument_of(torch.nn.Linear(2, 2))) == ("cache", "", "")


@torch.no_grad()
def test_a_cache_is_quantized_under_its_new_name_too(
    model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5.24 has it: the attention's argument is ``cache``, and a caller may still have the old name."""
    wanted = quantize(model, ids, cache(TOKEN), kv_cache_post_rope=True)(ids).logits
    attention: Any = type(model.model.layers[0].self_attn)
    old = attention.forward
    name = argument_of(model.model.layers[0].self_attn)

    def renamed(self: Any, hidden_states: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
        known = [found for found in (cache, *(kwargs.pop(one, None) for one in ARGUMENTS)) if found is not None]
        assert not known or known[0].update
        return old(self, hidden_states, **{**kwargs, name: known[0] if known else None})

    assert not torch.equal(wanted, model(ids).logits)
    monkeypatch.setattr(attention, "forward", renamed)
    given = transformers.DynamicCache()
    found = quantize(model, ids, cache(TOKEN), kv_cache_post_rope=True)(ids, past_key_values=given).logits
    assert torch.equal(found, wanted) and given.get_seq_length() == 16  # the caller's own, whatever it calls it


@pytest.mark.parametrize("kind", ["bart", "t5gemma2"])
def test_caches_that_no_sample_reached_are_float_in_the_file_too(kind: str, tmp_path: Path) -> None:
    """Attention across an encoder that is not there, a vision tower: folders said that their caches have scales."""
    model = tiny.tiny_model(kind, dict(tiny.model_types())[kind])
    config = LLMTemplate.for_model(model).get_config("int4_wo_32", kv_cache_scheme="fp8")
    inputs = tiny.inputs_of(model)
    quantized = ModelQuantizer(config).quantize_model(model, [inputs])
    export_safetensors(quantized, tmp_path / "q")
    assert torch.equal(tiny.answer(quantized_model(tmp_path / "q"), inputs), tiny.answer(quantized, inputs))
