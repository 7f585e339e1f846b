"""Tokenizers as GGUF holds them, from small hand-made files: tokens, scores, types, and the name of a rule of words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quark.errors import ModelError
from quark.torch.export import gguf_vocabulary as vocabulary

gguf = pytest.importorskip("gguf")
TYPES = gguf.TokenType
BYTE_LEVEL = {"type": "ByteLevel", "use_regex": True}


def written(folder: Path, **changes: Any) -> Path:
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "abb": 4}, "merges": ["a b", ["ab", "b"]]}
    data = {"model": {**model, **changes.pop("model", {})}, "pre_tokenizer": BYTE_LEVEL, **changes}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder / "tokenizer.json"


def test_tokens_of_bytes_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    added = [{"id": 5, "content": "<s>", "special": True}, {"id": 6, "content": "word"}, {"id": 1, "content": "B"}]
    kind, tokens, scores, types = vocabulary.json_tokens(written(tmp_path, added_tokens=added), 7)
    assert (kind, tokens) == ("gpt2", ["a", "B", "ab", "[PAD3]", "abb", "<s>", "word"])
    assert scores == [0.0] * 7
    wanted = [TYPES.NORMAL, TYPES.USER_DEFINED, TYPES.NORMAL, TYPES.UNUSED, TYPES.NORMAL, TYPES.CONTROL]
    assert types == [int(one) for one in (*wanted, TYPES.USER_DEFINED)]


def test_tokens_of_pieces_have_scores_in_the_order_of_merges(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "abb": 3, "<unk>": 4, "<0x0A>": 5, "<0xzz>": 6, "xy": 7}
    path = written(tmp_path, model={"vocab": vocab, "byte_fallback": True}, pre_tokenizer=None)
    kind, tokens, scores, types = vocabulary.json_tokens(path, 8)
    assert (kind, tokens) == ("llama", list(vocab))
    assert scores == [-2.0, -2.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert types[4:] == [int(one) for one in (TYPES.UNKNOWN, TYPES.BYTE, TYPES.NORMAL, TYPES.NORMAL)]
    assert vocabulary.merge_scores(["ab", "a"], []) == [0.0, 0.0]
    assert vocabulary.merge_scores(["ab"], ["x y", "a b", "ab "]) == [-1.0]


@pytest.mark.parametrize(
    ("changes", "size", "told"),
    [
        ({}, 4, "has the token 4, and the embedding of the model 4 rows"),
        ({}, 5, None),
        ({"model": {"type": "Unigram"}}, 9, "vocab"),
        ({"model": {"type": "WordLevel"}}, 9, "tokenizer of the type 'WordLevel'; only BPE, Unigram and WordPiece"),
        ({"model": {"type": None}}, 9, "tokenizer of the type None"),
        ({"pre_tokenizer": None}, 9, "not byte-level"),
        ({"pre_tokenizer": None, "decoder": {"type": "ByteLevel"}}, 9, None),
        ({"pre_tokenizer": None, "model": {"byte_fallback": True}}, 9, None),
        ({"pre_tokenizer": None, "model": {"byte_fallback": False}}, 9, "not byte-level"),
        ({"model": {"vocab": {"a": -1}}}, 9, "tokenizer.json"),
        ({"added_tokens": [{"id": -1, "content": "x"}]}, 9, "tokenizer.json"),
        ({"added_tokens": [{"id": 9, "content": "x"}]}, 9, "has the token 9"),
    ],
)
def test_what_is_no_vocabulary(changes: dict[str, Any], size: int, told: str | None, tmp_path: Path) -> None:
    path = written(tmp_path, **changes)
    if told is None:
        assert len(vocabulary.json_tokens(path, size)[1]) == 5
        return
    with pytest.raises(ModelError, match=told):
        vocabulary.json_tokens(path, size)


@pytest.mark.parametrize(
    ("node", "family", "expected"),
    [
        (BYTE_LEVEL, "llama", "gpt-2"),
        ({"type": "ByteLevel"}, "llama", "gpt-2"),
        ({"type": "ByteLevel", "use_regex": False}, "llama", None),
        ({"type": "ByteLevel", "use_regex": False}, "qwen2", "qwen2"),
        (
            {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
            "llama",
            "smollm",
        ),
        (
            {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": False}, BYTE_LEVEL]},
            "llama",
            None,
        ),
        ({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, BYTE_LEVEL]}, "llama", None),
        (None, "llama", None),
        ({"type": "Split", "pattern": {"Regex": next(iter(vocabulary.RULES))}}, "llama", "llama-bpe"),
        ({"type": "Split", "pattern": {"Regex": next(iter(vocabulary.RULES))}}, "qwen2", "llama-bpe"),
        ({"type": "Split", "pattern": {"Regex": "other"}}, "llama", None),
        ({"type": "Split", "pattern": {"Regex": "other"}}, "gpt_oss", "gpt-4o"),
        ([{"pattern": {"Regex": list(vocabulary.RULES)[1]}}, {"pattern": {"Regex": "other"}}], "llama", None),
    ],
)
def test_the_name_of_the_rule_that_splits_words(node: Any, family: str, expected: str | None, tmp_path: Path) -> None:
    path = written(tmp_path, pre_tokenizer=node)
    if expected is None:
        with pytest.raises(ModelError, match="splits words by"):
            vocabulary.pre_tokenizer(path, family)
        return
    assert vocabulary.pre_tokenizer(path, family) == expected


class Writer:
    """What ``gguf.GGUFWriter`` is asked for."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.told.__setitem__(name, values[0] if values else None)


