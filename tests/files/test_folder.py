"""A folder that appears whole or not at all, and the disk that is asked for it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from quark.errors import ConfigError, OutputError
from quark.files import atomic
from quark.files import folder as folders
from quark.files.drafts import DRAFTS, sweep
from quark.files.folder import UNFINISHED, check_target, new_folder
from quark.files.lock import ALIVE


def test_what_was_moved_is_taken_away_again_when_one_cannot_be_moved(tmp_path: Path, monkeypatch: Any) -> None:
    """Folders and files; what was there stays, and so does a file that went meanwhile away by itself."""
    goal = tmp_path / "model"
    goal.mkdir()
    (goal / "tokenizer.json").write_text("of the user")
    real, names = os.replace, []

    def replace(source: Any, target: Any) -> None:
        if Path(source).name == "config.json":
            (goal / "b.txt").unlink()
            raise OSError(28, "No space left on device")
        names.append(Path(source).name)
        real(source, target)

    monkeypatch.setattr(folders.os, "replace", replace)
    with pytest.raises(OutputError, match="No space left"), new_folder(goal) as work:
        (work / "a").mkdir()
        (work / "a" / "inside").write_text("new")
        for name in ("config.json", "b.txt", "c.safetensors", "tokenizer.json"):
            (work / name).write_text("new")
    assert names == ["a", "b.txt", "c.safetensors"]
    assert {path.name: path.read_text() for path in goal.iterdir()} == {"tokenizer.json": "of the user"}
    assert list(tmp_path.iterdir()) == [goal]


@pytest.mark.parametrize("there", ["config.json", "model.safetensors", "pytorch_model-00001.bin", UNFINISHED])
def test_a_folder_with_a_model_is_refused_unless_the_caller_says_otherwise(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("{}")
    for check in (check_target, lambda path: new_folder(path).__enter__()):
        with pytest.raises(ConfigError, match="interrupted" if there == UNFINISHED else "holds a model already"):
            check(tmp_path)
    begun = there == UNFINISHED
    check_target(tmp_path, beside=not begun, begun=begun)
    with pytest.raises(ConfigError):
        check_target(tmp_path, beside=begun, begun=not begun)


def test_folders_within_folders_appear_with_the_folders_above(tmp_path: Path) -> None:
    goal = tmp_path / "a" / "b" / "model"
    with new_folder(goal) as work:
        (work / "inner" / "most").mkdir(parents=True)
        (work / "inner" / "most" / "file").write_text("content")
        assert not goal.exists()
    assert [str(path.relative_to(goal)) for path in goal.rglob("*") if path.is_file()] == [
        os.path.join("inner", "most", "file")
    ]
    assert [path.name for path in goal.parent.iterdir()] == ["model"]


def test_the_first_file_of_a_model_in_the_way_is_named_and_nothing_moves(tmp_path: Path) -> None:
    names = [f"{letter}.gguf" for letter in "hgfedcba"]
    with pytest.raises(ConfigError, match=r"a\.gguf' already exists"), new_folder(tmp_path / "goal") as work:
        (tmp_path / "goal").mkdir()
        for name in (*names, "new.txt"):
            (work / name).write_text("new")
        for name in names:
            (tmp_path / "goal" / name).write_text("old")
    assert {path.read_text() for path in (tmp_path / "goal").iterdir()} == {"old"}


@pytest.mark.parametrize("meanwhile", ["model-1.safetensors", "config.json", folders.UNFINISHED])
@pytest.mark.parametrize("beside", [True, False])
def test_a_model_that_another_job_made_or_began_meanwhile_stays_alone(
    meanwhile: str, beside: bool, tmp_path: Path
) -> None:
    """Its shards have other names: both models lay in one folder, with one configuration."""
    goal = tmp_path / "goal"
    refused = not beside or meanwhile == folders.UNFINISHED
    expected = pytest.raises(ConfigError, match=meanwhile) if refused else nullcontext()
    with expected, new_folder(goal, beside) as work:
        (work / "model.safetensors").write_text("ours")
        goal.mkdir()
        (goal / meanwhile).write_text("theirs")
    assert sorted(path.name for path in goal.iterdir()) == sorted([meanwhile, *["model.safetensors"] * (not refused)])
    assert [path.name for path in tmp_path.iterdir()] == ["goal"]


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot lock a folder")
def test_what_cannot_be_swept_away_stays(tmp_path: Path, monkeypatch: Any) -> None:
    left = tmp_path / f"{DRAFTS}left"
    left.mkdir()
    (left / ALIVE).touch()  # which no process holds

    def fails(*given: Any, **named: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "unlink", fails)
    sweep(tmp_path)
    monkeypatch.undo()
    assert left.is_dir()
    sweep(tmp_path)
    assert not left.exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot sync everything")
def test_a_disk_that_cannot_sync_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "file"
    file.write_text("content")

    def fails(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(atomic.os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        atomic.sync(file)


def test_a_file_that_nobody_may_write_is_synced_as_a_reader(tmp_path: Path, monkeypatch: Any) -> None:
    """Also as root, who may write everything and is not asked."""
    file, real, asked = tmp_path / "file", os.open, []
    file.write_text("content")

    def opened(path: Any, flags: int, *more: Any) -> int:
        asked.append(flags & (os.O_RDONLY | os.O_WRONLY | os.O_RDWR))
        return real(path, flags, *more)

    monkeypatch.setattr(atomic.os, "open", opened)
    for may_write, mode in ((False, os.O_RDONLY), (True, os.O_RDWR)):
        monkeypatch.setattr(atomic.os, "access", lambda path, what, may=may_write: may)
        atomic.sync(file)
        assert asked.pop() == mode and not asked


@pytest.mark.parametrize(("there", "free"), [("nothing", True), ("empty", True), ("full", False), ("file", False)])
def test_a_detour_begins_where_nothing_is(there: str, free: bool, tmp_path: Path) -> None:
    goal, source = tmp_path / "goal", tmp_path / "source"
    source.mkdir()
    place = folders.detour(goal)
    if there == "file":
        place.write_text("somebody's")
    elif there != "nothing":
        place.mkdir()
        (place / "a").write_text("somebody's") if there == "full" else None
    if free:
        assert folders.is_detour(folders.begin_detour(goal, source))
    else:
        with pytest.raises(ConfigError, match="is in the way"):
            folders.begin_detour(goal, source)


def test_a_link_is_no_folder_of_ours_and_the_source_is_no_detour(tmp_path: Path) -> None:
    """What the link leads to is somebody's, also where it was made by us."""
    goal, source = tmp_path / "goal", tmp_path / "source"
    source.mkdir()
    made = folders.begin_detour(goal, source)
    assert folders.is_detour(made) and made.parent == tmp_path
    assert folders.begin_detour(goal, source) == made
    with pytest.raises(ConfigError, match="is in the way"):
        folders.begin_detour(goal, made)
    (made / "kept").write_text("of another job")
    made.rename(tmp_path / "elsewhere")
    made.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert not folders.is_detour(made)
    with pytest.raises(ConfigError, match="is in the way"):
        folders.begin_detour(goal, source)
    assert (tmp_path / "elsewhere" / "kept").exists()
    made.unlink()
    made.write_text("a file")
    with pytest.raises(ConfigError, match="is in the way"):
        folders.begin_detour(goal, source)


def test_a_scratch_folder_lies_beside_a_target_whose_folders_are_made(tmp_path: Path) -> None:
    goal = tmp_path / "a" / "b" / "model"
    for _ in range(2):
        with folders.scratch_beside(goal) as made:
            assert goal.parent in made.parents and any(part.startswith(".") for part in made.parts)
        assert list(goal.parent.iterdir()) == []
    assert folders.is_detour(folders.begin_detour(tmp_path / "c" / "d" / "model", tmp_path))
