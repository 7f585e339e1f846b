"""The vocabulary of a GGUF file, from the folder of a tokenizer: SentencePiece (``tokenizer.model``), or Unigram or BPE
(``tokenizer.json``: byte-level, or that of SentencePiece with a fallback to bytes). Special tokens, merges and the chat
template are read by the ``gguf`` package.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from quark.dataclass import dataclass
from quark.errors import ModelError
from quark.files.schema import OpenSchema, checked
from quark.files.vocabulary import vocabulary_in
from quark.reading import read_object, reason_of
from quark.torch.export.gguf_wordpiece import KIND as WORDPIECE
from quark.torch.export.gguf_wordpiece import in_order, wordpiece_tokens

log = logging.getLogger(__name__)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
PRE_TOKENIZERS = {  # of families with one tokenizer; llama and mistral come with many, so their files must say the rule
    "qwen2": "qwen2", "qwen2_moe": "qwen2", "qwen3": "qwen2", "qwen3_moe": "qwen2", "smollm3": "llama-bpe",
    "gpt_oss": "gpt-4o", "starcoder2": "starcoder", "granite": "refact", "olmo2": "olmo", "olmoe": "olmo",
    "stablelm": "stablelm2",
}  # fmt: skip
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
START, SIGNS = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
RULES = {  # that a file says
    f"{WORDS}\\p{{N}}{{1,3}}{REST}": "llama-bpe",
    f"{WORDS}\\p{{N}}{REST}": "qwen2",
    f"{START}{UPPER}*{LOWER}+|{START}{UPPER}+{LOWER}*|\\p{{N}}{SIGNS}": "tekken",
    f"{START}{UPPER}*{LOWER}+{END}|{START}{UPPER}+{LOWER}*{END}|\\p{{N}}{{1,3}}{SIGNS}": "gpt-4o",
}
BYTES = ("ByteLevel", True)  # which splits as GPT-2 does
STEPS = {(BYTES,): "gpt-2", (("Digits", True), BYTES): "smollm"}  # without a rule in the file
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "config.json")
SPACE = "\u2581"  # as SentencePiece writes it
UNIGRAM = "t5"  # llama.cpp's name of the kind, of any network
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class UnigramRules:
    """What a Unigram model does to a text.

    Attributes:
        prefix: a space is put before it.
        trims: spaces at its ends go, and several become one.
        letters: SentencePiece's table of letters that are replaced; empty: none.
        ids: of special tokens.
        begins: the token of a text's begin is put there.
    """

    prefix: bool
    trims: bool
    letters: bytes
    ids: Mapping[str, int]
    begins: bool


def add_vocabulary(writer: Any, folder: Path, size: int, family: str) -> None:
    """Write the vocabulary in ``folder`` (``size`` tokens, the rows of the embedding) to a ``GGUFWriter``.

    Raises:
        ModelError: no tokenizer that is understood, or more tokens than rows.
    """
    import gguf

    unigram: UnigramRules | None = None
    source = vocabulary_in(folder)
    if source.suffix == ".model":
        found = model_in(folder)
        unigram = unigram_of(folder, found)
        kind, tokens, scores, types = sentencepiece_tokens(folder)
    else:
        unigram = json_rules(source)
        kind, tokens, scores, types = json_tokens(source, size)
    if kind == "llama" and unigram is None:  # merges of SentencePiece
        writer.add_add_space_prefix(merged_prefix(folder, found) if source.suffix == ".model" else json_prefix(source))
    if len(tokens) > size:
        raise ModelError(f"{str(folder)!r} has {len(tokens)} tokens, and the embedding of the model {size} rows")
    for number in range(len(tokens), size):
        tokens.append(f"[PAD{number}]")
        scores.append(-10000.0)
        types.append(UNUSED)
    writer.add_tokenizer_model(kind if unigram is None else UNIGRAM)
    writer.add_tokenizer_pre(pre_tokenizer(folder / "tokenizer.json", family) if kind == "gpt2" else "default")
    writer.add_token_list(tokens)
    if kind == "llama":
        writer.add_token_scores(scores)
    writer.add_token_types(types)
    for name in BESIDE:  # which gguf reads without limits
        if (folder / name).exists():
            read_object(folder / name)
    with _said(folder):
        special = gguf.SpecialVocab(folder, load_merges=kind == "gpt2", n_vocab=size)
        if unigram is not None:
            add_unigram(writer, unigram, special)
        if kind == WORDPIECE and "cls" in special.special_token_ids:  # llama.cpp's name of what begins a text
            special.special_token_ids["bos"] = special.special_token_ids.pop("cls")
        special.add_to_gguf(writer, quiet=True)


def model_in(folder: Path) -> Any:
    """What ``tokenizer.model`` says.

    Raises:
        ModelError: a file that cannot be read.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # made at import
    found = messages.ModelProto()
    try:
        found.ParseFromString((folder / "tokenizer.model").read_bytes())
    except (OSError, DecodeError) as error:
        raise ModelError(f"the tokenizer in {str(folder)!r} cannot be read: {reason_of(error)}") from error
    return found


