"""The files behind ``UserCustomOpLibPath``: paths of libraries, or of folders that hold them, absolute or relative."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quark.errors import ModelError

Libraries = str | Sequence[str] | None
SUFFIXES = (".so", ".dll", ".dylib")


def library_files(libraries: Libraries) -> list[str]:
    """Absolute paths, since a loader searches the system's folders, not the current one, for a bare name.

    Raises:
        ModelError: there is no such file, or a folder holds no library.
    """
    given = [libraries] if isinstance(libraries, (str, Path)) else libraries or ()
    return [str(file) for path in given for file in _files(Path(path))]


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ModelError(f"UserCustomOpLibPath: there is no {str(path)!r} (current folder: {str(Path.cwd())!r})")
    if path.is_file():
        return [path.resolve()]
    found = sorted(file.resolve() for file in path.iterdir() if file.suffix in SUFFIXES)
    if not found:
        raise ModelError(f"UserCustomOpLibPath: the folder {str(path)!r} holds no library ({', '.join(SUFFIXES)})")
    return found
