"""Parts of the exports at the first and the last of what they take, each asked directly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quark.config import file_formats as formats
from quark.errors import ConfigError, ModelError
from quark.torch.config.schemes import NAMES
from quark.torch.export import (
    custom_modes,
    described,
    gguf_tensors,
    gguf_wordpiece,
    left_out,
    model_files,
    onnx_decoder,
    stacked_blocks,
    vllm_schemes,
)
from quark.torch.export.gguf_tensors import FileLoss
from quark.torch.export.shards import item_of


class Network(nn.Module):
    """Two layers of a model, and a third that transformers does not load."""

    _keys_to_ignore_on_load_unexpected = (r"model\.layers\.\d+",)
    config: Any = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=2))


@pytest.mark.parametrize(("name", "behind"), [
    ("model.layers.1.up.weight", False), ("model.layers.2.up.weight", True), ("model.layers.10.up.weight", True),
    ("model.norm.weight", False),
])  # fmt: skip
def test_layers_from_the_number_of_layers_on_are_heads(name: str, behind: bool) -> None:
    assert left_out.is_prediction(Network(), name) is behind


def test_of_heads_only_matrices_are_layers() -> None:
    model = Network()
    forms = {"a.weight": (2, 3), "norm.weight": (3,), "a.bias": (2, 2), "experts.weight": (2, 3, 4)}
    model.__dict__[left_out.GIVEN] = [item_of(name, torch.zeros(shape)) for name, shape in forms.items()]
    assert left_out.left_out_layers(model) == ["a", "experts"]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_tokens_need_a_row_each(size: int) -> None:
    """Of a vocabulary whose last id is 2."""
    data = {
        "model": {"vocab": {"[UNK]": 0, "a": 1, "##b": 2}},
        "normalizer": {
            "type": "BertNormalizer", "lowercase": True, "strip_accents": None, "clean_text": True,
            "handle_chinese_chars": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    }  # fmt: skip
    if size < 3:
        with pytest.raises(ModelError, match="has the token 2, and the embedding of the model 2 rows"):
            gguf_wordpiece.wordpiece_tokens(Path("t.json"), data, size)
        return
    kind, texts, scores, types = gguf_wordpiece.wordpiece_tokens(Path("t.json"), data, size)
    assert (kind, texts, scores) == ("bert", ["\u2581[UNK]", "\u2581a", "b"], [0.0] * 3)
    assert Counter(types) == {1: 3}


@pytest.mark.parametrize(("shape", "written"), [
    ((1,), (1,)), ((5,), (5,)), ((5, 1), (5,)), ((1, 5), (5,)), ((5, 3), (5, 3)), ((2, 1, 3), (2, 3)),
])  # fmt: skip
def test_axes_of_one_number_are_left_out_of_matrices(shape: tuple[int, ...], written: tuple[int, ...]) -> None:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.zeros(shape)))
    row = SimpleNamespace(shifted=False, factor_of=lambda *_: None)
    choice: Any = SimpleNamespace(config=None, row=row, is_float=False, float_type="F32", type_of=lambda name: None)
    entry = gguf_tensors.entry_of("weight", ("weight", lambda x: x), model.weight, model, choice, FileLoss())
    assert entry.shape == written


@pytest.mark.parametrize("is_float", [True, False])
@pytest.mark.parametrize("name", ["fc.weight", "words.weight", "lm_head.weight", "fc.bias", "norm.weight"])
def test_only_linear_layers_of_float_models_take_a_type(name: str, is_float: bool) -> None:
    """Embeddings, heads and layers beside quantized ones are float: F16; what is no matrix is F32."""
    model = nn.ModuleDict({"fc": nn.Linear(32, 2), "lm_head": nn.Linear(32, 2), "words": nn.Embedding(2, 32)})
    model["norm"] = nn.LayerNorm(32)
    value = model.get_parameter(name)
    row = SimpleNamespace(shifted=False, across={}, factor_of=lambda *_: None, parts_of=lambda *_: {})
    types = {"type_of": lambda name: "Q8_0"}
    choice: Any = SimpleNamespace(config=None, row=row, is_float=is_float, float_type="F16", **types)
    entry = gguf_tensors.entry_of(name, (name, lambda x: x), value, model, choice, FileLoss())
    assert entry.kind == ("F32" if value.dim() == 1 else "Q8_0" if name == "fc.weight" and is_float else "F16")


@pytest.mark.parametrize(("blocks", "above", "expected"), [
    (True, True, True), (True, False, False), (True, None, False), (False, True, False),
])  # fmt: skip
def test_nvfp4_is_blocks_under_a_scale_of_the_tensor(blocks: bool, above: bool | None, expected: bool) -> None:
    format = SimpleNamespace() if above is None else SimpleNamespace(tensor_scale=above)
    stage: Any = SimpleNamespace(is_block=blocks, format=format)
    assert vllm_schemes.is_nvfp4(stage) is expected


def test_blocks_of_experts_are_e2m1_under_powers_of_two() -> None:
    """Low nibbles first; OCP MX: E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, E8M0 2^(code - 127)."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(2)
    parts = {
        "blocks": packed.reshape(1, 1, 16).repeat(1, 2, 1),
        "scales": torch.tensor([[126, 129]], dtype=torch.uint8),
    }
    half = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([half, -half]).repeat(2)
    found = stacked_blocks.block_values(parts)
    assert found.shape == (1, 64) and torch.equal(found[0], torch.cat([values / 2, values * 4]))


