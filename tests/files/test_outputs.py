"""The gate: what may be written where, and that it appears whole or not at all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quark.errors import ConfigError, ModelError, OutputError
from quark.files import outputs as gate
from quark.files.atomic import replace_file
from quark.files.folder import new_folder
from quark.files.lock import ALIVE, working_on
from quark.files.ours import MARK, NAME, PRODUCER, is_ours
from quark.files.outputs import PREVIOUS, Output, check_outputs, draft_of, drafts, write_output

posix = pytest.mark.skipif(os.name == "nt", reason="links, modes and devices of POSIX")


def refused(output: Path, *inputs: Path, kind: str = "text") -> str:
    with pytest.raises(OutputError) as caught:
        check_outputs([Output(output, "--out", kind)], [("the input", path) for path in inputs])
    return str(caught.value)


def spellings(folder: Path) -> dict[str, tuple[Path, Path]]:
    """(output, input) that are one file, in every way that a file system has for it."""
    file = folder / "in.bin"
    file.write_bytes(b"precious")
    (folder / "link").symlink_to(file)
    (folder / "chain").symlink_to("link")
    os.link(file, folder / "hard")
    (folder / "elsewhere").symlink_to(folder, target_is_directory=True)
    (folder / "samples").mkdir()
    (folder / "samples" / "linked").symlink_to(file)
    (folder / "others").mkdir()
    (folder / "others" / "linked").symlink_to(folder / "samples", target_is_directory=True)
    return {
        "itself": (file, file),
        "with dots": (folder / "samples" / ".." / "in.bin", file),
        "a link to it": (folder / "link", file),
        "a link to a link": (folder / "chain", file),
        "what a link points to": (file, folder / "chain"),
        "a hard link": (folder / "hard", file),
        "through a linked folder": (folder / "elsewhere" / "in.bin", file),
        "in the folder that is read": (file, folder),
        "linked from the folder that is read": (file, folder / "samples"),
        "in a folder linked from the folder that is read": (file, folder / "others"),
        "relative": (Path(os.path.relpath(file)), file),
    }


@pytest.mark.parametrize("depth", range(4))
def test_folders_above_a_folder_are_made_and_those_above_a_file_must_be_there(depth: int, tmp_path: Path) -> None:
    path = tmp_path.joinpath(*"abc"[:depth], "out")
    check_outputs([Output(path, "--out", folder=True)], [])
    assert list(tmp_path.iterdir()) == []
    if depth:
        assert f"the folder '{path.parent}' does not exist" in refused(path)


@posix
def test_an_input_is_refused_however_it_is_spelled(tmp_path: Path) -> None:
    for name, (output, source) in spellings(tmp_path).items():
        for kind in ("text", "model", "state"):
            assert "the input" in refused(output, source, kind=kind), name
    assert (tmp_path / "in.bin").read_bytes() == b"precious"


def test_the_external_data_of_an_output_count(tmp_path: Path) -> None:
    (tmp_path / "q.onnx.data").write_bytes(b"weights of the float model")
    assert "the input" in refused(tmp_path / "q.onnx", tmp_path / "q.onnx.data", kind="model")
    check_outputs([Output(tmp_path / "q.onnx", kind="text")], [("the input", tmp_path / "q.onnx.data")])


def test_two_outputs_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def both(first: str, second: str, kind: str = "text") -> None:
        check_outputs([Output(tmp_path / first, "--a", kind), Output(tmp_path / second, "--b")])

    both("a", "b")
    for pair in (("a", "a"), ("a", "./a"), ("a.onnx", "a.onnx.data", "model")):
        with pytest.raises(OutputError, match=r"--a .* and --b .* are one file"):
            both(*pair)
    if not gate.ignores_case(tmp_path):
        both("a", "A")
    monkeypatch.setattr(gate, "ignores_case", lambda folder: True)
    for pair in (("a", "A"), ("Stra\N{LATIN SMALL LETTER SHARP S}e", "STRASSE"), ("\u00e9", "e\u0301")):
        with pytest.raises(OutputError, match="are one file"):
            both(*pair)


@posix
def test_devices_pipes_and_folders_are_refused_and_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_null").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "pipe", tmp_path / "to_null"):
        for kind in ("text", "model", "state"):
            assert "is not a regular file" in refused(path, kind=kind)
        with pytest.raises(OutputError, match="is not a regular file"):
            replace_file(path, b"")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert "is a folder" in refused(tmp_path)
    with pytest.raises(OutputError, match="is not a regular file"):
        check_outputs([Output(Path("/dev/null"))], overwrite=True)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "no/such/folder"])
def test_paths_that_cannot_be_are_one_sentence(name: str, tmp_path: Path) -> None:
    assert "--out" in refused(tmp_path / name)


@posix
def test_a_loop_of_links_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "--out" in refused(tmp_path / "a")


def test_errors_are_those_that_callers_catch() -> None:
    assert issubclass(OutputError, ModelError) and issubclass(OutputError, ConfigError)


# ---- what commands replace -------------------------------------------------------------------------------------------


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


MODELS = {
    b"\x08\x08" + field(2, b"openquark") + field(7, b"graph"): True,
    b"\x08\x08" + field(7, b"openquark") + field(14, field(1, b"openquark.made") + field(2, b"x")): True,
    b"\x08\x08" + field(2, b"pytorch") + field(7, b"openquark"): False,
    field(14, field(1, b"key") + field(2, b"openquark")): False,
    b"": False,
    b"\x00" * 5000: False,
    b"\xff" * 64: False,
    b"openquark": False,
    bytes([2 << 3 | 2, 200]) + b"openquark": False,
}


def test_which_models_are_ours(tmp_path: Path) -> None:
    for content, ours in MODELS.items():
        (tmp_path / "m").write_bytes(content)
        assert is_ours(tmp_path / "m", "model") == ours, content[:40]
    assert not is_ours(tmp_path / "gone", "model") and not is_ours(tmp_path, "text")


def test_commands_replace_results_of_ours_of_the_same_kind_only(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, kind, free in (
        (MARK.encode(), "text", True),
        (b"my thesis", "text", False),
        (next(iter(MODELS)), "model", True),
        (next(iter(MODELS)), "text", False),
        (MARK.encode(), "model", False),
        (b"", "text", False),
    ):
        path.write_bytes(content)
        check_outputs([Output(path, kind=kind)], overwrite=True)
        if free:
            check_outputs([Output(path, kind=kind)], overwrite=False)
        else:
            with pytest.raises(OutputError, match="--overwrite"):
                check_outputs([Output(path, kind=kind)], overwrite=False)
        assert path.read_bytes() == content


# ---- all of it or nothing --------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def three(folder: Path) -> dict[str, Output]:
    return {name: Output(folder / name, kind="model" if name == "b" else "text") for name in ("a", "b", "c")}


def test_all_outputs_appear_together(tmp_path: Path) -> None:
    with drafts(three(tmp_path)) as paths:
        for name, path in paths.items():
            path.write_text(name)
        (paths["b"].parent / "b.data").write_text("data")
        assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".quark-")]
    assert contents(tmp_path) == {"a": b"a", "b": b"b", "b.data": b"data", "c": b"c"}


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("kept", ["a copy", "the file itself", "nothing"])
def test_what_is_put_back_is_what_was_there(there: bool, kept: str, tmp_path: Path) -> None:
    """A file whose second name is still that of the same content stays, and so does one of which nothing is kept."""
    goal, backup = tmp_path / "a", tmp_path / "before"
    if there:
        goal.write_text("new")
    if kept == "a copy":
        backup.write_text("old")
    elif kept == "the file itself" and there:
        os.link(goal, backup)
    gate._put_back(goal, backup)
    was = {
        (True, "a copy"): "old",
        (False, "a copy"): "old",
        (True, "the file itself"): "new",
        (True, "nothing"): "new",
    }
    assert (goal.read_text() if goal.exists() else None) == was.get((there, kept))


@pytest.mark.parametrize("linked", [True, False], ids=["hard links", "no hard links"])
@pytest.mark.parametrize("before", [True, False], ids=["over older ones", "new"])
@pytest.mark.parametrize("fails", range(6))
def test_one_that_cannot_be_moved_takes_all_back(
    fails: int, before: bool, linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before:
        for name in ("a", "b", "b.data", "c"):
            (tmp_path / name).write_text(f"old {name}")
    was, moves, replace = contents(tmp_path), [0], os.replace

    def failing(source: Path, goal: Path) -> None:
        moves[0] += 1
        if moves[0] == fails + 1:
            raise OSError(28, "No space left on device")
        replace(source, goal)

    def no_links(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    if not linked:
        monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, "replace", failing)
    try:
        with drafts(three(tmp_path)) as paths:
            for name, path in paths.items():
                path.write_text(name)
            (paths["b"].parent / "b.data").write_text("data")
    except OutputError as error:
        assert "No space left" in str(error)
        assert contents(tmp_path) == was
    else:
        assert moves[0] <= fails


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError, OutputError])
def test_a_failure_inside_leaves_everything(error: type[BaseException], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(error), drafts(three(tmp_path)) as paths:
        paths["a"].write_text("new")
        raise error
    assert contents(tmp_path) == {"a": b"old"}


def test_errors_name_the_target_and_not_the_draft(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^'.*/out' is bad$") as caught, draft_of(Output(tmp_path / "out")) as path:
        raise ModelError(f"{str(path)!r} is bad")
    assert ".quark-" not in str(caught.value)


@posix
def test_modes_and_links_stay(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "file"
    (tmp_path / "link").symlink_to(target)
    for mode in (0o600, 0o664, 0o444):
        target.write_text("old") if not target.exists() else None
        target.chmod(mode)
        write_output(Output(tmp_path / "link"), f"new {mode}")
        assert (tmp_path / "link").is_symlink() and target.read_text() == f"new {mode}"
        assert stat.S_IMODE(target.stat().st_mode) == mode
        replace_file(tmp_path / "link", f"again {mode}")
        assert (tmp_path / "link").is_symlink() and target.read_text() == f"again {mode}"
        assert stat.S_IMODE(target.stat().st_mode) == mode
    new, umask = tmp_path / "new", os.umask(0)
    os.umask(umask)
    write_output(Output(new), "")
    assert stat.S_IMODE(new.stat().st_mode) == 0o666 & ~umask
    (tmp_path / "dangling").symlink_to(tmp_path / "real" / "made")
    write_output(Output(tmp_path / "dangling"), "made")
    assert (tmp_path / "real" / "made").read_text() == "made" and (tmp_path / "dangling").is_symlink()


@posix
def test_a_hard_link_elsewhere_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    os.link(tmp_path / "a", tmp_path / "other")
    write_output(Output(tmp_path / "a"), "new")
    assert contents(tmp_path) == {"a": b"new", "other": b"old"}


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: what a full disk does."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@posix
def test_a_full_disk_leaves_everything(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with small_files(100):
        for write in (lambda: write_output(Output(tmp_path / "a"), "x" * 999), lambda: full_folder(tmp_path / "new")):
            with pytest.raises(OutputError, match="cannot be written"):
                write()
        with pytest.raises(OutputError, match="cannot be written"):
            replace_file(tmp_path / "a", b"x" * 999)
    assert contents(tmp_path) == {"a": b"old"}


def full_folder(target: Path) -> None:
    with new_folder(target) as folder:
        (folder / "weights").write_bytes(b"x" * 999)


WRITER = """
import sys
from pathlib import Path
from typing import Any
from quark.files.outputs import Output, drafts
for turn in range(25):
    with drafts({"m": Output(Path(sys.argv[1]) / "m", kind="model")}) as paths:
        paths["m"].write_text(sys.argv[2] * 5000)
        (paths["m"].parent / "m.data").write_text(sys.argv[2] * 5000)
