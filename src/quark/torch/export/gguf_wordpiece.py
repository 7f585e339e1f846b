"""The vocabulary of a GGUF file, from a ``tokenizer.json`` with a WordPiece model, as BERT has it.

llama.cpp lowers all letters, takes accents from them, and puts signs and Chinese letters apart, whatever the file says;
a tokenizer that does anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from quark.errors import ModelError
from quark.files.schema import OpenSchema, checked

T = TypeVar("T")
NORMAL, CONTROL, UNUSED = 1, 3, 5
SPACE = "\u2581"  # before what begins a word
WITHIN = "##"  # before what does not
KIND = "bert"  # llama.cpp's name of the kind, of any network
LETTERS: tuple[tuple[str, tuple[object, ...]], ...] = (  # fields of the normalizer, and what llama.cpp does
    ("lowercase", (True,)),
    ("strip_accents", (None, True)),
    ("clean_text", (True,)),
    ("handle_chinese_chars", (True,)),
)


class _Added(OpenSchema):
    id: int = Field(ge=0)
    content: str
    special: bool = False


class _Model(OpenSchema):
    vocab: dict[str, Annotated[int, Field(ge=0)]]
    continuing_subword_prefix: str = WITHIN


class _File(OpenSchema):
    """What is read of ``tokenizer.json``."""

    model: _Model
    added_tokens: list[_Added] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def wordpiece_tokens(path: Path, data: Mapping[str, Any], size: int) -> tuple[str, list[str], list[float], list[int]]:
    """Kind, tokens, scores and types.

    Raises:
        ModelError: another way to split a text than llama.cpp's, or more tokens than ``size``.
    """
    told = checked(data, _File, lambda why: ModelError(f"{str(path)!r}: {why}"))
    check_letters(path, told)
    found = {number: (piece_of(text), NORMAL) for text, number in told.model.vocab.items()}
    for entry in told.added_tokens or ():
        if not entry.special:
            raise ModelError(
                f"{str(path)!r} adds the word {entry.content!r:.80} to a WordPiece model, unlike llama.cpp"
            )
        found[entry.id] = (entry.content, CONTROL)
    rows = in_order(path, found, size, lambda text: (text, UNUSED))
    return KIND, [text for text, _ in rows], [0.0] * len(rows), [kind for _, kind in rows]


def in_order(path: Path, found: Mapping[int, T], size: int, unused: Callable[[str], T]) -> list[T]:
    """Tokens by their numbers, with one that is not used where a number has none.

    Raises:
        ModelError: a number beyond the rows of the embedding.
    """
    last = max(found, default=-1)
    if last >= size:
        raise ModelError(f"{str(path)!r} has the token {last}, and the embedding of the model {size} rows")
    return [found[number] if number in found else unused(f"[PAD{number}]") for number in range(last + 1)]


def piece_of(text: str) -> str:
    """A token as llama.cpp looks it up."""
    return text.removeprefix(WITHIN) if text.startswith(WITHIN) else f"{SPACE}{text}"


def check_letters(path: Path, told: _File) -> None:
    """A text is split as llama.cpp splits it.

    Raises:
        ModelError: it is not.
    """
    kinds = [(node or {}).get("type") for node in (told.normalizer, told.pre_tokenizer)]
    if kinds != ["BertNormalizer", "BertPreTokenizer"] or told.model.continuing_subword_prefix != WITHIN:
        raise ModelError(
            f"{str(path)!r} has a WordPiece model behind {kinds[0]} and {kinds[1]}; llama.cpp does what BertNormalizer "
            f"and BertPreTokenizer do, with {WITHIN!r} within words"
        )
    for name, allowed in LETTERS:
        value = (told.normalizer or {}).get(name)
        if value not in allowed:
            raise ModelError(f"{str(path)!r} has {name}={value!r}, and llama.cpp does {name}=True in a WordPiece model")