@pytest.mark.parametrize("size", [5, 8])
def test_rows_of_the_embedding_that_no_token_has_are_padded(size: int, tmp_path: Path) -> None:
    written(tmp_path)
    writer = Writer()
    vocabulary.add_vocabulary(writer, tmp_path, size, "llama")
    tokens = ["a", "b", "ab", "[PAD3]", "abb", "[PAD5]", "[PAD6]", "[PAD7]"][:size]
    assert writer.told["add_token_list"] == tokens and writer.told["add_tokenizer_model"] == "gpt2"
    assert writer.told["add_tokenizer_pre"] == "gpt-2" and "add_token_scores" not in writer.told
    unused = int(TYPES.UNUSED)
    assert [kind == unused for kind in writer.told["add_token_types"]] == ["PAD" in token for token in tokens]


def test_pieces_are_padded_with_the_lowest_scores(tmp_path: Path) -> None:
    written(tmp_path, model={"byte_fallback": True}, pre_tokenizer=None, normalizer=MARKED)
    writer = Writer()
    vocabulary.add_vocabulary(writer, tmp_path, 6, "llama")
    assert (writer.told["add_tokenizer_model"], writer.told["add_tokenizer_pre"]) == ("llama", "default")
    assert writer.told["add_token_scores"] == [-2.0, -2.0, 0.0, 0.0, -1.0, -10000.0]


MARKED = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
BEFORE = {"type": "Prepend", "prepend": "\u2581"}
META = {"type": "Metaspace", "replacement": "\u2581", "split": False}


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "found"),
    [  # each seen in llama.cpp, 300 odd texts (the sentences: others than transformers')
        ({"type": "Sequence", "normalizers": [BEFORE, MARKED]}, None, True),
        (MARKED, {"type": "Split", "pattern": {"String": " "}}, False),
        (None, {**META, "prepend_scheme": "never"}, False),
        (None, {**META, "prepend_scheme": "first"}, True),
        (None, {**META, "prepend_scheme": "always"}, True),
        (None, None, "does not write spaces as"),
        ({"type": "Sequence", "normalizers": [{"type": "NFKC"}, MARKED]}, None, "behind the step 'NFKC'"),
        (None, {**META, "split": True}, "behind the step 'Metaspace'"),
    ],
)
def test_a_space_before_a_text_is_that_of_the_tokenizer(
    normalizer: Any, pre_tokenizer: Any, found: bool | str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, model={"byte_fallback": True}, pre_tokenizer=pre_tokenizer, normalizer=normalizer)
    writer = Writer()
    if isinstance(found, str):
        with pytest.raises(ModelError, match=found):
            vocabulary.add_vocabulary(writer, tmp_path, 6, "llama")
        return
    vocabulary.add_vocabulary(writer, tmp_path, 6, "llama")
    assert writer.told["add_add_space_prefix"] is found
    assert ("puts a space before a text that has none" in caplog.text) == (found and normalizer is None)
    first = pre_tokenizer is not None and pre_tokenizer.get("prepend_scheme") == "first"
    assert ("before every text and behind every special token" in caplog.text) == first


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, True),
        ({"add_dummy_prefix": False}, False),
        ({"normalization_rule_name": "nmt_nfkc"}, r"replaces letters \(nmt_nfkc\)"),
        ({"remove_extra_whitespaces": True}, "removes spaces at the ends and between words"),
        ({"byte_fallback": False}, "has no bytes for letters without a piece"),
        ({"treat_whitespace_as_suffix": True}, "writes spaces behind words"),
        ({"model_type": "char"}, "has pieces of another kind than BPE"),
    ],
)
def test_what_sentencepiece_does_to_a_text_before_it_merges(
    changes: dict[str, Any], found: bool | str, tmp_path: Path
) -> None:
    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    unigram(tmp_path, 290, **{"model_type": "bpe", **plain, **changes})
    writer = gguf.GGUFWriter(None, "llama")
    if isinstance(found, str):
        with pytest.raises(ModelError, match=found):
            vocabulary.add_vocabulary(writer, tmp_path, 300, "llama")
        return
    vocabulary.add_vocabulary(writer, tmp_path, 300, "llama")
    assert writer.kv_data[0]["tokenizer.ggml.add_space_prefix"].value is found


