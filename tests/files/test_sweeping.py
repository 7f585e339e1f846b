"""A copy that a killed run keeps goes when its own file is there anew, in its own folder; the order of the locks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quark.files import outputs
from quark.files.drafts import DRAFTS, PREVIOUS
from quark.files.lock import ALIVE
from quark.files.outputs import Output, drafts


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot lock folders")
@pytest.mark.parametrize(("copy", "stays"), [("a.txt", False), ("b.txt", True), ("c.txt", True)])
def test_copies_of_files_of_other_folders_stay(copy: str, stays: bool, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    kept = tmp_path / "one" / f"{DRAFTS}old"
    (kept / PREVIOUS).mkdir(parents=True)
    (kept / PREVIOUS / copy).write_text("the only copy")
    (kept / ALIVE).touch()
    with drafts({name: Output(tmp_path / name) for name in ("one/a.txt", "two/b.txt")}) as made:
        for path in made.values():
            path.write_text("new")
    assert kept.exists() is stays


def test_folders_are_locked_in_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that write to the same folders in different orders would wait for each other for ever."""
    locked: list[Path] = []
    lock = outputs.alone_in
    monkeypatch.setattr(outputs, "alone_in", lambda folder: (locked.append(folder), lock(folder))[1])
    names = [f"{number}/a" for number in (5, 2, 7, 0, 3, 6, 1, 4)]
    with drafts({name: Output(tmp_path / name, folder=True) for name in names}):
        pass
    assert [folder.name for folder in locked] == list("01234567")
