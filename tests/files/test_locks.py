"""Locks and marks of life within one machine, and what a system without locks does."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from quark.errors import OutputError
from quark.files import drafts, lock, ours, private
from quark.files.lock import ALIVE, alone_in, is_abandoned, marked_alive, working_on
from quark.files.ours import FIELDS, LOOKED_AT, MARK, NAME, is_ours

needs_locks = pytest.mark.skipif(lock.fcntl is None, reason="a system without flock")


@needs_locks
def test_a_folder_is_abandoned_when_its_process_is_gone(tmp_path: Path) -> None:
    assert not is_abandoned(tmp_path)  # no mark
    with marked_alive(tmp_path):
        assert (tmp_path / ALIVE).exists() and not is_abandoned(tmp_path)
        with marked_alive(tmp_path):
            assert not is_abandoned(tmp_path)
    assert is_abandoned(tmp_path)
    code = (
        "import os, sys; from quark.files.lock import marked_alive; from pathlib import Path\n"
        "with marked_alive(Path(sys.argv[1])): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert is_abandoned(tmp_path)


@needs_locks
def test_locks_leave_no_file_open_and_are_the_owners_alone(tmp_path: Path) -> None:
    """The next file that is opened gets the number that it would have had before."""

    def next_number() -> int:
        handle = os.open(tmp_path, os.O_RDONLY)
        os.close(handle)
        return handle

    first = next_number()
    for _ in range(2):
        with working_on(tmp_path / "r.json", "it"), marked_alive(tmp_path), alone_in(tmp_path):
            assert next_number() > first
            assert stat.S_IMODE((tmp_path / ALIVE).stat().st_mode) & 0o177 == 0
        assert next_number() == first


@needs_locks
def test_a_file_that_is_kept_is_held_by_one(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with working_on(path, "it"):
        assert (tmp_path / ".r.json.lock").exists()
        with pytest.raises(OutputError, match=r"it '.*r.json': another process works on it"), working_on(path, "it"):
            pass
        with working_on(tmp_path / "other.json", "it"), working_on(None, "it"):
            pass
    assert not (tmp_path / ".r.json.lock").exists()
    with working_on(path, "it"):
        pass
    with working_on(tmp_path / "nowhere" / "r.json", "it"):
        assert not (tmp_path / "nowhere").exists()


@needs_locks
def test_who_publishes_waits(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from quark.files.lock import alone_in\n"
        "with alone_in(Path(sys.argv[1])): (Path(sys.argv[1]) / 'done').touch()"
    )
    with alone_in(tmp_path):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.2)
        assert not (tmp_path / "done").exists()
    assert process.wait(20) == 0 and (tmp_path / "done").exists()


def test_without_locks_nobody_waits_and_nothing_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "fcntl", None)
    with alone_in(tmp_path), alone_in(tmp_path), marked_alive(tmp_path):
        assert not (tmp_path / ALIVE).exists()
    (tmp_path / ALIVE).touch()
    assert not is_abandoned(tmp_path)


# ---- whose a file is -------------------------------------------------------------------------------------------------


def field(number: int, wire: int, content: bytes) -> bytes:
    return bytes([number << 3 | wire]) + content


def text(number: int, content: bytes) -> bytes:
    size = len(content)
    return field(number, 2, bytes([size & 127 | 128, size >> 7]) + content)


def entry(key: bytes) -> bytes:
    return text(14, b"\x0a" + bytes([len(key)]) + key + b"\x12\x01v")


OURS = NAME.encode()
FILES: dict[str, tuple[bytes, bool]] = {
    "producer": (text(2, OURS), True),
    "producer with a version": (text(2, OURS + b" 1.0"), True),
    "another producer": (text(2, b"pytorch"), False),
    "domain": (text(4, OURS), False),
    "metadata": (entry(OURS + b"_plan"), True),
    "other metadata": (entry(b"plan"), False),
    "a key that ends before the name does": (text(14, b"\x0a" + bytes([len(OURS) - 1]) + OURS), False),
    "the same in another field": (text(7, b"\x0a" + bytes([len(OURS)]) + OURS), False),
    "value first": (text(14, b"\x12" + bytes([len(OURS)]) + OURS), False),
    "empty metadata": (text(14, b"") + text(14, b"\x0a"), False),
    "behind a number": (field(1, 0, b"\x88\x08") + text(2, OURS), True),
    "behind four bytes": (field(1, 5, b"1234") + text(2, OURS), True),
    "behind eight bytes": (field(1, 1, b"12345678") + text(2, OURS), True),
    "behind a graph": (text(7, b"x" * 300) + text(2, OURS), True),
    "behind a group": (field(1, 3, b"") + text(2, OURS), False),
    "cut off": (b"\x12", False),
    "nothing": (b"", False),
    "a number without an end": (field(1, 0, b"\xff" * 11) + text(2, OURS), False),
    "a number whose first byte holds nothing": (field(1, 0, b"\x80\x01") + text(2, OURS), True),
    "a number of ten bytes": (field(1, 0, b"\xff" * 9 + b"\x01") + text(2, OURS), True),
    "the last field that is read": (field(1, 0, b"\x01") * (FIELDS - 1) + text(2, OURS), True),
    "one field too far": (field(1, 0, b"\x01") * FIELDS + text(2, OURS), False),
}


@pytest.mark.parametrize("name", FILES)
def test_whose_a_model_is(name: str, tmp_path: Path) -> None:
    content, expected = FILES[name]
    (tmp_path / "m.onnx").write_bytes(content)
    assert is_ours(tmp_path / "m.onnx", "model") == expected


@pytest.mark.parametrize("size", [63, 64, 65])
def test_a_field_is_read_up_to_a_size(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is larger is passed over, and what follows is read."""
    monkeypatch.setattr(ours, "LOOKED_AT", 64)
    for following in (b"", text(2, OURS)):
        (tmp_path / "m.onnx").write_bytes(text(2, OURS.ljust(size)) + following)
        assert is_ours(tmp_path / "m.onnx", "model") == (size <= 64 or following != b"")


