"""One file replaced by its next content: whenever the process or the machine stops, the old or the new one is there.

The content is written beside the file, brought to the disk (fsync), then renamed. Links are followed, the mode of a
file that is there stays, and what is not a regular file is refused.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.errors import OutputError, QuarkError


def replace_file(path: Path, content: bytes | str, name: str = "the output path") -> None:
    """Give ``path`` a new content. The file beside it that is written first is ``.<name>.part``.

    Raises:
        OutputError: it is not a regular file, or it cannot be written; what was there is there still.
    """
    place = resolved(path, name)
    try:
        with part_of(place) as part:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
    except OutputError as error:
        raise OutputError(f"{name}: {error}") from error.__cause__


@contextmanager
def part_of(goal: Path, also: type[Exception] = OSError) -> Iterator[Path]:
    """A path beside ``goal`` to write to, which becomes ``goal`` when the block ends.

    Args:
        goal: a regular file, or nothing yet.
        also: what a library raises where the disk is full, beside ``OSError``.

    Raises:
        OutputError: it cannot be written.
    """
    part = goal.with_name(f".{goal.name}.part")
    try:
        part.unlink(missing_ok=True)  # of a process that was killed; or a link, which would be written through
        yield part
        take_place(part, goal)
    except (OSError, also) as error:
        if isinstance(error, QuarkError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{str(goal)!r} cannot be written: {reason}") from error
    finally:
        part.unlink(missing_ok=True)


def resolved(path: Path, name: str) -> Path:
    """Where a file is or will be: links are followed.

    Raises:
        OutputError: a folder, a device, a pipe, or a path that cannot be.
    """
    try:
        place = Path(os.path.realpath(path))
        check_name(place, name)
        mode = place.stat().st_mode
    except FileNotFoundError:
        return place
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{name} {str(path)!r} cannot be written: {reason}") from error
    if stat.S_ISDIR(mode):
        example = str(path / "model.onnx")
        raise OutputError(f"{name} {str(path)!r} is a folder: add a file name, as in {example!r}")
    if not stat.S_ISREG(mode):
        raise OutputError(f"{name} {str(path)!r} is not a regular file but a device, a pipe or a socket: give a file")
    return place


def check_name(path: Path, name: str, kind: type[QuarkError] = OutputError) -> None:
    """The libraries that read and write models open what is UTF-8 alone.

    Raises:
        kind: a name that is not.
    """
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError as error:
        raise kind(f"{name} {os.fspath(path)!r} is no UTF-8 text: give another path") from error


def take_place(draft: Path, place: Path) -> None:
    """Bring ``draft`` to the disk and give it the name ``place``, with the mode of a file that is there."""
    settle(draft, place)
    os.replace(draft, place)
    sync_folder(place.parent)


def settle(draft: Path, place: Path) -> None:
    """Bring a file to the disk, with the mode of the one that it will replace."""
    if place.exists():
        draft.chmod(stat.S_IMODE(place.stat().st_mode))
    sync(draft)


def sync(path: Path) -> None:
    """Have the system bring the content of a file to the disk."""
    handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0)) if os.access(path, os.W_OK) else None
    if handle is None:  # a mode that lets nobody write: it was written by us a moment ago, and is read
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(handle)
    except OSError:  # Windows syncs only what may be written; some network file systems sync nothing
        if os.name != "nt":
            raise
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Have the system bring the names in a folder to the disk; Windows does that by itself."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
