"""What a job that goes on must have in common with the one that began: every input by name, in comparable words.

    {"config.json": digest, "weights of model-00001-of-00002.safetensors": digest, "samples": digest, …}

Contents count, not names, dates or sizes of files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 1 << 22
READERS = 4


def digest_of_file(path: Path) -> str:
    """Of its content, hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def digests_of(files: Iterable[Path]) -> dict[str, str]:
    """Of several files, by their names; read side by side."""
    found = list(files)
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip([path.name for path in found], pool.map(digest_of_file, found), strict=True))


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first input that differs, with what it was and is; ``None`` where all are the same."""
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"another {name} (was {_short(before.get(name))}, is {_short(now.get(name))})"
    return None


def _short(text: str | None) -> str:
    text = "absent" if text is None else text
    return repr(text) if len(text) <= 60 else repr(f"{text[:57]}...")
