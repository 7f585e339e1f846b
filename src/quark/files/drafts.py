"""Folders in which results are written beside where they will lie, on the same disk, until all of them are there.

A killed process leaves its folder, which the next one that writes there removes (not on Windows, which cannot lock it).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quark.errors import QuarkError
from quark.files.lock import alone_in, is_abandoned, marked_alive

DRAFTS = ".quark-draft-"
PREVIOUS = ".previous"
"""Within a folder of drafts: the model that was taken away before its data changed."""


@contextmanager
def draft_folder(parent: Path) -> Iterator[Path]:
    """A hidden folder in ``parent`` for as long as the block lasts; those of killed processes are removed first.

    Raises:
        OSError: ``parent`` cannot be written to.
    """
    with ExitStack() as stack:
        with alone_in(parent):  # also while it is marked: another process must not take it for abandoned
            sweep(parent)
            folder = tempfile.TemporaryDirectory(dir=parent, prefix=DRAFTS, ignore_cleanup_errors=True)
            made = Path(stack.enter_context(folder))
            stack.enter_context(marked_alive(made))
        yield made


def sweep(parent: Path, replaced: Set[str] = frozenset()) -> None:
    """Remove the drafts that killed processes left; not those that hold the only copy of a file that was replaced.

    Such a copy goes when ``replaced``, the file that it was, is there anew.
    """
    for folder in parent.glob(f"{DRAFTS}*"):
        if not folder.is_dir() or folder.is_symlink() or not is_abandoned(folder):
            continue  # what lies in one that is alive may go while it is listed
        if {one.name for one in (folder / PREVIOUS).glob("*")} <= replaced:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def naming(names: Mapping[Path, Path]) -> Iterator[None]:
    """Errors of the block name the targets of drafts, in the place of drafts, which no user has seen."""
    try:
        yield
    except QuarkError as error:
        text = str(error)
        for draft, target in names.items():
            text = text.replace(str(draft), str(target))
        if text == str(error):
            raise
        raise type(error)(text) from error
