"""The gate: every file that a command or a function writes passes here, before the work and at its end.

    with drafts({"model": Output(model, kind="model"), "report": Output(report)}, inputs) as paths:
        ...                     # write to paths["model"]; whatever fails in here leaves everything as it was

Before: links are followed; what is not a regular file is refused, and so is a path that is an input or another output,
whatever way it is spelled (links, hard links, upper and lower case); a command does not replace what is not a result of
this package unless it is told to. At the end the drafts, which lie in folders of their own beside their targets, take
their places: all of them, or none. A file that is replaced keeps its mode.

A kill leaves its folder of drafts, which the next run that writes there removes (not on Windows, which cannot lock it).

Not handled: a kill between two of several renames leaves the first ones new. A model whose external data changes is
taken away before its data, so that no old model ever reads new data.
"""

from __future__ import annotations

import os
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quark.dataclass import dataclass
from quark.errors import OutputError
from quark.files.atomic import resolved, settle, sync_folder
from quark.files.drafts import PREVIOUS, draft_folder, naming, sweep
from quark.files.lock import alone_in
from quark.files.ours import is_ours

Input = tuple[str, Path]
"""What it is, in words for a message, and where: a file, or a folder with all that is in it."""
DATA = ".data"


@dataclass(frozen=True)
class Output:
    """A file that is to be written.

    Attributes:
        path: where, as it was given.
        name: what users call it.
        kind: "model", "text", or "state" for a file that is read and continued.
        folder: its folder is made where it is missing.
    """

    path: Path
    name: str = "the output path"
    kind: str = "text"
    folder: bool = False

    @property
    def endings(self) -> tuple[str, ...]:
        """What is added to the name for the files that may come with it."""
        return ("", DATA) if self.kind == "model" else ("",)

    def __str__(self) -> str:
        return f"{self.name} {str(self.path)!r}"


Draft = tuple[Output, Path, Path]
"""An output, where it will lie, and where it is written."""


def check_outputs(outputs: Iterable[Output], inputs: Iterable[Input] = (), overwrite: bool = True) -> None:
    """Refuse outputs before any work is done.

    Args:
        outputs: all that one call or command writes.
        inputs: all that it reads; looked at only where an output exists.
        overwrite: replace files that are not results of this package.

    Raises:
        OutputError: a folder, a device, a folder that is missing or takes no files, an input, two outputs in one place,
            or a file that only ``overwrite`` replaces.
    """
    places = [(output, _place(output)) for output in outputs]
    _check_apart(places)
    there = {
        _identity(file): (output, file)
        for output, place in places
        for file in _files_of(output, place)
        if os.path.exists(file)  # where ``Path.exists`` would raise, for a name that is too long, nothing is
    }
    for name, path in inputs if there else ():
        for identity, file in _identities(path):
            if identity in there:
                output, _ = there[identity]
                what = f"{name} itself" if file == path else f"{str(file)!r}, a part of {name}"
                raise OutputError(f"{output} is {what}: give another path")
    for output, file in () if overwrite else there.values():
        if output.kind != "state" and not is_ours(file, output.kind) and not _is_data(output, file):
            raise OutputError(
                f"{output}: {str(file)!r} is there and is not a result of quark: remove it, or give --overwrite"
            )


@contextmanager
def drafts(outputs: Mapping[str, Output], inputs: Iterable[Input] = ()) -> Iterator[dict[str, Path]]:
    """Paths to write to; what lies there when the block ends takes the places of the outputs, all of it or nothing.

    Args:
        outputs: by names of the caller's. A draft that is not written is left out. Endings such as ``.data`` may be
            added to the name of a model's draft.
        inputs: as ``check_outputs`` takes them.

    Raises:
        OutputError: as ``check_outputs``; or the files cannot be moved.
    """
    check_outputs(outputs.values(), inputs)
    with ExitStack() as stack:
        made: dict[str, Draft] = {}
        for key, output in outputs.items():
            place = resolved(output.path, output.name)
            made[key] = output, place, _folder_beside(output, place, stack) / place.name
        names = {draft: output.path for output, _, draft in made.values()}
        with naming(names | {draft.parent: output.path.parent for output, _, draft in made.values()}):
            yield {key: path for key, (_, _, path) in made.items()}
        _publish(list(made.values()))


@contextmanager
def draft_of(output: Output, inputs: Iterable[Input] = ()) -> Iterator[Path]:
    """``drafts`` of one output."""
    with drafts({"": output}, inputs) as paths:
        yield paths[""]


def write_output(output: Output, text: str, inputs: Iterable[Input] = ()) -> None:
    """Write one text.

    Raises:
        OutputError: as ``drafts``; or the disk is full.
    """
    with draft_of(output, inputs) as path:
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{output} cannot be written: {error.strerror or error}") from error


# ---- before ----------------------------------------------------------------------------------------------------------