def merged_prefix(folder: Path, found: Any) -> bool:
    """Whether a space is put before a text that a BPE model of SentencePiece merges.

    Raises:
        ModelError: steps before merging that llama.cpp does not do.
    """
    rules, trained = found.normalizer_spec, found.trainer_spec
    steps = {
        "has pieces of another kind than BPE": trained.model_type != trained.BPE,
        f"replaces letters ({rules.name or 'by a table'})": bool(rules.precompiled_charsmap),
        "removes spaces at the ends and between words": rules.remove_extra_whitespaces,
        "does not write spaces as '\u2581'": not rules.escape_whitespaces,
        "writes spaces behind words": trained.treat_whitespace_as_suffix,
        "has no bytes for letters without a piece (byte_fallback)": not trained.byte_fallback,
    }
    if why := [name for name, so in steps.items() if so]:
        raise ModelError(
            f"the tokenizer in {str(folder)!r} {' and '.join(why)}, unlike llama.cpp's of this kind, which gives a "
            "text other tokens"
        )
    return bool(rules.add_dummy_prefix)


def json_prefix(path: Path) -> bool:
    """As ``merged_prefix``, of ``tokenizer.json``.

    Raises:
        ModelError: steps before merging that llama.cpp does not do.
    """
    data = read_object(path)
    prefix, spaces, unless, more = False, False, False, ""
    for step in (*parts_of(data.get("normalizer")), *parts_of(data.get("pre_tokenizer"))):
        kind = step.get("type")
        if kind == "Prepend" and step.get("prepend") == SPACE:
            prefix = True
        elif (kind, step.get("replacement"), step.get("split", False)) == ("Metaspace", SPACE, False):
            scheme = step.get("prepend_scheme", "always")
            unless, spaces, more = scheme != "never", True, " and behind every special token" * (scheme == "first")
        elif kind == "Replace" and (step.get("pattern"), step.get("content")) == ({"String": " "}, SPACE):
            spaces = True
        elif (kind, step.get("pattern")) != ("Split", {"String": " "}):  # where none is left
            raise ModelError(
                f"{str(path)!r} has a BPE model of SentencePiece behind the step {kind!r}, which llama.cpp does not do"
            )
    if not spaces:
        raise ModelError(f"{str(path)!r} has a BPE model that does not write spaces as '\u2581', as llama.cpp does")
    if unless and not prefix:
        log.warning("%s puts a space before a text that has none, llama.cpp before every text%s", str(path), more)
    return prefix or unless


def unigram_of(folder: Path, found: Any) -> UnigramRules | None:
    """The rules of ``tokenizer.model`` if it is a Unigram model; None for BPE.

    Raises:
        ModelError: bytes in the place of unknown letters, which llama.cpp does not have.
    """
    if found.trainer_spec.model_type != found.trainer_spec.UNIGRAM:
        return None
    if found.trainer_spec.byte_fallback:
        raise ModelError(
            f"the tokenizer in {str(folder)!r} is a Unigram model with byte_fallback, and llama.cpp makes '<unk>' of "
            f"letters that such a model has no piece for"
        )
    rules, ids = found.normalizer_spec, found.trainer_spec
    numbers = {"unk": ids.unk_id, "bos": ids.bos_id, "eos": ids.eos_id, "pad": ids.pad_id}
    given = (rules.add_dummy_prefix, rules.remove_extra_whitespaces, rules.precompiled_charsmap)
    return UnigramRules(*given, {name: number for name, number in numbers.items() if number >= 0}, begins=True)