"""


def test_two_writers_never_mix_a_model_with_the_data_of_another(tmp_path: Path) -> None:
    def run(letter: str) -> None:
        subprocess.run([sys.executable, "-c", WRITER, str(tmp_path), letter], check=True)

    threads = [threading.Thread(target=run, args=(letter,)) for letter in "xy"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = contents(tmp_path)
    assert set(found) == {"m", "m.data"} and found["m"] == found["m.data"]


HOLDER = """
import sys
from pathlib import Path
from typing import Any
from quark.files.lock import ALIVE, working_on
with working_on(Path(sys.argv[1]), "the ledger"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_process_works_on_a_kept_file_at_a_time(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    for kill in (False, True):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None and holder.stdin is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match="another process works on it"), working_on(state, "the ledger"):
            pass
        if kill:
            holder.kill()
        holder.communicate("")
        with working_on(state, "the ledger"):  # a killed process holds nothing
            pass
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["tokenizer.json", "vocab.txt"])
def test_in_a_folder_the_configuration_comes_last(there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it no program takes the folder for a model: whoever looks meanwhile finds none, or a whole one."""
    target, seen = tmp_path / "model", list[str]()
    target.mkdir()
    (target / there).write_text("mine")
    replace = os.replace

    def watched(source: str, goal: str) -> None:
        seen.append(Path(goal).name)
        replace(source, goal)

    monkeypatch.setattr(os, "replace", watched)
    names = ["config.json", "model.safetensors", "aaa.json", "zzz.json", "quantization_config.json"]
    with new_folder(target) as folder:
        for name in names:
            (folder / name).write_text("{}")
    assert sorted(seen) == sorted(names)
    assert set(seen[-2:]) == {"config.json", "quantization_config.json"}
    assert (target / there).read_text() == "mine"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot lock folders")
def test_what_a_killed_run_left_is_removed_by_the_next_and_what_a_living_one_needs_stays(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from quark.files.outputs import Output, draft_of\n"
        f"with draft_of(Output(Path({str(tmp_path / 'a.txt')!r}))) as path:\n"
        "    path.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = tmp_path.iterdir()  # the second run has removed what the first one left
    kept = tmp_path / ".quark-draft-kept"
    kept.mkdir()
    (kept / PREVIOUS).mkdir()
    (kept / PREVIOUS / "d.txt").write_text("the only copy")
    (kept / ALIVE).touch()  # of a process that is gone, too
    with draft_of(Output(tmp_path / "b.txt")) as path:
        assert not left.exists()
        path.write_text("b")
        with draft_of(Output(tmp_path / "c.txt")) as other:
            other.write_text("c")
    assert sorted(one.name for one in tmp_path.iterdir()) == [".quark-draft-kept", "b.txt", "c.txt"]
    assert (tmp_path / "b.txt").read_text() == "b" and (kept / PREVIOUS / "d.txt").exists()
    write_output(Output(tmp_path / "d.txt"), "d")  # the file is there anew: nobody needs the copy
    assert sorted(one.name for one in tmp_path.iterdir()) == ["b.txt", "c.txt", "d.txt"]


@pytest.mark.parametrize("data", [False, True])
def test_a_file_of_its_own_is_never_away(data: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced in one step; only one that has a file of data beside it is set aside first."""
    place = tmp_path / "m.onnx"
    output = Output(place, "--out", "model")
    for text in ("old", "new"):
        moved: list[tuple[str, str]] = []
        replace = os.replace

        def noted(source: Any, goal: Any, moved: Any = moved, replace: Any = replace) -> None:
            moved.append((Path(source).name, Path(goal).name))
            replace(source, goal)

        monkeypatch.setattr(gate.os, "replace", noted)
        with draft_of(output) as draft:
            draft.write_text(text)
            if data:
                draft.with_name(draft.name + ".data").write_text(text)
        monkeypatch.undo()
    aside = [one for one in moved if one[0] == "m.onnx" and one[1] == "m.onnx"]
    assert place.read_text() == "new" and len(aside) == (2 if data else 1)


def test_folders_above_an_output_that_is_a_folder_are_made_once_and_for_all(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "c" / "weights.bin"
    for content in ("first", "second"):
        with drafts({"": Output(target, folder=True)}) as paths:
            paths[""].write_text(content)
        assert target.read_text() == content
    assert sorted(path.name for path in target.parent.iterdir()) == ["weights.bin"]


def test_a_text_named_like_the_weights_of_a_model_of_ours_does_not_replace_them(tmp_path: Path) -> None:
    model = tmp_path / "q.onnx"
    model.write_bytes(bytes([PRODUCER << 3 | 2, len(NAME)]) + NAME.encode())
    (tmp_path / "q.onnx.data").write_bytes(b"weights")
    check_outputs([Output(model, kind="model")], overwrite=False)
    with pytest.raises(OutputError, match="is not a result of quark"):
        check_outputs([Output(tmp_path / "q.onnx.data")], overwrite=False)


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 13])
def test_numbers_of_a_protocol_buffer_have_ten_bytes_at_most(count: int, tmp_path: Path) -> None:
    """The length of the producer's name, with as many bytes in front of its last as it may have, and one more."""
    length = bytes([len(NAME) | 128, *[128] * (count - 2), 0]) if count > 1 else bytes([len(NAME)])
    passed_over = bytes([3 << 3, *[129] * (count - 1), 1])
    for before in (b"", passed_over):
        (tmp_path / "m").write_bytes(before + bytes([PRODUCER << 3 | 2]) + length + NAME.encode())
        assert is_ours(tmp_path / "m", "model") is (count <= 10)
