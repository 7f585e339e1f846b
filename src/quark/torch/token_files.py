"""Files of token ids and texts, as far as they need neither tokenizer nor torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quark.errors import DataError
from quark.numerics.array_files import ArrayArchive, load_array
from quark.reading import parse_json, read_text, regular_file

KINDS = (".txt", ".md", ".jsonl", ".npz", ".npy")


def read_rows(path: Path) -> list[np.ndarray | str]:
    """The documents of a file: token ids (int64), or texts; kinds as in ``quark.torch.language.read_ids``.

    Raises:
        DataError: a file that is missing, damaged, or of another kind.
    """
    regular_file(path, DataError, "the data")
    if path.suffix in (".npz", ".npy"):
        return [*read_array(path)]
    if path.suffix == ".jsonl":
        return [row_of(value) for value in read_lines(path)]
    if path.suffix in KINDS:
        return [read_text(path, DataError, "the data")]
    raise DataError(f"the data {str(path)!r} has no known kind; kinds: {', '.join(KINDS)}")


def empty(path: Path) -> DataError:
    """What is said of a file without a token."""
    return DataError(f"the data {str(path)!r} is empty")


def check_rows(path: Path, words: int | None) -> None:
    """A file holds something, and no token id that a model lacks.

    Args:
        path: of the file.
        words: of the model; None: not known.

    Raises:
        DataError: it does not.
    """
    rows = [row for row in read_rows(path) if len(row)]
    if not rows:
        raise empty(path)
    highest = max((int(row.max()) for row in rows if not isinstance(row, str)), default=0)
    if words is not None and highest >= words:
        raise no_word(highest, words)


def no_word(highest: int, words: int) -> DataError:
    """What is said of a token id that a model lacks."""
    return DataError(f"the data hold the token id {highest}, and the model has {words}: other tokenizer?")


def read_array(path: Path) -> list[np.ndarray]:
    """Rows of token ids."""
    if path.suffix == ".npz":
        arrays = ArrayArchive(path)
        name = "input_ids" if "input_ids" in arrays else next(iter(arrays), None)
        if name is None:
            raise DataError(f"{str(path)!r} holds no array")
        values = arrays[name]
        mask = arrays["attention_mask"] if name == "input_ids" and "attention_mask" in arrays else None
    else:
        values, mask = load_array(path), None
    if values.dtype.kind not in "iu" or values.ndim not in (1, 2):
        raise DataError(f"{str(path)!r} holds {values.dtype} of shape {values.shape}; token ids are integers in rows")
    if values.size and values.max() > np.iinfo(np.int64).max:
        raise DataError(f"{str(path)!r} holds {values.max()}, which is not a token id: none has more than 63 bits")
    rows, kept = np.atleast_2d(values), seen(mask, values.shape, repr(str(path)))
    return [row[kept[number]].astype(np.int64) for number, row in enumerate(rows)]


def seen(mask: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
    """Which ids [rows, ids] a model sees.

    Raises:
        DataError: a mask of other numbers than 0 and 1, or of another shape than the ids.
    """
    if mask is None:
        return np.ones(shape if len(shape) > 1 else (1, *shape), dtype=bool)
    try:
        found = np.asarray(mask)
    except ValueError:  # rows of several lengths
        found = np.zeros(0, dtype=object)
    if found.shape != shape or found.dtype.kind not in "iub" or not np.isin(found, (0, 1)).all():
        raise DataError(f"the attention_mask of {what} must have a 1 or a 0 for each of its input_ids")
    return np.atleast_2d(found) != 0


def read_lines(path: Path) -> Iterator[Any]:
    """The values of a JSON-lines file."""
    for number, line in enumerate(read_text(path, DataError, "the data").splitlines(), 1):
        if line.strip():
            yield parse_json(line, f"line {number} of {str(path)!r}", DataError)


def row_of(value: Any) -> np.ndarray | str:
    """Token ids or text of one line."""
    if isinstance(value, dict) and "input_ids" in value:
        ids = value["input_ids"]
        if not isinstance(ids, list) or any(type(one) is not int or not 0 <= one < 2**31 for one in ids):
            raise DataError("the input_ids of a line of a .jsonl file must be a list of integers, 0 or more")
        kept = seen(value.get("attention_mask"), (len(ids),), "a line of a .jsonl file")[0]
        return np.asarray(ids, dtype=np.int64)[kept]
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise DataError('a line of a .jsonl file is a string, or an object with "text" or "input_ids"')
    return text