@pytest.mark.parametrize(("told", "left"), [
    ({"ignored_layers": ["a"]}, ["a"]), ({"modules_to_not_convert": ["b"]}, ["b"]), ({}, []),
    ({"ignored_layers": ["a"], "modules_to_not_convert": ["b"]}, ["a"]),
])  # fmt: skip
def test_fp8_in_blocks_as_its_own_files_say_it(told: dict[str, Any], left: list[str]) -> None:
    """DeepSeek's form: static scales for blocks of a weight, and of inputs a dynamic one for a row of a block."""
    data = {"quant_method": "fp8", "weight_block_size": [128, 64], "activation_scheme": "dynamic", **told}
    config = custom_modes.from_fp8_blocks(data)
    weight, inputs = config.global_quant_config.weight, config.global_quant_config.input_tensors
    assert (tuple(weight.block_size), weight.symmetric, weight.is_dynamic) == ((128, 64), True, False)
    assert (inputs.group_size, inputs.is_dynamic, inputs.ch_axis) == (64, True, -1)
    assert config.exclude == left
    for wrong in ({"activation_scheme": None}, {"scale_fmt": "ue8m0"}):
        with pytest.raises(ConfigError, match="only activation_scheme 'dynamic' with float scales"):
            custom_modes.from_fp8_blocks({**data, **wrong})


def test_matrices_that_are_not_quantized_are_float_layers() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "conv": nn.Conv1d(2, 2, 1), "table": nn.Embedding(3, 2),
            "norm": nn.LayerNorm(2),
        }
    )  # fmt: skip
    assert list(described.float_layers(model, ["b"])) == ["a", "conv"]


@pytest.mark.parametrize("program", formats.PROGRAMS)
def test_a_program_gets_its_own_format_or_the_first_that_it_reads(program: str) -> None:
    own = formats.PROGRAMS[program].format or "quark"
    order = [own, *(format for format in formats.FORMATS if format != own)]
    names = [name for name in NAMES if name in formats.tried()]
    for schemes in [[name] for name in names] + [[a, b] for a, b in zip(names, names[7:], strict=False)]:
        able = [one for one in order if all(formats.works(scheme, one, program) for scheme in schemes)]
        if able:
            assert formats.format_for([*schemes, "of our own"], program) == able[0]
        else:
            with pytest.raises(ConfigError):
                formats.format_for(schemes, program)


@pytest.fixture(scope="module")
def decoder() -> Any:
    """A decoder of two layers, with two heads of keys that have eight numbers each."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, vocab_size=50, num_hidden_layers=2, max_position_embeddings=32)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_decoder_with_its_cache_says_what_it_says_without(decoder: Any) -> None:
    """Several texts from the words that are given, the first of their tokens in the cache."""
    texts, new, old = onnx_decoder.BATCH, onnx_decoder.NEW, onnx_decoder.PAST
    traced = onnx_decoder.with_cache(decoder, (torch.tensor([[7, 3, 11]]),))
    ids, mask, past = traced.arguments
    names = [f"{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    assert traced.input_names == ("input_ids", "attention_mask", *(f"past_key_values.{name}" for name in names))
    assert traced.output_names == ("logits", *(f"present.{name}" for name in names))
    assert tuple(ids.shape) == (texts, new) and torch.equal(mask, torch.ones(texts, old + new, dtype=torch.int64))
    assert [tuple(one.shape) for one in past] == [(texts, 2, old, 8)] * 4
    rows, cached = traced.dynamic_shapes[0], traced.dynamic_shapes[2]
    assert traced.dynamic_shapes[1] == rows and set(rows) == {0, 1} and [set(one) for one in cached] == [{0, 2}] * 4
    count = texts * (old + new)
    words = torch.tensor([7, 3, 11] * count)[:count].reshape(texts, old + new)
    assert torch.equal(ids, words[:, old:])
    with torch.no_grad():
        logits, present = traced.model(ids, mask, past)
        whole = decoder(words, use_cache=True)
    torch.testing.assert_close(logits, whole.logits[:, old:], atol=1e-5, rtol=1e-5)
    assert [tuple(one.shape) for one in present] == [(texts, 2, old + new, 8)] * 4
    torch.testing.assert_close(present[1], whole.past_key_values.layers[0].values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "given", [(), (3,), (torch.tensor([1, 2]),), (torch.zeros(1, 2),), (torch.zeros(0, 2).long(),)]
)
def test_what_is_no_token_ids_makes_no_cache(given: tuple[Any, ...], decoder: Any) -> None:
    with pytest.raises(ConfigError, match="use_cache: input_args must be token ids"):
        onnx_decoder.with_cache(decoder, given)


def test_a_model_computes_in_the_type_of_its_first_floats() -> None:
    """Whole numbers and floats of one byte, which are codes, say nothing."""
    kinds = (torch.int64, torch.float8_e4m3fn, torch.uint8, torch.float16, torch.float32)
    model = nn.Module()
    for number, kind in enumerate(kinds):
        model.register_parameter(str(number), nn.Parameter(torch.zeros(2, dtype=kind), requires_grad=False))
    assert model_files.float_dtype(model) is torch.float16
