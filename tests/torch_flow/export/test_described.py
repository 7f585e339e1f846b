"""What a file says about layers and caches, and which networks llama.cpp computes as they are: one condition a row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from quark.errors import ModelError
from quark.torch.export import described
from quark.torch.export.gguf_architectures import check_network, slides
from quark.torch.export.gguf_table import ARCHITECTURES
from quark.torch.quantization.config.config import FP8E4M3PerTensorSpec, QConfig, QLayerConfig, RotationConfig
from quark.torch.quantization.config.config import QTensorConfig as Spec
from quark.torch.quantization.config.type import Dtype, QSchemeType

FP8, FP8_DYNAMIC = (FP8E4M3PerTensorSpec(is_dynamic=on).to_quantization_spec() for on in (False, True))
FP8_CHANNELS = Spec(Dtype.fp8_e4m3, qscheme=QSchemeType.per_channel, ch_axis=1)
INT8, INT4 = (Spec(Dtype[name], qscheme=QSchemeType.per_tensor) for name in ("int8", "int4"))


class Layers(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj, self.v_proj, self.words = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 4)


def names(**outside: str) -> Any:
    return SimpleNamespace(layer=lambda name: outside.get(name, name))


def test_patterns_that_do_not_fit_outside_are_spelled_out() -> None:
    own, other = QLayerConfig(weight=INT8), QLayerConfig(weight=INT4)
    config = QConfig(QLayerConfig(weight=INT8), layer_quant_config={"k_*": own, "*_proj": other})
    found = described.outside_layers(config, Layers(), names(k_proj="attention.key"))
    chosen = described.choose(next(one for one in described.find_candidates(Layers()) if one.name == "k_proj"), config)[
        0
    ]
    expected = {"attention.key": chosen, "k_*": own, "*_proj": other}
    assert found == expected and list(found)[-1] == "*_proj"
    assert described.outside_layers(QConfig(own), Layers(), names()) == {}
    same = described.outside_layers(config, Layers(), names())
    assert same == {"k_*": own, "*_proj": other}


def test_outputs_of_the_layers_that_are_cached() -> None:
    caches = {"*k_proj": QLayerConfig(output_tensors=FP8), "*nothing": QLayerConfig(output_tensors=FP8)}
    config = QConfig(
        QLayerConfig(weight=INT8),
        layer_quant_config={"k_proj": QLayerConfig(weight=INT4)},
        kv_cache_quant_config=caches,
    )
    found = described.told_layers(config, Layers(), names())
    assert found == {
        "k_proj": QLayerConfig(weight=INT4, output_tensors=FP8),
        "*k_proj": QLayerConfig(weight=INT4, output_tensors=FP8),
        "*nothing": QLayerConfig(weight=INT8, output_tensors=FP8),
    }
    behind = replace(config, kv_cache_post_rope=True)  # a reader of ours takes the outputs away again
    assert described.told_layers(behind, Layers(), names()) == found and described.cache_group(behind) == [*caches]
    told = described.without_cached(replace(behind, layer_quant_config={**behind.layer_quant_config, **found}))
    assert told.layer_quant_config == {**config.layer_quant_config, "*k_proj": QLayerConfig(weight=INT4)}


def test_layers_of_several_schemes_that_one_pattern_caches_are_told_by_name() -> None:
    """The pattern would give all of them the scheme of the first: no file of two schemes and a cache was readable."""
    model = nn.ModuleDict({"a": Layers(), "b": Layers()})
    own, usual, cache = QLayerConfig(weight=INT4), QLayerConfig(weight=INT8), QLayerConfig(output_tensors=FP8)
    config = QConfig(usual, layer_quant_config={"a.*": own}, kv_cache_quant_config={"*k_proj": cache})
    found = described.told_layers(config, model, names())
    cached = {"a.k_proj": replace(own, output_tensors=FP8), "b.k_proj": replace(usual, output_tensors=FP8)}
    assert found == {"a.*": own, **cached}
    back = described.without_cached(replace(config, layer_quant_config=found))
    assert back.layer_quant_config == {"a.*": own, "a.k_proj": own, "b.k_proj": usual}


@pytest.mark.parametrize(
    ("fields", "pattern"), [({}, "*qkv_proj"), ({"algo_config": [RotationConfig(r1=False, r3=True)]}, "*k_proj")]
)
def test_caches_behind_rope_that_no_words_of_programs_say(fields: dict[str, Any], pattern: str) -> None:
    """One layer makes keys and values, or keys are turned; before RoPE outputs are outputs."""
    caches = {pattern: QLayerConfig(output_tensors=FP8)}
    behind = QConfig(QLayerConfig(weight=INT8), kv_cache_quant_config=caches, kv_cache_post_rope=True, **fields)
    assert described.told_layers(behind, Layers(), names()) == {} and described.cache_group(behind) == []
    assert described.cache_group(replace(behind, kv_cache_post_rope=False)) == [pattern]


@pytest.mark.parametrize(
    ("cache", "known"), [(FP8, True), (FP8_CHANNELS, False), (INT8, False), ([FP8, FP8_DYNAMIC], False)]
)
def test_caches_that_programs_have_kernels_for(cache: Any, known: bool) -> None:
    caches = {"*k_proj": QLayerConfig(output_tensors=FP8), "*v_proj": QLayerConfig(output_tensors=cache)}
    config: Any = SimpleNamespace(kv_cache_post_rope=False, kv_cache_quant_config=caches, algo_config=None)
    assert described.cache_group(config) == (["*k_proj", "*v_proj"] if known else [])


def test_float_matrices() -> None:
    assert list(described.float_layers(Layers(), {"k_proj"})) == ["v_proj"]
    assert list(described.float_layers(nn.Sequential(nn.BatchNorm1d(3), nn.Conv1d(2, 2, 1)), ())) == ["1"]


# ---- llama.cpp -------------------------------------------------------------------------------------------------------

PLAIN = {
    "num_hidden_layers": 12,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
}
SMOL = {"no_rope_layers": [int((number + 1) % 4 != 0) for number in range(12)]}
EVERY = {
    period: ["full_attention" if (k + 1) % period == 0 else "sliding_attention" for k in range(12)] for period in (2, 6)
}
GELU = {"hidden_act": "gelu_pytorch_tanh"}
LOCAL = {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}
NETWORKS: list[tuple[str, dict[str, Any], str | None]] = [
    ("llama", {}, None),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("gemma", GELU, None),
    ("gemma", {}, "hidden_act is 'silu'"),
    ("gemma", {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, None),
    ("llama", {"head_dim": 32}, None),
    ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "a part of each head is rotated"),
    ("qwen2", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "a part of each head is rotated"),
    ("stablelm", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, None),
    ("olmoe", {"norm_topk_prob": False, "clip_qkv": None}, None),
    ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is True"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads is not num_attention_heads"),
    ("olmo2", {"num_key_value_heads": 2}, None),
    ("qwen3_moe", {"norm_topk_prob": True}, None),
    ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ("smollm3", SMOL, None),
    ("smollm3", {"no_rope_layers": [1] * 12}, "rotates all but every fourth"),
    ("gemma2", {**GELU, "layer_types": EVERY[2], "query_pre_attn_scalar": 16}, None),
    ("gemma2", {**GELU, "layer_types": EVERY[6], "query_pre_attn_scalar": 16}, "every layer number 2"),
    ("gemma2", {**GELU, "layer_types": EVERY[2], "query_pre_attn_scalar": 17}, "query_pre_attn_scalar is 17"),
    ("gemma3_text", {**GELU, "layer_types": EVERY[6], "query_pre_attn_scalar": 16}, None),
    ("gemma3_text", {**GELU, "layer_types": EVERY[6], "query_pre_attn_scalar": 16, **LOCAL}, None),
    (
        "gemma3_text",
        {
            **GELU,
            "layer_types": EVERY[6],
            "query_pre_attn_scalar": 16,
            "rope_parameters": {"sliding_attention": {"rope_theta": 1e5}},
        },
        "the rotary embedding of sliding layers",
    ),
    (
        "gemma3_text",
        {
            **GELU,
            "layer_types": EVERY[6],
            "query_pre_attn_scalar": 16,
            "rope_parameters": {"sliding_attention": {"rope_theta": 1e4, "rope_type": "linear"}},
        },
        "the rotary embedding of sliding layers",
    ),
    (
        "gemma2",
        {
            **GELU,
            "layer_types": EVERY[2],
            "query_pre_attn_scalar": 16,
            "rope_parameters": {"rope_theta": 1e5, "sliding_attention": {"rope_theta": 1e5}},
        },
        None,
    ),
]


@pytest.mark.parametrize("case", range(len(NETWORKS)), ids=lambda k: f"{NETWORKS[k][0]} {k}")
def test_networks_that_llama_cpp_computes(case: int) -> None:
    family, changes, told = NETWORKS[case]
    given = {"rope_parameters": {"rope_theta": 1e4}, **PLAIN, **changes}
    given["rope_parameters"] = {"rope_theta": 1e4, **given["rope_parameters"]}
    config = SimpleNamespace(**given)
    if told is None:
        check_network(config, ARCHITECTURES[family])
        return
    with pytest.raises(ModelError, match=told):
        check_network(config, ARCHITECTURES[family])


#: Layers, hidden size, heads, size of a head, query_pre_attn_scalar: as Google published them.
GEMMAS = {
    "gemma2 2B": ("gemma2", 2, 26, 2304, 8, 256, 256),
    "gemma2 9B": ("gemma2", 2, 42, 3584, 16, 256, 256),
    "gemma2 27B": ("gemma2", 2, 46, 4608, 32, 128, 144),
    "gemma3 1B": ("gemma3_text", 6, 26, 1152, 4, 256, 256),
    "gemma3 27B": ("gemma3_text", 6, 62, 5376, 32, 128, 168),
}


@pytest.mark.parametrize("name", GEMMAS)
def test_how_the_gemmas_scale_their_queries(name: str) -> None:
    """llama.cpp divides by the root of hidden size over heads in those of 27 B, of the size of a head in all others."""
    family, period, layers, hidden, heads, head, scalar = GEMMAS[name]
    kinds = ["full_attention" if (k + 1) % period == 0 else "sliding_attention" for k in range(layers)]
    given = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "layer_types": kinds}
    given |= {"head_dim": head, "num_key_value_heads": heads, "rope_parameters": {"rope_theta": 1e4}, **GELU}
    check_network(SimpleNamespace(**given, query_pre_attn_scalar=scalar), ARCHITECTURES[family])
    other = head if scalar != head else hidden / heads
    with pytest.raises(ModelError, match="query_pre_attn_scalar"):
        check_network(SimpleNamespace(**given, query_pre_attn_scalar=other), ARCHITECTURES[family])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"sliding_window": 32}, True),
        ({"sliding_window": 32, "use_sliding_window": False}, False),
        ({"sliding_window": None, "layer_types": ["sliding_attention"]}, False),
        ({"sliding_window": 32, "layer_types": ["full_attention"]}, False),
        (
            {"sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": False},
            True,
        ),
    ],
)
def test_whether_some_layers_see_a_window(fields: dict[str, Any], expected: bool) -> None:
    assert slides(SimpleNamespace(**fields)) == expected
