"""Files that the vocabulary of a GGUF file comes from; seen without a library, so that what lacks them is refused at
once."""

from __future__ import annotations

from pathlib import Path

from quark.errors import ModelError

VOCABULARIES = ("tokenizer.model", "tokenizer.json")  # the first that is there counts


def vocabulary_in(folder: Path) -> Path:
    """The file with the vocabulary.

    Raises:
        ModelError: the folder holds none.
    """
    found = next((folder / name for name in VOCABULARIES if (folder / name).is_file()), None)
    if found is None:
        raise ModelError(
            f"{str(folder)!r} has neither {VOCABULARIES[0]} nor {VOCABULARIES[1]}, and a GGUF file holds a vocabulary: "
            f"copy the tokenizer of the original model there (one of pictures or sounds alone goes into none)"
        )
    return found
