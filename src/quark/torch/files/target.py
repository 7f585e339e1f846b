"""The folder that a job on files writes to: marked while the job is not done, and finished at its end."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quark.errors import ConfigError, OutputError, QuarkError
from quark.files.atomic import replace_file
from quark.files.folder import MARK, UNFINISHED, begin_detour, check_detour, check_target, drop_detour, is_detour
from quark.files.journal import Journal
from quark.torch.export.card import CARD
from quark.torch.export.checkpoint import SUFFIX, Checkpoint
from quark.torch.export.declared import silent
from quark.torch.export.model_files import copy_files
from quark.torch.export.shards import Item

log = logging.getLogger(__name__)
PROGRESS = UNFINISHED
UNBORN = {f".{PROGRESS}.{end}" for end in ("lock", "part", "previous")} | {f"..{PROGRESS}.previous.part", MARK}
"""What a job leaves that was killed before it began."""
INDEX = ".index.json"


def is_finished(goal: Path) -> bool:
    """Whether a folder holds a quantized checkpoint, and not the beginning of one."""
    return (goal / "config.json").is_file() and not (goal / PROGRESS).exists()


@contextmanager
def on_the_way(goal: Path, source: Path) -> Iterator[Path]:
    """The folder for what is converted into another format at the end of the job. A refusal before anything is
    finished, or of what is finished, would come again: then nothing stays of it to go on with.

    Raises:
        ConfigError: the target holds a model, or something else has the name of that folder.
        OutputError: it cannot be made.
    """
    check_target(goal)
    if is_finished(begin_detour(goal, source)):  # of a process that was killed before it was converted
        drop_detour(goal)
    folder = begin_detour(goal, source)
    try:
        yield folder
    except QuarkError as error:
        unborn = is_detour(folder) and {path.name for path in folder.iterdir()} <= UNBORN
        if not isinstance(error, OutputError) and (unborn or is_finished(folder)):  # a full disk is a matter of time
            drop_detour(goal)
        raise


def begin(goal: Path, belongs: Mapping[str, str]) -> Journal:
    """The journal of this job in its target, which it marks as unfinished.

    Raises:
        ConfigError: the folder holds something else, or the beginning of a job with another input, which is named; or
            a job in another format is on its way to it.
    """
    if goal.exists() and not goal.is_dir():
        raise ConfigError(f"{str(goal)!r} is a file; the quantized checkpoint needs a folder")
    check_detour(goal)
    there = sorted({path.name for path in goal.iterdir()} - UNBORN) if goal.is_dir() else []
    if there and PROGRESS not in there:
        raise ConfigError(
            f"{str(goal)!r} is not empty (it holds {there[0]!r}); nothing is overwritten: use a new folder"
        )
    try:
        goal.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"the folder {str(goal)!r} cannot be made: {error.strerror}") from error
    journal = Journal(
        goal / PROGRESS, belongs, "the mark of an unfinished job", "Delete its folder, or use another one"
    )
    if PROGRESS in there:
        log.info("%s: %d files are there already", goal, sum(name.endswith(SUFFIX) for name in there))
    journal.begin()
    return journal


@contextmanager
def held(goal: Path, journal: Journal, made: bool) -> Iterator[None]:
    """No other process works in the folder of a job meanwhile; of one that is refused before anything is finished,
    nothing stays, nor the folder if it was ``made`` for it.

    Raises:
        OutputError: another process does.
    """
    refused = False
    try:
        with Journal.held(goal / PROGRESS, "the folder of the job"):
            try:
                yield
            except Exception:  # of any kind: it goes on
                refused = journal.is_empty
                if refused:
                    journal.remove()
                    (goal / MARK).unlink(missing_ok=True)
                raise
    finally:
        if refused and made and not any(goal.iterdir()):
            goal.rmdir()


def finish(
    goal: Path,
    checkpoint: Checkpoint,
    items: Mapping[str, list[Item]],
    entries: Mapping[str, Any],
    describe: Callable[[Path], None] | None = None,
) -> None:
    """The index of ``items`` (by file), the other files of the source, the configuration with the ``entries`` of the
    quantized model, and what describes them."""
    copy_files(checkpoint.folder, goal)
    if len(items) > 1 or any(checkpoint.folder.glob(f"*{SUFFIX}{INDEX}")):
        write_index(goal, checkpoint, items)
    write_json(goal / "config.json", {**silent(checkpoint.config), **entries})
    if describe is not None:
        (goal / CARD).unlink(missing_ok=True)  # of a process that was killed here
        describe(goal)


def write_index(goal: Path, checkpoint: Checkpoint, forms: Mapping[str, list[Item]]) -> None:
    """Which file has which tensor."""
    places = {tensor: file for file, items in forms.items() for item in items for tensor in item.form}
    total = sum(item.size for items in forms.values() for item in items)
    stem = next((path.name for path in checkpoint.folder.glob(f"*{SUFFIX}{INDEX}")), f"model{SUFFIX}{INDEX}")
    write_json(goal / stem, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A whole file, or none."""
    replace_file(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
