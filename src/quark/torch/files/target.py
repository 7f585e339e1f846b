"""The folder that a job on files writes to: marked while the job is not done, and finished at its end."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quark.errors import ConfigError, OutputError
from quark.files.identity import difference
from quark.files.untrusted import Schema, read_state
from quark.files.whole import replace_file
from quark.torch.export.card import CARD
from quark.torch.export.checkpoint import SUFFIX, Checkpoint
from quark.torch.export.shards import Item
from quark.torch.files.carried import record_of

log = logging.getLogger(__name__)
VERSION = 1
PROGRESS = "quark_progress.json"  # in the target while it is not complete
SCALES = ".quark_activations"  # beside it, where activations are static
TUNED = ".quark_tuned"  # a folder beside it, where an algorithm tunes weights
CHANGED = ".quark_changed"  # and one where algorithms change the float model
INDEX = ".index.json"
LEFT_OUT = ("config.json", CARD)


class Progress(Schema):
    """What the file of an unfinished job holds."""

    version: int
    belongs: dict[str, str]


def is_finished(goal: Path) -> bool:
    """Whether a folder holds a quantized checkpoint, and not the beginning of one."""
    return (goal / "config.json").is_file() and not (goal / PROGRESS).exists()


def begin(goal: Path, belongs: Mapping[str, str]) -> None:
    """Mark the target as that of this job, or find the mark of this job there.

    Raises:
        ConfigError: the folder holds something else, or the beginning of a job with another input, which is named.
    """
    if goal.exists() and not goal.is_dir():
        raise ConfigError(f"{str(goal)!r} is a file; the quantized checkpoint needs a folder")
    unborn = {f".{PROGRESS}.lock", f".{PROGRESS}.part"}  # of a job that was killed before it began
    there = sorted({path.name for path in goal.iterdir()} - unborn) if goal.is_dir() else []
    unwritten = PROGRESS in there and is_lost(goal)
    if PROGRESS in there and not unwritten:
        check_mark(goal, belongs)
        log.info("%s: %d files are there already", goal, sum(name.endswith(SUFFIX) for name in there))
        return
    if there and not unwritten:
        raise ConfigError(
            f"{str(goal)!r} is not empty (it holds {there[0]!r}); nothing is overwritten: use a new folder"
        )
    try:
        goal.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"the folder {str(goal)!r} cannot be made: {error.strerror}") from error
    write_json(goal / PROGRESS, {"version": VERSION, "belongs": dict(belongs)})


def is_lost(goal: Path) -> bool:
    """Whether the disk lost the end of the mark, and nothing was finished under it: then the job begins anew."""
    files = [path for path in goal.rglob("*") if path.is_file() and not path.name.endswith((".part", ".lock"))]
    return files == [goal / PROGRESS] and not files[0].read_bytes().endswith(b"}\n")


def check_mark(goal: Path, belongs: Mapping[str, str]) -> None:
    """Raise where the unfinished job in ``goal`` is another one."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{str(goal)!r} holds the beginning of another job: {why}. Delete it, or use another folder")

    mark = read_state(goal / PROGRESS, Progress, lambda why: refuse(f"{PROGRESS} {why}"))
    if mark.version != VERSION:
        raise refuse(f"{PROGRESS} has the version {mark.version}, and this release reads {VERSION}")
    if (other := difference(mark.belongs, belongs)) is not None:
        raise refuse(f"it has {other}")


def finish(
    goal: Path,
    checkpoint: Checkpoint,
    items: Mapping[str, list[Item]],
    entry: Mapping[str, Any],
    untied: bool = False,
    describe: Callable[[Path], None] | None = None,
) -> None:
    """The index of ``items`` (by file), the other files of the source, the configuration, and what describes them."""
    copy_others(checkpoint, goal)
    if len(items) > 1 or any(checkpoint.folder.glob(f"*{SUFFIX}{INDEX}")):
        write_index(goal, checkpoint, items)
    config = without_quantization(checkpoint.config) | ({"tie_word_embeddings": False} if untied else {})
    write_json(goal / "config.json", {**config, "quantization_config": dict(entry)})
    (goal / SCALES).unlink(missing_ok=True)
    for file in items:
        record_of(goal / file).unlink(missing_ok=True)
    for folder in (TUNED, CHANGED):
        shutil.rmtree(goal / folder, ignore_errors=True)
    if describe is not None:
        (goal / CARD).unlink(missing_ok=True)  # of a process that was killed here
        describe(goal)
    (goal / PROGRESS).unlink()


def copy_others(checkpoint: Checkpoint, goal: Path) -> None:
    """Tokenizer, generation settings, licence: everything but tensors, their index, and what is written anew."""
    for path in checkpoint.folder.iterdir():
        kept = path.is_file() and path.name not in LEFT_OUT and not path.name.endswith((SUFFIX, SUFFIX + INDEX))
        if kept and not path.name.startswith("."):
            shutil.copyfile(path, goal / path.name)


def write_index(goal: Path, checkpoint: Checkpoint, forms: Mapping[str, list[Item]]) -> None:
    """Which file has which tensor."""
    places = {tensor: file for file, items in forms.items() for item in items for tensor in item.form}
    total = sum(item.size for items in forms.values() for item in items)
    stem = next((path.name for path in checkpoint.folder.glob(f"*{SUFFIX}{INDEX}")), f"model{SUFFIX}{INDEX}")
    write_json(goal / stem, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` without what an earlier quantization wrote."""
    return {key: value for key, value in config.items() if key != "quantization_config"}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A whole file, or none."""
    replace_file(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
