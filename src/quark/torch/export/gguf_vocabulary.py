"""The vocabulary of a GGUF file, from the folder of a tokenizer: SentencePiece (``tokenizer.model``) or byte-level BPE
(``tokenizer.json``). Special tokens, merges and the chat template are read by the ``gguf`` package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quark.errors import ModelError
from quark.torch.export.model_files import read_object

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
PRE_TOKENIZERS = {"qwen2": "qwen2", "llama": "llama-bpe", "mistral": "llama-bpe"}


def add_vocabulary(writer: Any, folder: Path, size: int, family: str) -> None:
    """Write the vocabulary in ``folder`` (``size`` tokens, the rows of the embedding) to a ``GGUFWriter``.

    Raises:
        ModelError: no tokenizer that is understood, or more tokens than rows.
    """
    import gguf

    if (folder / "tokenizer.model").is_file():
        kind, tokens, scores, types = sentencepiece_tokens(folder)
    elif (folder / "tokenizer.json").is_file():
        kind, tokens, scores, types = json_tokens(folder / "tokenizer.json")
    else:
        raise ModelError(f"{str(folder)!r} has neither tokenizer.model nor tokenizer.json")
    if len(tokens) > size:
        raise ModelError(f"{str(folder)!r} has {len(tokens)} tokens, and the embedding of the model {size} rows")
    for number in range(len(tokens), size):
        tokens.append(f"[PAD{number}]")
        scores.append(-10000.0)
        types.append(UNUSED)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("default" if kind == "llama" else PRE_TOKENIZERS[family])
    writer.add_token_list(tokens)
    if kind == "llama":
        writer.add_token_scores(scores)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=kind == "gpt2", n_vocab=size).add_to_gguf(writer, quiet=True)


def sentencepiece_tokens(folder: Path) -> tuple[str, list[str], list[float], list[int]]:
    """Tokens, scores and types of ``tokenizer.model``."""
    import gguf

    vocabulary = gguf.SentencePieceVocab(folder)
    entries = list(vocabulary.all_tokens())
    tokens = [text.decode("utf-8") for text, _, _ in entries]
    return "llama", tokens, [score for _, score, _ in entries], [int(kind) for _, _, kind in entries]


def json_tokens(path: Path) -> tuple[str, list[str], list[float], list[int]]:
    """Tokens and types of ``tokenizer.json`` with a BPE model.

    Raises:
        ModelError: another kind of model.
    """
    data = read_object(path)
    model = data.get("model") or {}
    if model.get("type") != "BPE":
        raise ModelError(f"{str(path)!r} has a tokenizer of the type {model.get('type')!r}; only BPE can be written")
    byte_level = "ByteLevel" in json.dumps([data.get("pre_tokenizer"), data.get("decoder")])
    if not byte_level:
        raise ModelError(
            f"{str(path)!r} has a BPE tokenizer that is not byte-level; give a folder with tokenizer.model"
        )
    found = {number: (text, NORMAL) for text, number in model["vocab"].items()}
    for entry in data.get("added_tokens") or []:
        found[entry["id"]] = (entry["content"], CONTROL if entry.get("special") else USER_DEFINED)
    tokens = [found.get(number, (f"[PAD{number}]", UNUSED)) for number in range(max(found) + 1)]
    return "gpt2", [text for text, _ in tokens], [0.0] * len(tokens), [kind for _, kind in tokens]