def test_whose_a_text_is(tmp_path: Path) -> None:
    mark = MARK.encode()
    for content, expected in (
        (b"<!-- " + mark + b" -->", True),
        (b"somebody else's", False),
        (b" " * (LOOKED_AT - len(mark)) + mark, True),
        (b" " * (LOOKED_AT - len(mark) + 1) + mark, False),
    ):
        (tmp_path / "page").write_bytes(content)
        assert is_ours(tmp_path / "page", "text") == expected
    assert not is_ours(tmp_path / "none", "text") and not is_ours(tmp_path, "model")
    assert LOOKED_AT == 4 * 2**20 and FIELDS == 10_000


# ---- drafts ----------------------------------------------------------------------------------------------------------


def test_what_a_message_calls_a_full_disk(tmp_path: Path) -> None:
    import errno

    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS"):
        told = private.told(OSError(getattr(errno, name), "full", "here"), tmp_path, "the option")
        assert told is not None and "'here' cannot be written: full" in str(told) and "the option" in str(told)
    assert private.told(OSError(errno.EACCES, "no"), tmp_path, "the option") is None
    assert private.told(OutputError("told already"), tmp_path, "the option") is None
    assert str(tmp_path) in str(private.told(OSError(errno.ENOSPC, "full"), tmp_path, "the option"))


@needs_locks
def test_abandoned_drafts_go_and_others_stay(tmp_path: Path) -> None:
    def draft(name: str, *files: str) -> Path:
        folder = tmp_path / f"{drafts.DRAFTS}{name}"
        folder.mkdir()
        for file in (ALIVE, *files):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).touch()
        return folder

    gone, alive, holding = draft("gone"), draft("alive"), draft("holding", f"{drafts.PREVIOUS}/m.onnx")
    unmarked = tmp_path / f"{drafts.DRAFTS}unmarked"
    unmarked.mkdir()
    target = tmp_path / "real"
    target.mkdir()
    (target / ALIVE).touch()
    (tmp_path / f"{drafts.DRAFTS}link").symlink_to(target)
    with marked_alive(alive):
        drafts.sweep(tmp_path)
        assert not gone.exists() and alive.exists() and holding.exists() and unmarked.exists() and target.exists()
        drafts.sweep(tmp_path, {"other.onnx"})
        assert holding.exists()
        drafts.sweep(tmp_path, {"m.onnx"})
        assert not holding.exists() and alive.exists() and target.exists()


def test_how_much_is_read_of_files_that_may_come_from_strangers() -> None:
    from quark.files import untrusted
    from quark.numerics import array_files

    assert (untrusted.STATE_BYTES, untrusted.CONFIG_BYTES, untrusted.WORDS) == (64 * 2**20, 16 * 2**20, 64 * 2**20)
    assert array_files.WHOLE == 8 * 2**30 and array_files.MOST_AXES == 32


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_a_lock_runs_nothing_and_may_be_gone_when_the_work_is_done(tmp_path: Path) -> None:
    with working_on(tmp_path / "state.json", "the ledger"):
        (held,) = tmp_path.iterdir()
        assert stat.S_IMODE(held.stat().st_mode) & 0o111 == 0
        held.unlink()
    assert list(tmp_path.iterdir()) == []