def add_unigram(writer: Any, found: UnigramRules, special: Any) -> None:
    """What llama.cpp takes from a Unigram model, and otherwise would take from T5: rules, special tokens, their use."""
    writer.add_add_space_prefix(found.prefix)
    writer.add_remove_extra_whitespaces(found.trims)
    if found.letters:
        writer.add_precompiled_charsmap(found.letters)
    for name, number in found.ids.items():
        special.special_token_ids.setdefault(name, number)
    for name, added in (("bos", found.begins), ("eos", False)):
        special.add_special_token.setdefault(name, added)


@contextmanager
def _said(folder: Path) -> Iterator[None]:
    """What gguf and sentencepiece raise where a file is damaged, as one sentence."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(f"the tokenizer in {str(folder)!r} cannot be read: {reason_of(error)}") from error


def pre_tokenizer(path: Path, family: str) -> str:
    """llama.cpp's name of the way in which words are split: that of the file, or that of the family.

    Raises:
        ModelError: a way that has no name.
    """
    node = read_object(path).get("pre_tokenizer")
    rules = list(patterns(node))
    named = RULES.get(rules[0]) if len(rules) == 1 else None
    found = named or PRE_TOKENIZERS.get(family) or (None if rules else STEPS.get(steps(node)))
    if found is None:
        how = repr(rules[0])[:80] if rules else "the steps " + (", ".join(name for name, _ in steps(node)) or "of none")
        raise ModelError(f"{str(path)!r} splits words by {how}, a rule that llama.cpp has no name for")
    return found


def steps(node: Any) -> tuple[tuple[str, bool], ...]:
    """The steps of a pre-tokenizer, one after the other: type, and whether it splits all that it can."""
    if not isinstance(node, dict):
        return ()
    if isinstance(node.get("pretokenizers"), list):
        return tuple(step for part in node["pretokenizers"] for step in steps(part))
    kind = str(node.get("type"))
    whole = node.get("individual_digits") is True if kind == "Digits" else node.get("use_regex", True) is True
    return ((kind, whole),)


def patterns(node: Any) -> Iterator[str]:
    """The regular expressions in a pre-tokenizer."""
    if isinstance(node, dict):
        if isinstance(node.get("Regex"), str):
            yield node["Regex"]
        for value in node.values():
            yield from patterns(value)
    elif isinstance(node, list):
        for value in node:
            yield from patterns(value)


def sentencepiece_tokens(folder: Path) -> tuple[str, list[str], list[float], list[int]]:
    """Tokens, scores and types of ``tokenizer.model``."""
    import gguf

    with _said(folder):
        entries = list(gguf.SentencePieceVocab(folder).all_tokens())
        tokens = [text.decode("utf-8") for text, _, _ in entries]
    return "llama", tokens, [score for _, score, _ in entries], [int(kind) for _, _, kind in entries]


def json_rules(path: Path) -> UnigramRules | None:
    """The rules of a Unigram model in ``tokenizer.json``; None: it has another model.

    Raises:
        ModelError: rules that llama.cpp does not have.
    """
    data = read_object(path)
    if not isinstance(data.get("model"), dict) or data["model"].get("type") != "Unigram":
        return None
    told = checked(data["model"], _Unigram, lambda why: ModelError(f"{str(path)!r}: {why}"))
    if told.byte_fallback or told.unk_id is None:
        raise ModelError(f"{str(path)!r} has a Unigram model without '<unk>' or with byte_fallback, unlike llama.cpp")
    letters: list[bytes] = []
    trims, prefix = False, None
    for step in (*parts_of(data.get("normalizer")), *parts_of(data.get("pre_tokenizer"))):
        kind = step.get("type")
        if kind == "Precompiled" and not letters:
            letters.append(decoded(path, str(step.get("precompiled_charsmap"))))
        elif kind == "WhitespaceSplit":
            trims = True
        elif kind == "Metaspace" and step.get("replacement") == SPACE and prefix is None:
            prefix = step.get("prepend_scheme", "always")
        elif (kind, step.get("pattern")) != ("Replace", {"Regex": " {2,}"}):
            raise ModelError(f"{str(path)!r} has a Unigram model behind the step {kind!r}, which llama.cpp does not do")
    if not (trims and letters and prefix == "always"):
        raise ModelError(
            f"{str(path)!r} has a Unigram model without one of the steps Precompiled, WhitespaceSplit and Metaspace "
            f"(always); llama.cpp does what they do"
        )
    return UnigramRules(True, True, b"".join(letters), {"unk": told.unk_id}, begins=False)


def decoded(path: Path, table: str) -> bytes:
    """SentencePiece's table of letters."""
    try:
        return base64.b64decode(table, validate=True)
    except ValueError as error:
        raise ModelError(f"{str(path)!r}: precompiled_charsmap is no base64: {reason_of(error)}") from error


