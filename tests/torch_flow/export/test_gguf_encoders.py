"""Encoders of text as GGUF files: names, vocabulary, values; what llama.cpp does otherwise is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.torch_flow.export.test_gguf import read

from quark.cli import main
from quark.errors import ModelError
from quark.torch.export.api import export_gguf
from quark.torch.export.gguf_table import ARCHITECTURES

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
SPECIAL = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = ["the", "quick", "fox", "##es", "jump", "##s", "a", "dog", "!", ",", "中", *"bcdefghijk", "##a", "##b"]
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 48, "vocab_size": len(SPECIAL) + len(PIECES) + 2,
}  # fmt: skip
ENCODERS = {
    "bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel", "nomic_bert": "NomicBertModel",
    "eurobert": "EuroBertModel", "modernbert": "ModernBertModel", "camembert": "CamembertModel",
    "distilbert": "DistilBertModel", "t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel",
    "gemma3_text": "Gemma3TextModel",
    "jina_embeddings_v3": "JinaEmbeddingsV3Model",
}  # fmt: skip
BYTES_TOO = (
    "roberta",
    "xlm-roberta",
    "camembert",
    "eurobert",
    "modernbert",
    "t5",
    "mt5",
    "umt5",
    "gemma3_text",
    "jina_embeddings_v3",
)  # whose tokenizers begin and end a text with <s> and </s>
PLACES = {
    "blk.1.attn_k": "encoder.layer.1.attention.self.key",
    "blk.0.ffn_up": "encoder.layer.0.intermediate.dense",
    "blk.0.attn_output_norm": "encoder.layer.0.attention.output.LayerNorm",
    "blk.1.layer_output_norm": "encoder.layer.1.output.LayerNorm",
    "token_embd_norm": "embeddings.LayerNorm",
}


def encoder(folder: Path, cls: str = "BertModel", **letters: Any) -> Any:
    """A model in a folder with its tokenizer; every parameter matters."""
    torch.manual_seed(0)
    model = getattr(transformers, cls)(transformers.BertConfig(**SIZES)).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape) / 8)
    model.save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *PIECES])}
    transformers.BertTokenizerFast(vocab=vocabulary, do_lower_case=True).save_pretrained(folder)
    path = folder / "tokenizer.json"
    told = json.loads(path.read_text())
    told["normalizer"].update(letters)
    path.write_text(json.dumps(told))
    return model


def network(name: str, folder: Path) -> Any:
    """A model of a type in a folder with a tokenizer; layers that see a window are among them, and texts reach it."""
    if name == "bert":
        return encoder(folder)
    torch.manual_seed(0)
    more = {"num_hidden_layers": 4, "local_attention": 8} if name == "modernbert" else {}
    if "t5" in name:
        more = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 24, "feed_forward_proj": "relu"}
        more |= {"feed_forward_proj": "gated-gelu"} if name == "umt5" else {}
    if name == "gemma3_text":
        more = {"use_bidirectional_attention": True, "sliding_window": 8, "head_dim": 16, "num_key_value_heads": 2}
        more |= {"num_hidden_layers": 6, "query_pre_attn_scalar": 16}
    if name in BYTES_TOO:
        more |= {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        add_bytes(folder)
    else:
        words = transformers.BertTokenizerFast(vocab={word: number for number, word in enumerate([*SPECIAL, *PIECES])})
        words.save_pretrained(folder)
    cls = getattr(transformers, ENCODERS[name])
    model = cls(cls.config_class(**{**SIZES, **more}, attn_implementation="eager")).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape) / 8)
        for key, value in model.named_parameters():
            if key.endswith(".q.weight"):  # T5 scales no scores, its queries are small
                value /= 8
    model.save_pretrained(folder)
    return model


def add_bytes(folder: Path) -> None:
    """Byte-level BPE that puts tokens around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        ["the quick fox jumps over a dog"] * 4,
        trainers.BpeTrainer(vocab_size=295, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=signs),  # type: ignore[call-arg]
    )
    made.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), add_prefix_space=False)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


@pytest.mark.parametrize("name", ENCODERS)
def test_what_llama_cpp_wants_of_an_encoder(name: str, tmp_path: Path) -> None:
    """Every tensor under its name; positions behind padding, and windows on both sides, as llama.cpp counts them."""
    model = network(name, tmp_path / "model")
    export_gguf(model, tmp_path / "out", name, tmp_path / "model", weight_type="Q8_0", float_type="F32")
    fields, tensors = read(tmp_path / "out" / f"{name}.gguf")
    arch, kept = (
        (ARCHITECTURES[name].both_ways or ARCHITECTURES[name]).name,
        [one for one, _ in model.named_parameters() if "pooler" not in one],
    )
    assert fields["general.architecture"] == arch and len(tensors) == len(kept)
    assert fields[f"{arch}.attention.causal"] in (False,)
    assert tensors[f"{'enc.' * ('t5' in name)}blk.1.ffn_down.weight"].tensor_type.name == "Q8_0"
    skipped = 3 if ARCHITECTURES[name].behind_padding else 0
    assert fields[f"{arch}.context_length"] == (512 if "t5" in name else SIZES["max_position_embeddings"] - skipped)
    if "position_embd.weight" in tensors:
        wanted = model.embeddings.position_embeddings.weight.detach().numpy()[skipped:]
        assert np.array_equal(tensors["position_embd.weight"].data, wanted)
    if name == "modernbert":
        told = [fields[f"{arch}.{key}"] for key in ("attention.sliding_window", "attention.sliding_window_pattern")]
        assert told == [8, 3] and fields[f"{arch}.rope.freq_base"] == 160000 != fields[f"{arch}.rope.freq_base_swa"]


