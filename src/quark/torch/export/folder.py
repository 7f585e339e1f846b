"""A folder that appears whole or not at all.

Files are written to a temporary folder beside the target, which takes the target's name when everything is there. Into
a folder that exists already (with a tokenizer, say) files are moved one by one, the configuration last: without it no
program takes the folder for a model. Nothing that is there is overwritten.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from quark.errors import ConfigError

LAST = ("config.json", "quantization_config.json")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


@contextmanager
def new_folder(target: str | os.PathLike[str], beside: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes ``target`` when the block ends without an error.

    Args:
        target: the folder.
        beside: its files may lie beside a model that is there.

    Raises:
        ConfigError: ``target`` is a file, or holds a model already.
    """
    goal = Path(target).expanduser().resolve()
    check_target(goal, beside)
    goal.parent.mkdir(parents=True, exist_ok=True)
    work = goal.parent / f".{goal.name}.{uuid4().hex[:12]}"
    work.mkdir()
    try:
        yield work
        publish(work, goal)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def check_target(goal: Path, beside: bool = False) -> None:
    """The target is free, or a folder without a model."""
    if not goal.exists():
        return
    if not goal.is_dir():
        raise ConfigError(f"{str(goal)!r} is a file; an export needs a folder")
    found = [path.name for pattern in (*LAST, *WEIGHTS) for path in goal.glob(pattern)]
    if found and not beside:
        raise ConfigError(
            f"{str(goal)!r} holds a model already ({', '.join(sorted(found)[:4])}); delete it, or export elsewhere"
        )


def publish(work: Path, goal: Path) -> None:
    """Give ``work`` the name ``goal``."""
    if not goal.exists():
        os.replace(work, goal)
        return
    for path in sorted(work.iterdir(), key=lambda path: path.name in LAST):
        if not (goal / path.name).exists():
            os.replace(path, goal / path.name)