def parts_of(node: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, one after the other."""
    if isinstance(node, dict):
        inner = node.get("normalizers") or node.get("pretokenizers")
        for part in inner if isinstance(inner, list) else ():
            yield from parts_of(part)
        if not isinstance(inner, list):
            yield node


class _Unigram(OpenSchema):
    vocab: list[Annotated[tuple[str, float], Field(strict=False)]]
    unk_id: int | None = None
    byte_fallback: bool | None = None


class _Model(OpenSchema):
    vocab: dict[str, Annotated[int, Field(ge=0)]]
    merges: list[str | list[str]] | None = None
    byte_fallback: bool | None = None


class _Added(OpenSchema):
    id: int = Field(ge=0)
    content: str
    special: bool = False


class _Tokens(OpenSchema):
    added_tokens: list[_Added] | None = None


class _File(OpenSchema):
    """What is read of ``tokenizer.json``."""

    model: _Model
    added_tokens: list[_Added] | None = None


def json_tokens(path: Path, size: int) -> tuple[str, list[str], list[float], list[int]]:
    """Tokens and types of ``tokenizer.json`` with a BPE model.

    Raises:
        ModelError: another kind of model.
    """
    data = read_object(path)
    model = data.get("model") or {}
    kind = model.get("type") if isinstance(model, dict) else None
    if kind == "Unigram":
        return unigram_tokens(path, data, size)
    if kind == "WordPiece":
        return wordpiece_tokens(path, data, size)
    if kind != "BPE":
        raise ModelError(
            f"{str(path)!r} has a tokenizer of the type {kind!r:.80}; only BPE, Unigram and WordPiece can be written"
        )
    told = checked(data, _File, lambda why: ModelError(f"{str(path)!r}: {why}"))
    byte_level = "ByteLevel" in json.dumps([data.get("pre_tokenizer"), data.get("decoder")])
    if not byte_level and not told.model.byte_fallback:
        raise ModelError(
            f"{str(path)!r} has a BPE tokenizer that is not byte-level; give a folder with tokenizer.model"
        )
    found = {number: (text, NORMAL) for text, number in told.model.vocab.items()}
    for entry in told.added_tokens or ():
        found[entry.id] = (entry.content, CONTROL if entry.special else USER_DEFINED)
    tokens = in_order(path, found, size, lambda text: (text, UNUSED))
    texts, kinds = [text for text, _ in tokens], [kind for _, kind in tokens]
    if byte_level:
        return "gpt2", texts, [0.0] * len(tokens), kinds
    return "llama", texts, merge_scores(texts, told.model.merges or []), [as_piece(*token) for token in tokens]


def unigram_tokens(path: Path, data: dict[str, Any], size: int) -> tuple[str, list[str], list[float], list[int]]:
    """Tokens, scores and types of a Unigram model in ``tokenizer.json``."""
    told = checked(data["model"], _Unigram, lambda why: ModelError(f"{str(path)!r}: {why}"))
    added = checked(
        {"added_tokens": data.get("added_tokens")}, _Tokens, lambda why: ModelError(f"{str(path)!r}: {why}")
    )
    found = dict(
        enumerate((text, score, UNKNOWN if n == told.unk_id else NORMAL) for n, (text, score) in enumerate(told.vocab))
    )
    for entry in added.added_tokens or ():
        kind = UNKNOWN if entry.id == told.unk_id else CONTROL if entry.special else USER_DEFINED
        found[entry.id] = (entry.content, found[entry.id][1] if entry.id in found else 0.0, kind)
    rows = in_order(path, found, size, lambda text: (text, -10000.0, UNUSED))
    return "llama", [text for text, _, _ in rows], [score for _, score, _ in rows], [kind for _, _, kind in rows]


def merge_scores(texts: list[str], merges: list[Any]) -> list[float]:
    """Scores that make SentencePiece merge in the order of ``merges``: the earlier, the higher."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    return [-float(ranks.get(text, 0 if len(text) != 1 else len(merges))) for text in texts]


def as_piece(text: str, kind: int) -> int:
    """The type of a token of SentencePiece."""
    if BYTE_TOKEN.fullmatch(text):
        return BYTE
    return UNKNOWN if text == "<unk>" else kind