def test_no_tokenizer_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has neither tokenizer.model nor tokenizer.json"):
        vocabulary.add_vocabulary(Writer(), tmp_path, 5, "llama")
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ModelError, match="cannot be read"):
        vocabulary.add_vocabulary(Writer(), tmp_path, 5, "llama")


def unigram(folder: Path, vocab_size: int = 60, **options: Any) -> Any:
    """A Unigram model of SentencePiece in ``folder``."""
    sentencepiece = pytest.importorskip("sentencepiece")
    text = "the quick brown fox jumps over the lazy dog while models answer questions about numbers and scales"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 20), model_prefix=str(folder / "tokenizer"), vocab_size=vocab_size,
        **{"model_type": "unigram", **options}, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def test_unigram_models_are_no_merges(tmp_path: Path) -> None:
    """llama.cpp would merge by scores what SentencePiece splits by the best sum of them."""
    processor = unigram(tmp_path)
    writer = gguf.GGUFWriter(None, "llama")
    vocabulary.add_vocabulary(writer, tmp_path, 300, "llama")
    found = {key: field.value for key, field in writer.kv_data[0].items()}
    assert found["tokenizer.ggml.model"] == "t5"
    for name in ("unk", "bos", "eos"):
        stored = {"unk": "unknown"}.get(name, name)
        assert found[f"tokenizer.ggml.{stored}_token_id"] == getattr(processor, f"{name}_id")()
    assert (found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]) == (True, False)
    assert found["tokenizer.ggml.add_space_prefix"] is True
    assert len(found["tokenizer.ggml.precompiled_charsmap"]) > 1000
    scores = [processor.get_score(number) for number in range(processor.vocab_size())]
    assert found["tokenizer.ggml.scores"][: len(scores)] == scores


def test_unigram_models_with_bytes_are_refused(tmp_path: Path) -> None:
    unigram(tmp_path, byte_fallback=True, vocab_size=290)
    with pytest.raises(ModelError, match="Unigram model with byte_fallback"):
        vocabulary.add_vocabulary(gguf.GGUFWriter(None, "llama"), tmp_path, 300, "llama")


STEPS = {
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "Metaspace", "replacement": "\u2581"}],
    },
}  # fmt: skip


def unigram_json(folder: Path, model: dict[str, Any] | None = None, **steps: Any) -> None:
    made = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0], ["\u2581a", -1.5], ["b", -2.0]], **(model or {})}
    added = [{"id": 0, "content": "<unk>", "special": True}, {"id": 4, "content": "<s>", "special": True}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": made, "added_tokens": added, **STEPS, **steps}))


def test_unigram_models_of_json(tmp_path: Path) -> None:
    unigram_json(tmp_path)
    writer = gguf.GGUFWriter(None, "llama")
    vocabulary.add_vocabulary(writer, tmp_path, 6, "llama")
    found = {key: field.value for key, field in writer.kv_data[0].items()}
    assert found["tokenizer.ggml.model"] == "t5"
    assert found["tokenizer.ggml.tokens"] == ["<unk>", "\u2581a", "b", "[PAD3]", "<s>", "[PAD5]"]
    assert found["tokenizer.ggml.scores"] == [0.0, -1.5, -2.0, -10000.0, 0.0, -10000.0]
    kinds = (TYPES.UNKNOWN, TYPES.NORMAL, TYPES.NORMAL, TYPES.UNUSED, TYPES.CONTROL, TYPES.UNUSED)
    assert found["tokenizer.ggml.token_type"] == [int(kind) for kind in kinds]
    assert (
        found["tokenizer.ggml.unknown_token_id"] == 0 and list(found["tokenizer.ggml.precompiled_charsmap"]) == [0] * 3
    )
    assert found["tokenizer.ggml.add_space_prefix"] and found["tokenizer.ggml.remove_extra_whitespaces"]
    assert not found["tokenizer.ggml.add_bos_token"] and not found["tokenizer.ggml.add_eos_token"]


@pytest.mark.parametrize(
    ("model", "steps", "told"),
    [
        ({"byte_fallback": True}, {}, "byte_fallback"),
        ({"unk_id": None}, {}, "without '<unk>'"),
        ({"vocab": [["a"]]}, {}, "vocab"),
        ({}, {"normalizer": None}, "without one of the steps"),
        ({}, {"normalizer": {"type": "Lowercase"}}, "the step 'Lowercase'"),
        ({}, {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "!"}}, "precompiled_charsmap"),
        ({}, {"pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581"}}, "without one of the steps"),
        ({}, {"pre_tokenizer": {"type": "Metaspace", "replacement": "_"}}, "the step 'Metaspace'"),
    ],
)
def test_unigram_models_that_llama_cpp_splits_otherwise_are_refused(
    model: dict[str, Any], steps: dict[str, Any], told: str, tmp_path: Path
) -> None:
    unigram_json(tmp_path, model, **steps)
    with pytest.raises(ModelError, match=told):
        vocabulary.add_vocabulary(gguf.GGUFWriter(None, "llama"), tmp_path, 9, "llama")