def _place(output: Output) -> Path:
    """Where an output will lie, in a folder that takes files."""
    place = resolved(output.path, output.name)
    folder = place.parent
    while output.folder and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        shown = str(output.path.parent if place.name == output.path.name else folder)
        raise OutputError(f"{output}: the folder {shown!r} does not exist: create it, or give another path")
    try:
        with tempfile.TemporaryFile(dir=folder):
            return place
    except OSError as error:
        raise OutputError(
            f"{output}: the folder {str(folder)!r} is not writable ({error.strerror}): "
            "change its permissions, or give another path"
        ) from error


def _check_apart(places: Sequence[tuple[Output, Path]]) -> None:
    """Raise where two outputs would be one file."""
    seen: dict[tuple[tuple[int, int] | Path, str], Output] = {}
    for output, place in places:
        exists = place.parent.is_dir()
        folder = _identity(place.parent) if exists else place.parent
        alike = len(places) > 1 and exists and ignores_case(place.parent)
        for file in _files_of(output, place):
            key = folder, _folded(file.name) if alike else file.name
            other = seen.setdefault(key, output)
            if other is not output:
                raise OutputError(f"{other} and {output} are one file: give two paths")


def ignores_case(folder: Path) -> bool:
    """Whether ``A`` and ``a`` are one file in ``folder``."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".quark-") as file:
        return (folder / Path(file.name).name.swapcase()).exists()


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _files_of(output: Output, place: Path) -> list[Path]:
    return [place.with_name(place.name + ending) for ending in output.endings]


def _is_data(output: Output, file: Path) -> bool:
    """Whether a file is the external data of a model of ours, which has no words of its own."""
    main = file.with_name(file.name.removesuffix(DATA))
    return output.kind == "model" and file.name.endswith(DATA) and main.is_file() and is_ours(main, "model")


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _identities(path: Path) -> Iterator[tuple[tuple[int, int], Path]]:
    """A file, or all files in a folder and below, also by way of links."""
    if not path.is_dir():
        if path.exists():
            yield _identity(path), path
        return
    seen: set[tuple[int, int]] = set()
    for folder, below, names in os.walk(path, followlinks=True):
        if _identity(Path(folder)) in seen:
            below.clear()
            continue
        seen.add(_identity(Path(folder)))
        for file in (Path(folder) / name for name in names):
            if file.exists():
                yield _identity(file), file


# ---- at the end ------------------------------------------------------------------------------------------------------


def _folder_beside(output: Output, place: Path, stack: ExitStack) -> Path:
    """A folder on the same disk as the target."""
    try:
        if output.folder:
            place.parent.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(draft_folder(place.parent))
    except OSError as error:
        raise OutputError(f"{output} cannot be written: {error.strerror}") from error


def _publish(made: Sequence[Draft]) -> None:
    """Give every draft the name of its target; where one cannot have it, all others give theirs back."""
    undo: list[tuple[Path, Path | None]] = []
    with ExitStack() as alone:
        for folder in sorted({place.parent for _, place, _ in made}):
            alone.enter_context(alone_in(folder))
        try:
            for output, place, draft in made:
                resolved(output.path, output.name)  # nothing that must not be replaced came here meanwhile
                _move(output, place, draft, undo)
            for folder in {place.parent for _, place, _ in made}:
                sync_folder(folder)
        except BaseException as error:
            for goal, backup in reversed(undo):
                _put_back(goal, backup)
            if isinstance(error, OSError):
                names = ", ".join(str(output) for output, _, _ in made)
                raise OutputError(f"{names} cannot be written: {error.strerror or error}") from error
            raise
        for folder in {place.parent for _, place, _ in made}:
            sweep(folder, {place.name for _, place, _ in made if place.parent == folder and place.exists()})


def _move(output: Output, place: Path, draft: Path, undo: list[tuple[Path, Path | None]]) -> None:
    """One draft and what belongs to it, which comes first."""
    if not draft.exists():
        return
    pairs = zip(_files_of(output, place), _files_of(output, draft), strict=True)
    moves = [(goal, source) for goal, source in reversed(list(pairs)) if source.exists()]
    for goal, source in moves:
        settle(source, goal)
    if len(moves) > 1 and place.exists():
        backup = draft.with_name(PREVIOUS) / place.name
        backup.parent.mkdir()
        os.replace(place, backup)
        undo.append((place, backup))
    for goal, source in moves:
        undo.append((goal, _copy_of(goal, draft.with_name(f"before-{len(undo)}"))))
        os.replace(source, goal)


def _copy_of(goal: Path, backup: Path) -> Path | None:
    """The content of ``goal`` under a second name, ``backup``; ``None`` where there is none."""
    if not goal.exists():
        return None
    try:
        os.link(goal, backup)
    except OSError:  # a file system without hard links
        os.replace(goal, backup)
    return backup


def _put_back(goal: Path, backup: Path | None) -> None:
    if backup is None:
        goal.unlink(missing_ok=True)
    elif backup.exists() and not (goal.exists() and goal.samefile(backup)):
        goal.unlink(missing_ok=True)
        os.rename(backup, goal)
