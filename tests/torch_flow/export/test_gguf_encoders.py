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
ENCODERS = {"bert": "BertModel"}
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


def test_every_row_has_a_case() -> None:
    assert {name: row.encoder[0] for name, row in ARCHITECTURES.items() if row.encoder} == ENCODERS


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


@pytest.mark.parametrize("cls", ["BertForMaskedLM", "BertForSequenceClassification", "BertLMHeadModel"])
def test_a_head_that_llama_cpp_does_not_compute_is_refused(cls: str, tmp_path: Path) -> None:
    model = encoder(tmp_path / "model", cls)
    with pytest.raises(ModelError, match=f"is a {cls}.*BertModel"):
        export_gguf(model, tmp_path / "out", "bert", tmp_path / "model", weight_type="F16")
    assert not (tmp_path / "out").exists()
