"""One process at a time: for the moment in which files take their places, and for the length of a job that resumes.

Locks are the system's (``flock``, on Windows ``LockFile``), so that those of a killed process are gone with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quark.errors import OutputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


ALIVE = ".alive"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process publishes into ``folder``. Windows cannot lock folders, and does not wait."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network file system without locks; every single rename is still whole
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def marked_alive(folder: Path) -> Iterator[None]:
    """Show that the process that works in ``folder`` is alive, by a locked file in it, for as long as the block lasts.

    The folder itself is not locked: who publishes into it (a model is saved into a draft) locks that.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(folder / ALIVE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def is_abandoned(folder: Path) -> bool:
    """Whether the process that worked in ``folder`` is gone; False where no mark or lock tells."""
    if fcntl is None:
        return False
    try:
        handle = os.open(folder / ALIVE, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def working_on(path: Path | None, name: str) -> Iterator[None]:
    """Hold ``path``, a file that is kept over several runs, for this process; ``None`` holds nothing.

    The lock is a file beside it, ``.<name>.lock``, which goes with the job.

    Raises:
        OutputError: another process holds it.
    """
    if path is None or not path.parent.is_dir():  # whoever opens the file says that its folder is missing
        yield
        return
    place = Path(os.path.realpath(path))
    lock = place.with_name(f".{place.name}.lock")
    handle = _held(lock)
    if handle is None:
        raise OutputError(f"{name} {str(path)!r}: another process works on it; wait for it, or name another file")
    with _let_go(lock, handle):
        yield


@contextmanager
def turn_on(path: Path) -> Iterator[None]:
    """Wait for ``path``, a file to which several processes add, and hold it: between reading and replacing it."""
    place = Path(os.path.realpath(path))
    lock = place.with_name(f".{place.name}.lock")
    while (handle := _held(lock)) is None:
        time.sleep(0.02)
    with _let_go(lock, handle):
        yield


@contextmanager
def _let_go(lock: Path, handle: int) -> Iterator[None]:
    """Remove a locked file when the block ends."""
    try:
        yield
    finally:
        if os.name == "nt":  # an open file cannot be removed there, nor one that somebody else has taken meanwhile
            os.close(handle)
        with suppress(PermissionError):
            lock.unlink(missing_ok=True)
        if os.name != "nt":
            os.close(handle)


def _held(lock: Path) -> int | None:
    """An open handle of the locked file; ``None`` where another process has it."""
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise OutputError(f"{str(lock)!r} cannot be written: {error.strerror}") from error
        if not _lock(handle):
            os.close(handle)
            return None
        try:
            if os.path.samestat(os.fstat(handle), lock.stat()):
                return handle
        except FileNotFoundError:  # its owner ended between our opening and our locking
            pass
        os.close(handle)


def _lock(handle: int) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    return True
