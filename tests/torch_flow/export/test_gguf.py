"""GGUF files, read back with the gguf package and with transformers."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.torch_flow.export.networks import IDS, logits
from tests.torch_flow.export.programs import loaded_by
from tests.torch_flow.export.test_reload import layer, quantized
from torch import nn

from quark.errors import ConfigError, ModelError
from quark.numerics.ggml import GGML
from quark.torch import LLMTemplate, ModelQuantizer
from quark.torch.export import gguf_vocabulary
from quark.torch.export.api import export_gguf, export_safetensors, import_model_from_safetensors
from quark.torch.export.before_work import check_before_work
from quark.torch.export.gguf_vocabulary import pre_tokenizer
from quark.torch.export.write_as import config_for
from quark.torch.quantization.config.config import (
    FP8E4M3PerTensorSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerGroupSpec,
    OCP_MXFP4Spec,
    QConfig,
    Uint4PerGroupSpec,
)

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
HIDDEN, VOCAB = 256, 300
TYPES = [row.kind for row in GGML.values()]
WORDS = "the quick brown fox jumps over the lazy dog while quantized models answer questions about numbers and scales"
EXACT = {  # scales that float16 holds
    "Q4_0": layer(Int4PerGroupSpec(-1, 32, scale_type="float16")),
    "Q4_0 of groups of 64": layer(Int4PerGroupSpec(-1, 64, scale_type="float16")),
    "Q4_0 of channels": layer(Int4PerChannelSpec(0, scale_type="float16")),
    "Q8_0": layer(Int8PerGroupSpec(-1, 32, scale_type="float16")),
    "MXFP4": layer(OCP_MXFP4Spec(-1, False)),
}
ROUNDED = {"Q4_1": layer(Uint4PerGroupSpec(-1, 32)), "Q4_0 float32 scales": layer(Int4PerGroupSpec(-1, 32))}


def model_of(family: str = "llama", tie: bool = False) -> nn.Module:
    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[family]
    config = getattr(transformers, f"{name}Config")(
        hidden_size=HIDDEN, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=VOCAB, tie_word_embeddings=tie, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                parameter.copy_((torch.randn(parameter.shape, generator=generator) / 12).half())
    return model


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainer = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("sentencepiece")
    trainer.SentencePieceTrainer.train(
        sentence_iterator=iter([WORDS] * 20), model_prefix=str(folder / "tokenizer"), vocab_size=290, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=295, special_tokens=["<|endoftext|>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"})
    )
    return folder


def read(path: Path) -> tuple[dict[str, object], dict[str, object]]:
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}, {t.name: t for t in reader.tensors}


def of_transformers(path: Path) -> nn.Module:
    pytest.importorskip("accelerate")  # transformers opens no GGUF file without it
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("scheme", EXACT)
def test_transformers_computes_the_same(family: str, scheme: str, bpe: Path, tmp_path: Path) -> None:
    model = quantized(model_of(family), QConfig(EXACT[scheme], exclude=["lm_head"]))
    export_gguf(model, tmp_path, family, bpe)
    theirs = logits(of_transformers(tmp_path / f"{family}.gguf"))
    assert torch.allclose(theirs, logits(model), rtol=0, atol=1e-5 * float(theirs.abs().max()))
    loaded_by("GGUF", f"{scheme} ({family})", "gguf", "transformers")


@pytest.mark.parametrize("scheme", ROUNDED)
def test_float16_scales_are_near(scheme: str, sentencepiece: Path, tmp_path: Path) -> None:
    model = quantized(model_of(), QConfig(ROUNDED[scheme], exclude=["lm_head"]))
    export_gguf(model, tmp_path, "llama", sentencepiece)
    theirs = logits(of_transformers(tmp_path / "llama.gguf"))
    assert torch.allclose(theirs, logits(model), rtol=0, atol=5e-3 * float(theirs.abs().max()))
    loaded_by("GGUF", f"{scheme} (llama)", "gguf", "transformers")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *TYPES])
def test_types_of_a_float_model(kind: str, sentencepiece: Path, tmp_path: Path) -> None:
    model = model_of()
    export_gguf(model, tmp_path, "llama", sentencepiece, weight_type=kind)
    fields, tensors = read(tmp_path / "llama.gguf")
    found = tensors["blk.1.ffn_down.weight"]
    assert found.tensor_type.name == kind
    values = gguf.quants.dequantize(found.data, found.tensor_type).reshape(HIDDEN, 512)
    weight = model.model.layers[1].mlp.down_proj.weight.detach().numpy()
    close = {"F32": 0, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 1e-2, "Q6_K": 3e-2, "Q5_K": 6e-2, "Q4_K": 0.1, "Q2_K": 0.4}
    bound = {**close, "Q3_K": 0.3}.get(kind, 0.15)
    assert np.abs(values - weight).max() <= bound * np.abs(weight).max()
    expected = {"F16": "MOSTLY_F16", "F32": "ALL_F32"}.get(
        kind, f"MOSTLY_{kind}{'_S' if kind in ('Q3_K', 'Q4_K', 'Q5_K') else ''}"
    )
    assert gguf.LlamaFileType(fields["general.file_type"]).name == expected
    loaded_by("GGUF", f"{kind} of a float model (llama)", "gguf")


def test_metadata_and_sentencepiece(sentencepiece: Path, tmp_path: Path) -> None:
    model = quantized(model_of(), QConfig(EXACT["Q4_0"], exclude=["lm_head"]))
    export_gguf(model, tmp_path, "llama", sentencepiece)
    fields, tensors = read(tmp_path / "llama.gguf")
    expected = {
        "general.architecture": "llama", "llama.block_count": 2, "llama.context_length": 128,
        "llama.embedding_length": HIDDEN, "llama.feed_forward_length": 512, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.rope.dimension_count": 64, "llama.vocab_size": VOCAB,
        "llama.rope.freq_base": 10000.0, "general.file_type": 2, "general.quantization_version": 2,
        "tokenizer.ggml.model": "llama",
    }  # fmt: skip
    assert {name: fields[name] for name in expected} == expected
    assert abs(fields["llama.attention.layer_norm_rms_epsilon"] - 1e-6) < 1e-9
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.scores"]) == VOCAB
    assert tensors["token_embd.weight"].tensor_type.name == "F16"
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert tensors["blk.0.attn_q.weight"].tensor_type.name == "Q4_0"
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="llama.gguf")
    source = pytest.importorskip("sentencepiece").SentencePieceProcessor(
        model_file=str(sentencepiece / "tokenizer.model")
    )
    assert tokenizer("the lazy fox", add_special_tokens=False)["input_ids"] == source.encode("the lazy fox")


def test_byte_level_vocabulary(bpe: Path, tmp_path: Path) -> None:
    model = quantized(model_of("qwen2"), QConfig(EXACT["Q4_0"], exclude=["lm_head"]))
    export_gguf(model, tmp_path, "qwen2", bpe)
    fields, tensors = read(tmp_path / "qwen2.gguf")
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    assert fields["tokenizer.ggml.tokens"][1] == "<s>"
    assert fields["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert fields["tokenizer.ggml.bos_token_id"] == 1
    assert fields["tokenizer.chat_template"] == "{{ messages }}"
    assert len(fields["tokenizer.ggml.merges"]) > 10
    assert tensors["blk.0.attn_q.bias"].tensor_type.name == "F32"
    source = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe / "tokenizer.json"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="qwen2.gguf")
    text = "the quick models answer 123"
    assert tokenizer(text)["input_ids"] == source(text)["input_ids"]


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("cls", ["<cls>", None])
def test_what_begins_a_text_is_cls_in_wordpiece_alone(
    kind: str, cls: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = ["<cls>", "<s>", "a"]
    told = {"bos_token": "<s>", "cls_token": cls} if cls else {"bos_token": "<s>"}
    added = [{"id": number, "content": text} for number, text in enumerate(tokens[:2])]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}, "added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    found = (kind, list(tokens), [0.0] * 3, [1] * 3)
    monkeypatch.setattr(gguf_vocabulary, "pre_tokenizer", lambda path, family: "gpt-2")
    monkeypatch.setattr(gguf_vocabulary, "json_tokens", lambda path, size: found)
    monkeypatch.setattr(gguf_vocabulary, "json_rules", lambda path: None)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    gguf_vocabulary.add_vocabulary(writer, tmp_path, 3, "gpt2")
    beginning = writer.kv_data[0].get("tokenizer.ggml.bos_token_id")
    assert beginning is not None and beginning.value == (0 if kind == "bert" and cls else 1)


def test_tied_and_reloaded_models(bpe: Path, tmp_path: Path) -> None:
    model = quantized(model_of(tie=True), QConfig(EXACT["Q4_0"], exclude=["lm_head"]))
    export_gguf(model, tmp_path / "a", "llama", bpe)
    assert "output.weight" not in read(tmp_path / "a" / "llama.gguf")[1]
    assert torch.allclose(logits(of_transformers(tmp_path / "a" / "llama.gguf")), logits(model), atol=1e-4)
    export_safetensors(model, tmp_path / "quark")
    again = import_model_from_safetensors(model_of(tie=True), tmp_path / "quark")
    export_gguf(again, tmp_path / "quark", "llama", bpe)
    assert (tmp_path / "quark" / "llama.gguf").read_bytes() == (tmp_path / "a" / "llama.gguf").read_bytes()


def test_what_does_not_fit_is_refused(bpe: Path, tmp_path: Path) -> None:
    both = quantized(model_of(), QConfig(layer(FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec()), exclude=["lm_head"]))
    with pytest.raises(ConfigError, match=r"q_proj' has quantized inputs or outputs, and GGUF holds"):
        export_gguf(both, tmp_path / "m", "llama", bpe)
    model = quantized(model_of(), QConfig(layer(FP8E4M3PerTensorSpec()), exclude=["lm_head"]))
    with pytest.raises(ConfigError, match=r"q_proj.weight' is fp8_e4m3.*no GGUF type"):
        export_gguf(model, tmp_path / "m", "llama", bpe)
    with pytest.raises(ModelError, match="the model is 'llama', not 'qwen2'"):
        export_gguf(model, tmp_path / "m", "qwen2", bpe)
    with pytest.raises(ConfigError, match="Did you mean 'llama'"):
        export_gguf(model, tmp_path / "m", "lama", bpe)
    odd = quantized(model_of(), QConfig(layer(Int4PerGroupSpec(-1, 16)), exclude=["lm_head"]))
    with pytest.raises(ConfigError, match="multiple of 32"):
        export_gguf(odd, tmp_path / "m", "llama", bpe)
    with pytest.raises(ModelError, match=r"neither tokenizer\.model nor tokenizer\.json"):
        export_gguf(model_of(), tmp_path / "m", "llama", tmp_path, weight_type="F16")
    assert not (tmp_path / "m").exists()
    assert IDS.max() < VOCAB


@pytest.mark.parametrize("whole", [1 << 16, 1 << 8])
@pytest.mark.parametrize("broken", ["rows", "scale", "order"])
@pytest.mark.parametrize("scheme", ["Q4_0", "Q8_0"])
def test_gguf_files_are_read_back(
    scheme: str, broken: str, whole: int, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a whole, and as larger ones of which a part of the blocks is decoded."""
    from quark.torch.export import gguf_tensors

    monkeypatch.setattr(gguf_tensors, "WHOLE", whole)
    model = quantized(model_of(), QConfig(EXACT[scheme], exclude=["lm_head"]))
    block = gguf_tensors.in_blocks

    def blocks(kind: str, codes: Any, scale: Any, minima: Any) -> Any:
        codes = codes[::-1] if broken == "rows" else codes[:, ::-1] if broken == "order" else codes
        return block(kind, codes, scale * (1.01 if broken == "scale" else 1), minima)

    monkeypatch.setattr(gguf_tensors, "in_blocks", blocks)
    with pytest.raises(ModelError, match=r"reads back with .* numbers further"):
        export_gguf(model, tmp_path / "m", "llama", bpe)
    assert not (tmp_path / "m").exists()
    export_gguf(model, tmp_path / "m", "llama", bpe, verify=False)


