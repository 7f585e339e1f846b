"""A folder that appears whole or not at all.

Files are written to a temporary folder beside the target, which takes the target's name when everything is there. Into
a folder that exists already (with a tokenizer, say) files are moved one by one, the configuration last: without it no
program takes the folder for a model. If one cannot be moved, those that were are taken away again. Nothing that is
there is overwritten: a tokenizer or settings stay as they are, and a file of a model is an error.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quark.errors import ConfigError, OutputError, QuarkError
from quark.files.atomic import check_name, sync, sync_folder
from quark.files.drafts import draft_folder, naming
from quark.files.lock import alone_in

LAST = ("config.json", "quantization_config.json")
MODEL = (".safetensors", ".index.json", ".gguf", ".onnx", ".data")  # endings of files that are not a user's own
UNFINISHED = "quark_progress.json"
"""The journal in a folder that a job on files writes to, while it is not complete."""
MARK = ".quark-detour"
"""The file that shows that a hidden folder was made by a job, and may be removed by one."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")


@contextmanager
def new_folder(target: str | os.PathLike[str], beside: bool = False, begun: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes ``target`` when the block ends without an error.

    Args:
        target: the folder.
        beside: its files may lie beside a model that is there.
        begun: and beside what the job has that writes them, in its own folder.

    Raises:
        ConfigError: ``target`` is a file, or holds a model already.
        OutputError: it cannot be written.
    """
    goal = Path(target).expanduser().resolve()
    check_target(goal, beside, begun)
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        with draft_folder(goal.parent) as drafts:
            work = drafts / goal.name
            work.mkdir()
            with naming({work: goal}):
                yield work
            for path in work.rglob("*"):
                (sync_folder if path.is_dir() else sync)(path)
            with alone_in(goal.parent):
                check_target(goal, beside, begun)  # no other job has made, or begun, a model there meanwhile
                publish(work, goal)
                sync_folder(goal.parent)
    except OSError as error:
        if isinstance(error, QuarkError):
            raise
        raise OutputError(f"the folder {str(goal)!r} cannot be written: {error.strerror or error}") from error


@contextmanager
def scratch_beside(goal: Path) -> Iterator[Path]:
    """A hidden folder on the disk where ``goal`` will lie, for as long as the block lasts; its name is nobody else's.

    Raises:
        OutputError: it cannot be made.
    """
    parent = goal.expanduser().resolve().parent
    with ExitStack() as stack:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            made = stack.enter_context(draft_folder(parent))
        except OSError as error:
            raise OutputError(f"the folder {str(parent)!r} cannot be written: {error.strerror or error}") from error
        yield made


def check_target(goal: Path, beside: bool = False, begun: bool = False) -> None:
    """The target is free, or a folder without a model, finished or not."""
    check_place(goal)
    if not goal.exists():
        return
    if not goal.is_dir():
        raise ConfigError(f"{str(goal)!r} is a file; an export needs a folder")
    if (goal / UNFINISHED).exists() and not begun:
        raise _begun(goal, f"it has a {UNFINISHED}")
    found = [path.name for pattern in (*LAST, *WEIGHTS) for path in goal.glob(pattern)]
    if found and not beside:
        raise ConfigError(
            f"{str(goal)!r} holds a model already ({', '.join(sorted(found)[:4])}); delete it, or export elsewhere"
        )


def check_place(goal: Path, name: str = "the folder") -> None:
    """The system takes the name of a folder, and the longer one that lies beside it for a while.

    Raises:
        OutputError: it is too long or no text, links lead in a circle, or a folder may not be looked into.
    """
    for path in (goal, detour(goal)):
        check_name(path, name)
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):  # what makes it says so
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OutputError(f"{name} {str(path)[:80]!r} cannot be written: {reason}") from error


def detour(goal: Path) -> Path:
    """Where a job keeps what is finished, until all of it is converted into the format of ``goal``."""
    return goal.with_name(f".{goal.name}.quark")


def begin_detour(goal: Path, source: Path) -> Path:
    """``detour``, marked as our own; only what bears the mark is ever removed.

    Args:
        goal: the target.
        source: the folder that is read.

    Raises:
        ConfigError: something else has its name, or it is the source.
        OutputError: it cannot be made.
    """
    folder = detour(goal)
    free = is_detour(folder) or not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))
    if not free or folder.resolve() == source.resolve():
        raise ConfigError(
            f"{str(folder)!r} is in the way: unfinished work for {str(goal)!r} is kept under that name; move it, or "
            "give another output"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
    except OSError as error:
        raise OutputError(f"the folder {str(folder)!r} cannot be made: {error.strerror}") from error
    return folder


def drop_detour(goal: Path) -> None:
    """Remove ``detour``: at once, so that a kill leaves nothing half removed."""
    with scratch_beside(goal) as made:
        os.replace(detour(goal), made / "old")


def is_detour(folder: Path) -> bool:
    """Whether a folder is one that ``begin_detour`` made."""
    return not folder.is_symlink() and (folder / MARK).is_file()


def check_detour(goal: Path) -> None:
    """No other job that was interrupted is on its way to the target.

    Raises:
        ConfigError: one is.
    """
    if is_detour(detour(goal)):
        raise _begun(detour(goal), f"on its way to {str(goal)!r} in another format")


def _begun(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{str(folder)!r} is what an interrupted job left, {why}: repeat the command that began it, "
        "delete that folder, or give another output"
    )


def publish(work: Path, goal: Path) -> None:
    """Give ``work`` the name ``goal``.

    Raises:
        ConfigError: a file of a model is in the way.
    """
    if not goal.exists():
        os.replace(work, goal)
        return
    new = [path for path in work.iterdir() if not (goal / path.name).exists()]
    kept = {path.name for path in work.iterdir()} - {path.name for path in new}
    if lost := sorted(name for name in kept if name.endswith(MODEL)):
        raise ConfigError(f"{str(goal / lost[0])!r} already exists; delete it, or export to another folder")
    moved: list[Path] = []
    try:
        for path in sorted(new, key=lambda path: (path.name in LAST, path.name)):
            os.replace(path, goal / path.name)
            moved.append(goal / path.name)
    except BaseException:
        for path in moved:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise
