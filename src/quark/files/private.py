"""Folders for intermediate files, and the sentence that tells of a disk that is full meanwhile."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quark.errors import OutputError, QuarkError

#: What systems say where nothing more can be written: no space, no quota, a limit of the size of files, a disk that has
#: become read-only. Not every system has all of them.
_FULL = frozenset(getattr(errno, name, None) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS")) - {None}


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder of our own in the system's folder for such, which is removed when the block ends.

    Raises:
        OutputError: the disk became full in the block.
    """
    with tempfile.TemporaryDirectory(prefix="quark-", ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        except OSError as error:
            if words := told(error, Path(folder), "the environment variable TMPDIR"):
                raise words from error
            raise


def told(error: OSError, folder: Path | None, option: str) -> OutputError | None:
    """The error of a full disk in words; ``None`` for any other error.

    Args:
        error: what ended the work in a private folder.
        folder: that folder.
        option: what names another one.
    """
    if isinstance(error, QuarkError) or error.errno not in _FULL:
        return None
    place = str(error.filename or folder or tempfile.gettempdir())
    return OutputError(
        f"the intermediate file {place!r} cannot be written: {error.strerror}; "
        f"make room, or give another folder ({option})"
    )