def test_layers_that_see_all_elsewhere_are_refused(tmp_path: Path) -> None:
    model = network("modernbert", tmp_path / "model")
    model.config.layer_types = [*model.config.layer_types[::-1][1:], "sliding_attention"]
    with pytest.raises(ModelError, match="every layer number 3 see all, from the first on"):
        export_gguf(model, tmp_path / "out", "modernbert", tmp_path / "model", weight_type="F16")
    assert not (tmp_path / "out").exists()


def test_every_row_has_a_case() -> None:
    rows = {name: row.both_ways or row for name, row in ARCHITECTURES.items()}
    assert {name: row.encoder[0] for name, row in rows.items() if row.encoder} == ENCODERS


def test_a_file_holds_the_vocabulary_and_the_values(tmp_path: Path) -> None:
    model = encoder(tmp_path / "model")
    export_gguf(model, tmp_path / "out", "bert", tmp_path / "model", weight_type="F32", float_type="F32")
    fields, tensors = read(tmp_path / "out" / "bert.gguf")
    assert (fields["general.architecture"], fields["tokenizer.ggml.model"]) == ("bert", "bert")
    assert fields["bert.attention.causal"] in (False,)
    assert fields["tokenizer.ggml.token_type_count"] == 2
    begin, end = fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.seperator_token_id"]
    assert (begin, end) == (SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]"))
    words = ["[PAD]", "▁[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += [piece[2:] if piece.startswith("##") else f"▁{piece}" for piece in PIECES]
    assert (
        fields["tokenizer.ggml.tokens"][: len(words)] == words
        and len(fields["tokenizer.ggml.tokens"]) == len(words) + 2
    )
    kept = {name: value for name, value in model.named_parameters() if not name.startswith("pooler.")}
    assert len(tensors) == len(kept)
    for tensor, layer in PLACES.items():
        for end_of in ("weight", "bias"):
            assert np.array_equal(tensors[f"{tensor}.{end_of}"].data, kept[f"{layer}.{end_of}"].detach().numpy())


def test_the_command_writes_codes_and_keeps_what_llama_cpp_wants_whole(tmp_path: Path) -> None:
    model = encoder(tmp_path / "model")
    given = ["torch", "quantize", str(tmp_path / "model"), "-o", str(tmp_path / "out"), "-s", "int8_wo_per_channel"]
    assert main([*given, "--for", "llama.cpp"]) == 0
    _, tensors = read(tmp_path / "out" / "bert.gguf")
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items() if name.endswith("weight")}
    assert {kinds[f"blk.{k}.{name}.weight"] for k in range(2) for name in ("attn_q", "attn_v", "ffn_down")} == {"Q8_0"}
    assert (kinds["position_embd.weight"], kinds["token_types.weight"]) == ("F32", "F32")
    tensor, weight = tensors["blk.0.ffn_down.weight"], model.encoder.layer[0].output.dense.weight.detach().numpy()
    apart = np.abs(gguf.quants.dequantize(tensor.data, tensor.tensor_type) - weight)
    assert 0 < (apart / (np.abs(weight).max(1, keepdims=True) / 127)).max() < 0.57  # half a step, whose float16 is near


@pytest.mark.parametrize(
    ("letters", "said"),
    [
        ({"lowercase": False}, "lowercase=False"),
        ({"strip_accents": False}, "strip_accents=False"),
        ({"clean_text": False}, "clean_text=False"),
        ({"handle_chinese_chars": False}, "handle_chinese_chars=False"),
        ({"type": "Lowercase"}, "Lowercase and BertPreTokenizer"),
    ],
)
def test_letters_that_llama_cpp_treats_otherwise_are_refused(
    letters: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = encoder(tmp_path / "model", **letters)
    with pytest.raises(ModelError, match=said):
        export_gguf(model, tmp_path / "out", "bert", tmp_path / "model", weight_type="F16")
    assert not (tmp_path / "out").exists()


def test_a_gemma_that_looks_both_ways_has_half_a_window_on_each_side(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network("gemma3_text", tmp_path / "model")
    (tmp_path / "model" / "2_Dense").mkdir()
    export_gguf(model, tmp_path / "out", "gemma3_text", tmp_path / "model", weight_type="F16")
    fields, _ = read(tmp_path / "out" / "gemma3_text.gguf")
    assert fields["gemma-embedding.attention.sliding_window"] == 8 == model.config.to_dict()["sliding_window"]
    assert "without the layers of sentence-transformers ['2_Dense']" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"relative_attention_max_distance": 64}, "relative_attention_max_distance is 64"),
        ({"dense_act_fn": "silu"}, "dense_act_fn is 'silu'"),
        (
            {"architectures": ["T5ForConditionalGeneration"]},
            "is a T5ForConditionalGeneration.*what T5EncoderModel does",
        ),
    ],
)
def test_a_t5_that_llama_cpp_computes_otherwise_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = network("t5", tmp_path / "model")
    for key, value in changes.items():
        setattr(model.config, key, value)
    with pytest.raises(ModelError, match=said):
        export_gguf(model, tmp_path / "out", "t5", tmp_path / "model", weight_type="F16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cls", ["BertForMaskedLM", "BertForSequenceClassification", "BertLMHeadModel"])
def test_a_head_that_llama_cpp_does_not_compute_is_refused(cls: str, tmp_path: Path) -> None:
    model = encoder(tmp_path / "model", cls)
    with pytest.raises(ModelError, match=f"is a {cls}.*BertModel"):
        export_gguf(model, tmp_path / "out", "bert", tmp_path / "model", weight_type="F16")
    assert not (tmp_path / "out").exists()
