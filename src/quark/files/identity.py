"""What a job that goes on must have in common with the one that began: every input by name, in comparable words.

    {"config.json": digest, "weights of model-00001-of-00002.safetensors": digest, "samples": digest, …}

Contents count, not names, dates or sizes of files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quark.reading import DAMAGED_TEXT

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
    """The first three inputs that differ, with what they were and are; ``None`` where all are the same."""
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(_changed(name, before.get(name), now.get(name)) for name in changed[:3]) or None


def _changed(name: str, before: str | None, now: str | None) -> str:
    """How an input changed, in words; of values that are JSON the innermost part that did."""
    path = ""
    if before is not None and now is not None:
        try:
            path, was, now_is = _differ(json.loads(before), json.loads(now))
        except DAMAGED_TEXT:  # a digest, or a file that was edited by hand: shown as it stands there
            pass
        else:
            before, now = (json.dumps(was), json.dumps(now_is)) if path else (before, now)
    return f"another {name}{path} (was {_short(before)}, is {_short(now)})"


def _differ(before: Any, now: Any) -> tuple[str, Any, Any]:
    """Where two values differ first, innermost: (path such as ``.default.inputs.method``, was, is).

    A field is a list of its name and its value, or an item of an object.
    """
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys() and before != now:
        key = next(key for key in before if before[key] != now[key])
        path, was, now_is = _differ(before[key], now[key])
        return f".{key}{path}", was, now_is
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        apart = [place for place, (one, other) in enumerate(zip(before, now, strict=True)) if one != other]
        if len(before) == 2 and apart == [1] and isinstance(before[0], str):
            path, was, now_is = _differ(before[1], now[1])
            return f".{before[0]}{path}", was, now_is
        if apart and isinstance(before[apart[0]], list):
            return _differ(before[apart[0]], now[apart[0]])
    return "", before, now


def _short(text: str | None) -> str:
    text = "absent" if text is None else text
    return text if len(text) <= 60 else f"{text[:57]}..."