@pytest.mark.parametrize("shape", [(8192, 32), (512, 480), (7, 96, 256), (1, 1 << 17)])
def test_of_large_tensors_one_block_of_eight_is_decoded(shape: tuple[int, ...]) -> None:
    from quark.torch.export.gguf_tensors import PART, compared

    count = math.prod(shape) // 32
    numbers = np.repeat(np.arange(count, dtype=np.float32), 32).reshape(shape)  # of its block
    data, wanted = compared(numbers, numbers, 32)
    found = wanted[:, 0].astype(int)
    assert (wanted == found[:, None]).all() and np.array_equal(data.reshape(wanted.shape), wanted)
    assert {0, count - 1} <= set(found) and set(found // PART) >= set(range(count // PART))
    assert len(found) <= count // PART + 2
    assert len({int(place) for place in found[1:-1] % PART}) == PART  # at no place that rows or columns have in common


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("scheme", ["int4_wo_32", "uint4_wo_32", "int8_wo_per_channel", "mxfp4_weight_only", *TYPES])
def test_models_of_bfloat16_are_written(scheme: str, frozen: bool, bpe: Path, tmp_path: Path) -> None:
    """The file holds what codes and scales stand for, which bfloat16 has to three digits."""
    model = model_of().bfloat16()
    config = config_for(LLMTemplate.for_model(model).get_config(scheme), "gguf", "llama.cpp", model.dtype)
    model = ModelQuantizer(config).quantize_model(model)
    if frozen and scheme in TYPES:
        model = ModelQuantizer.freeze(model)
        with pytest.raises(ModelError, match=f"is frozen, and {scheme} would round its values again"):
            export_gguf(model, tmp_path, "llama", bpe)
        return
    with torch.no_grad():
        layer = model.model.layers[1].mlp.down_proj
        wanted = layer.weight_quantizer(layer.weight).float().numpy()
    model = ModelQuantizer.freeze(model) if frozen else model
    assert export_gguf(model, tmp_path, "llama", bpe).relative < 1e-3
    found = read(tmp_path / "llama.gguf")[1]["blk.1.ffn_down.weight"]
    assert found.tensor_type.name == (scheme if scheme in TYPES else found.tensor_type.name)
    values = gguf.quants.dequantize(found.data, found.tensor_type).reshape(wanted.shape)
    assert np.linalg.norm(values - wanted) < 3e-3 * np.linalg.norm(wanted)


def test_floats_that_float16_has_not_are_kept_whole(
    bpe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An embedding of tiny numbers is written as F32, and named."""
    model = quantized(model_of(), QConfig(EXACT["Q8_0"], exclude=["lm_head"]))
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e-7)
    with caplog.at_level(logging.WARNING):
        loss = export_gguf(model, tmp_path, "llama", bpe)
    tensors = read(tmp_path / "llama.gguf")[1]
    assert loss.rescued == ["model.embed_tokens.weight"] and "model.embed_tokens.weight" in caplog.text
    assert np.array_equal(tensors["token_embd.weight"].data, model.get_input_embeddings().weight.detach().numpy())
    assert loss.relative < 1e-3


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "use_regex": True}
QUIET = {"type": "ByteLevel", "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
# tokenizers that come with models of the types llama and mistral, and llama.cpp's names of how they split; None: none
SPLITTERS = {
    "Llama 3": ([LLAMA3], QUIET, "llama-bpe"),
    "Nemo": ([TEKKEN], QUIET, "tekken"),
    "SmolLM": ([DIGITS], BYTES, "smollm"),
    "GPT-2": ([], BYTES, "gpt-2"),
    "several rules": ([LLAMA3, r"\d{2}"], QUIET, None),
    "an unknown rule": ([r"\s?\p{L}+"], QUIET, None),
    "digits in runs": ([{**DIGITS, "individual_digits": False}], BYTES, None),
    "no split at all": ([], QUIET, None),
}


@pytest.mark.parametrize("name", SPLITTERS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_words_are_split_as_the_file_says(family: str, name: str, tmp_path: Path) -> None:
    parts, last, wanted = SPLITTERS[name]
    rules = [{"type": "Split", "pattern": {"Regex": part}} if isinstance(part, str) else part for part in parts]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*rules, last]}}))
    if wanted is None:
        with pytest.raises(ModelError, match=r"llama\.cpp has no name for"):
            pre_tokenizer(path, family)
    else:
        assert pre_tokenizer(path, family) == wanted


def test_what_llama_cpp_does_not_have_is_refused_before_any_work(bpe: Path, tmp_path: Path) -> None:
    model, any_config = model_of("llama"), QConfig(EXACT["Q4_0"])
    check_before_work(model, any_config, "gguf", "llama.cpp", bpe)
    check_before_work(model, any_config, "quark", None, tmp_path)  # which needs no tokenizer
    with pytest.raises(ModelError, match=r"neither tokenizer\.model nor tokenizer\.json"):
        check_before_work(model, any_config, "gguf", "llama.cpp", tmp_path)
    model.config.hidden_act = "gelu"
    with pytest.raises(ModelError, match="hidden_act is 'gelu'"):
        check_before_work(model, any_config, "gguf", "llama.cpp", bpe)
    model.config.model_type = "electra"
    with pytest.raises(ConfigError, match="model_type 'electra'"):
        check_before_work(model, any_config, "gguf", "llama.cpp", bpe)
