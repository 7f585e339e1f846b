"""The table of GGUF architectures against its two sides: transformers, asked here, and what llama.cpp's source says."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from tests.torch_flow.export.test_gguf_architectures import FAMILIES, SIZES

from quark.errors import ModelError
from quark.torch.export.gguf_architectures import check_network
from quark.torch.export.gguf_table import ARCHITECTURES

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# llama.cpp, llama_model_rope_type: the others pair a number with the one half a head further
PAIRS_NEIGHBOURS = {
    *("llama", "granite", "granitemoe", "smollm3", "arcee", "command-r", "cohere2", "ernie4_5", "olmo", "mistral3"),
    *("deepseek2", "glm4"),
}
READS_WINDOW = {"gemma2", "gemma3", "gpt-oss", "cohere2", "olmo2"}  # LLM_KV_ATTENTION_SLIDING_WINDOW
READS_DIVISORS = {"llama", "granite", "granitemoe", "arcee", "exaone4"}  # rope_freqs.weight
FIXED = {  # norm_w of build_moe_ffn, and tensors that llama.cpp does not load
    *(("qwen2_moe", "norm_topk_prob", False), ("qwen3_moe", "norm_topk_prob", True)),
    *(("olmoe", "norm_topk_prob", False), ("cohere", "use_qk_norm", False), ("phi", "qk_layernorm", False)),
}
families = pytest.mark.parametrize("family", FAMILIES)


@cache
def defaults(family: str) -> Any:
    """The configuration that transformers has for a model type."""
    return getattr(transformers, f"{FAMILIES[family][0]}{'TextConfig' if family == 'gemma3_text' else 'Config'}")()


def code(family: str) -> Any:
    """The module of transformers that computes it."""
    return inspect.getmodule(getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM"))


def norm_of(family: str) -> torch.nn.Module:
    """A normalization of the model, with all parameters zero."""
    name, extra = FAMILIES[family]
    config = type(defaults(family))(**{**SIZES, **extra})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    norm = [module for module in model.modules() if "Norm" in type(module).__name__][-1].to_empty(device="cpu")
    for value in norm.parameters():
        torch.nn.init.zeros_(value)
    return norm


@families
def test_queries_and_keys_are_interleaved_where_the_two_programs_pair_other_numbers(family: str) -> None:
    if ARCHITECTURES[family].name not in PAIRS_NEIGHBOURS:
        assert not ARCHITECTURES[family].interleaved
        return
    ending = "_interleave" if getattr(defaults(family), "rope_interleave", False) else ""
    one = torch.eye(8)[:1].reshape(1, 1, 1, 8)
    turned = getattr(code(family), f"apply_rotary_pos_emb{ending}")(one, one, torch.zeros(1, 1, 8), torch.ones(1, 1, 8))
    partner = int(turned[0].flatten().abs().argmax())  # of number 0, after a quarter of a turn
    assert ARCHITECTURES[family].interleaved is (partner == 4 and not ending)


@families
def test_norms_are_shifted_where_a_weight_of_zero_keeps_the_input(family: str) -> None:
    if family == "olmo":  # its norm has no weight
        assert not ARCHITECTURES[family].shifted
        return
    norm = norm_of(family)
    found = norm(torch.arange(1.0, 1.0 + SIZES["hidden_size"])[None])
    assert ARCHITECTURES[family].shifted is bool(found.any())


@families
def test_layers_that_see_all_tokens_are_those_of_the_default_configuration(family: str) -> None:
    row, kinds = ARCHITECTURES[family], getattr(defaults(family), "layer_types", None) or []
    full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
    if row.period:
        assert full == list(range(row.period, len(kinds) + 1, row.period))
    assert row.window is bool(row.name in READS_WINDOW and full and len(full) < len(kinds))


@families
def test_the_default_activation_is_one_that_is_computed(family: str) -> None:
    config = defaults(family)
    act = getattr(config, "hidden_activation", None) or config.hidden_act
    assert act in ARCHITECTURES[family].activations


@families
def test_scores_of_experts_are_made_as_in_transformers(family: str) -> None:
    source = inspect.getsource(code(family))
    experts = "topk" in source
    by_sigmoid = experts and any(word in source for word in ("router_logits.sigmoid()", "sigmoid(router_logits"))
    assert ARCHITECTURES[family].gating == ("SIGMOID" if by_sigmoid else "")


@families
def test_frequencies_are_divided_where_the_program_reads_by_what(family: str) -> None:
    assert ARCHITECTURES[family].divisors is (ARCHITECTURES[family].name in READS_DIVISORS)


@families
def test_a_part_of_a_head_is_rotated_where_transformers_can(family: str) -> None:
    assert ARCHITECTURES[family].partial is ("partial_rotary_factor" in inspect.getsource(code(family)))


@pytest.mark.parametrize(("family", "key", "value"), sorted(FIXED))
def test_what_llama_cpp_takes_for_granted(family: str, key: str, value: bool) -> None:
    config = type(defaults(family))(**{key: value})
    check_network(config, ARCHITECTURES[family])
    setattr(config, key, not value)
    with pytest.raises(ModelError, match=f"{key} is {not value}"):
        check_network(config, ARCHITECTURES[family])
