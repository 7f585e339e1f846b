"""Damage to the files of a tokenizer, read as for samples (by transformers) and for the vocabulary of a GGUF file."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.fuzz.causes import Cause, Finding
from tests.fuzz.config_causes import VALUES
from tests.fuzz.torch_causes import TEXTS

from quark.errors import QuarkError

with contextlib.suppress(ImportError):  # before a process is forked for every cause
    import gguf  # noqa: F401
    import transformers

    import quark.torch.export.gguf_vocabulary
    import quark.torch.language  # noqa: F401

    _ = transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast

TOKENIZERS: list[Cause] = []
ROWS = 16


class Writer:
    """Takes what a ``GGUFWriter`` would write."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def add_token_list(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None


def read(folder: Path) -> None:
    """Make tokens of a text, and the vocabulary of a GGUF file.

    Raises:
        Finding: tokens that are none.
    """
    from quark.torch.export.gguf_vocabulary import add_vocabulary
    from quark.torch.language import load_tokenizer, tokens_of

    refused: QuarkError | None = None
    try:
        if (tokens_of("ab c", lambda: load_tokenizer(folder)) < 0).any():
            raise Finding("a token below 0")
    except QuarkError as error:
        refused = error
    writer = Writer()
    add_vocabulary(writer, folder, ROWS, "llama")
    if len(writer.tokens) != ROWS or not all(isinstance(one, str) for one in writer.tokens):
        raise Finding("other tokens than rows")
    if refused is not None:
        raise refused


FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {"id": 8, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "vocab": {"a": 0, "b": 1, "c": 2, "\u0120": 3, "ab": 4, "\u0120c": 5, "d": 6, "e": 7},
        "merges": [["a", "b"], ["\u0120", "c"]],
    },
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "model_max_length": 64,
    "clean_up_tokenization_spaces": False, "chat_template": "{{ messages }}",
    "added_tokens_decoder": {"8": {"content": "<s>", "special": True}},
}  # fmt: skip


def put(contents: dict[str, bytes | None], folder: Path) -> None:
    files: dict[str, bytes | None] = {FILE: json.dumps(TOKENIZER).encode(), CONFIG: json.dumps(SETTINGS).encode()}
    for name, content in {**files, "config.json": b'{"model_type": "llama"}', **contents}.items():
        if content is not None:
            (folder / name).write_bytes(content)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(inner, (*path, key))


def damaged(whole: dict[str, Any]) -> Iterator[tuple[str, str, bytes]]:
    """Every field gone, and with odd values in turn: all of them on outer fields, every sixth on inner ones."""
    for number, path in enumerate(leaves(whole)):
        for index, value in enumerate((GONE, *VALUES)):
            if value is not GONE and len(path) > 1 and (number + index) % 6:
                continue
            made = copy.deepcopy(whole)
            inner = made
            for key in path[:-1]:
                inner = inner[key]
            if value is GONE:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            said = "gone" if value is GONE else f"{index}: {value!r:.20}"
            yield ascii(".".join(map(str, path))), said, json.dumps(made).encode()


GONE = object()
for name, whole in ((FILE, TOKENIZER), (CONFIG, SETTINGS)):
    for field, damage, content in damaged(whole):
        TOKENIZERS.append(Cause("tokenizer", f"{name} {field}", damage, partial(put, {name: content})))
    for damage, content in TEXTS.items():
        TOKENIZERS.append(Cause("tokenizer", name, damage, partial(put, {name: content})))
    TOKENIZERS.append(Cause("tokenizer", name, "gone", partial(put, {name: None})))
for damage, content in TEXTS.items():
    for name in ("special_tokens_map.json", "added_tokens.json", "config.json"):
        TOKENIZERS.append(Cause("tokenizer", name, damage, partial(put, {name: content})))
    TOKENIZERS.append(Cause("tokenizer", "tokenizer.model", damage, partial(put, {"tokenizer.model": content})))
TOKENIZERS.append(Cause("tokenizer", "files", "as they should be", partial(put, {})))
PIECES = b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02" + b"".join(  # text, score, kind
    b"\n\x08\n\x01%c\x15\0\0\x80\xbf" % letter for letter in b"abc"
)
TOKENIZERS.append(Cause("tokenizer", "tokenizer.model", "as it should be", partial(put, {"tokenizer.model": PIECES})))
