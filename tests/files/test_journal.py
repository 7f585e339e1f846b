"""What a journal remembers after a cut: the last write that is whole counts, and what nobody needs is gone."""

from __future__ import annotations

import json
import math
import os
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from quark.errors import ConfigError, DataError, OutputError
from quark.files.identity import difference
from quark.files.journal import Journal
from quark.files.untrusted import own_file

posix = pytest.mark.skipif(os.name == "nt", reason="links need no rights on POSIX")


def opened(folder: Path) -> Journal:
    return Journal(folder / "r.json", {"model": "m", "a": "1"})


def values(found: object) -> object:
    return None if found is None else found["w"].tolist()  # type: ignore[index]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "r.tensors").glob("*.safetensors"))


def test_files_are_numbered_and_replaced_ones_go(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for number in range(4):
        journal.finish_arrays("s k", {"w": np.array([number])})
    assert len(files(tmp_path)) == 2  # the last, and the one before in case that is cut
    journal.finish_arrays("s other", {"w": np.array([9])})
    journal.finish_arrays("s other", {"w": np.array([10])})
    again = opened(tmp_path)
    assert (values(again.arrays("s k")), values(again.arrays("s other"))) == ([3], [10])
    journal.settle()
    assert len(files(tmp_path)) == 2
    assert (values(again.arrays("s k")), values(again.arrays("s other"))) == ([3], [10])


def test_a_first_write_that_was_cut_before_its_file_is_taken_over(tmp_path: Path) -> None:
    opened(tmp_path).finish_arrays("s k", {"w": np.array([1])})
    assert files(tmp_path) == ["0.safetensors"]
    (tmp_path / "r.json").unlink()  # as if it had never been written
    again = opened(tmp_path)
    assert again.arrays("s k") is None
    again.finish_arrays("s k", {"w": np.array([2])})
    assert files(tmp_path) == ["0.safetensors"] and values(opened(tmp_path).arrays("s k")) == [2]
    journal = opened(tmp_path)
    journal.finish_arrays("s l", {"w": np.array([3])})
    assert files(tmp_path) == ["0.safetensors", "1.safetensors"]


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("version", 2, True),
        ("version", 1, False),
        ("version", 3, False),
        ("next", 10**9, True),
        ("next", 10**9 + 1, False),
        ("next", -1, False),
        ("next", 0, True),
        ("extra", 1, False),
    ],
)
def test_what_a_state_may_hold(tmp_path: Path, field: str, value: int, fits: bool) -> None:
    journal = opened(tmp_path)
    journal.finish_arrays("s k", {"w": np.array([1])})
    journal.settle()
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    if fits:
        assert values(opened(tmp_path).arrays("s k")) == [1]
    else:
        with pytest.raises(ConfigError):
            opened(tmp_path)


ODD = [("size", -1), ("crc32", 0), ("file", "../x.safetensors"), ("file", "x.safetensors"), ("types", ["w"])]
ODD += [("types", {"w": "no type"}), ("types", {"w": "float16"}), ("types", {"w": "object"})]


@pytest.mark.parametrize(("field", "value"), ODD)
def test_what_an_entry_may_hold(tmp_path: Path, field: str, value: object) -> None:
    journal = opened(tmp_path)
    journal.finish_arrays("s k", {"w": np.array([1], np.int8)})
    journal.settle()
    path = tmp_path / "r.json"
    state = json.loads(path.read_text())
    state["tensors"]["s k"][field] = value
    path.write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"r\.json' cannot be used"):
        opened(tmp_path).arrays("s k")


@pytest.mark.parametrize("cut", ["half", "nothing", "gone"])
def test_a_last_write_that_was_cut_is_taken_back(tmp_path: Path, cut: str) -> None:
    journal = opened(tmp_path)
    for number in range(3):
        journal.finish_arrays(f"s {number}", {"w": np.arange(10 * number, 10 * number + 8)})
    newest = max((tmp_path / "r.tensors").glob("*.safetensors"), key=lambda path: int(path.stem))
    if cut == "gone":
        newest.unlink()
    else:
        newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2] if cut == "half" else b"")
    again = opened(tmp_path)
    assert again.arrays("s 2") is None
    assert [values(again.arrays(f"s {k}")) for k in (0, 1)] == [list(range(8)), list(range(10, 18))]
    again.finish_arrays("s 2", {"w": np.arange(3)})
    assert values(opened(tmp_path).arrays("s 2")) == [0, 1, 2]
    assert values(opened(tmp_path).arrays("s 1")) == list(range(10, 18))


def test_an_older_entry_that_was_damaged_is_told(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for number in range(3):
        journal.finish_arrays(f"s {number}", {"w": np.arange(8)})
    oldest = min((tmp_path / "r.tensors").glob("*.safetensors"), key=lambda path: int(path.stem))
    content = bytearray(oldest.read_bytes())
    content[0] ^= 1
    oldest.write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        opened(tmp_path).arrays("s 0")
    oldest.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        opened(tmp_path).arrays("s 0")


@posix
@pytest.mark.parametrize("what", ["text", "nothing", "a folder"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_link_in_the_place_of_a_journal_is_not_written_through(what: str, cut: bool, tmp_path: Path) -> None:
    """A crafted folder, whose generation before the last is whole, must not replace what its last one leads to."""
    folder, victim = tmp_path / "job", tmp_path / "victim"
    folder.mkdir()
    journal = opened(folder)
    for number in range(2):
        journal.finish("a", number)
    (folder / "r.json").unlink()
    (folder / "r.json").symlink_to(victim)
    if not cut:
        (folder / ".r.json.previous").unlink()
    if what == "text":
        victim.write_text("precious")
    elif what == "a folder":
        victim.mkdir()
    with pytest.raises(ConfigError, match=r"(file|ledger) '.*r\.json'"):
        opened(folder)
    found = {"text": victim.is_file() and victim.read_text() == "precious", "a folder": victim.is_dir()}
    assert found.get(what, not victim.exists())


@posix
def test_a_journal_may_lie_elsewhere_but_its_tensors_may_not(tmp_path: Path) -> None:
    """A ledger that a user has linked goes on; a link to a folder of other files, which would be removed, is told."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "r.json").symlink_to(tmp_path / "ledger.json")
    opened(tmp_path).finish("a", 7)
    (tmp_path / "r.json").rename(tmp_path / "ledger.json")
    linked = opened(tmp_path / "job")
    linked.finish("b", 8)
    assert (linked.done("a", int), opened(tmp_path / "job").done("b", int)) == (7, 8)
    assert (tmp_path / "job" / "r.json").is_symlink()
    (tmp_path / "job" / "r.tensors").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(ConfigError, match=r"has its tensors in '.*r\.tensors', which is a link"):
        opened(tmp_path / "job")


def test_what_differs_is_named_three_at_most(tmp_path: Path) -> None:
    Journal(tmp_path / "r.json", dict.fromkeys("abcd", "1")).begin()
    with pytest.raises(ConfigError, match=r"belongs to another a \(was 1, is 2\), another b .*, another c ") as told:
        Journal(tmp_path / "r.json", dict.fromkeys("abcd", "2"))
    assert "another d" not in str(told.value)
    with pytest.raises(ConfigError, match=r"another d \(was 1, is absent\)"):
        Journal(tmp_path / "r.json", dict.fromkeys("abc", "1"))


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ('{"a": {"b": 1, "c": 2}}', '{"a": {"b": 1, "c": 3}}', "another it.a.c (was 2, is 3)"),
        ('[["rules", ["default", 1]]]', '[["rules", ["default", "x"]]]', 'another it.rules.default (was 1, is "x")'),
        ("12e5", "12e6", "another it (was 12e5, is 12e6)"),
        ('{"a": 1}', '{"b": 1}', 'another it (was {"a": 1}, is {"b": 1})'),
        ("[" * 9999, "no JSON", f"another it (was {'[' * 57}..., is no JSON)"),
        ("1", "1.0", "another it (was 1, is 1.0)"),
    ],
)
def test_the_innermost_part_that_differs_is_named(before: str, now: str, words: str) -> None:
    assert difference({"same": "1", "it": before}, {"same": "1", "it": now}) == words


def test_arrays_come_back_with_type_and_shape_and_the_last_ones_count(tmp_path: Path) -> None:
    import ml_dtypes

    arrays = {
        "w": np.arange(6, dtype=np.float16).reshape(2, 3),
        "turned": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "b": np.array([1, 2], ml_dtypes.bfloat16),
        "codes": np.array(-3, ml_dtypes.int4),
        "n": np.array(7),
        "yes": np.array(True),
        "none": np.zeros((0, 4), np.int8),
    }
    journal = opened(tmp_path)
    journal.finish_arrays("layer/1", {"w": np.zeros(3)})
    journal.finish_arrays("layer/1", arrays)
    journal.finish_arrays("layer 2", {})
    again = opened(tmp_path)
    found = again.arrays("layer/1")
    assert found is not None and set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape and found[name].flags.writeable
        np.testing.assert_array_equal(found[name].astype(np.float64), array.astype(np.float64))
    assert again.arrays("layer 2") == {} and again.arrays("x") is None
    journal.settle()
    assert len(files(tmp_path)) == 2


def test_without_a_path_only_values_are_remembered() -> None:
    journal = Journal()
    journal.finish_arrays("layer", {"w": np.zeros(3)})
    journal.finish("number", 1.0)
    assert journal.arrays("layer") is None and journal.number("number", lambda: 2.0) == 1.0 and not journal


def test_files_of_other_writers_are_kept_and_nothing_is_left_of_a_job_that_is_over(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    journal = opened(tmp_path)
    journal.begin()
    assert journal.file("block") is None
    journal.finish_file("block", lambda path: save_file({"w": np.arange(3)}, path))
    file = opened(tmp_path).file("block")
    assert file is not None and load_file(file)["w"].tolist() == [0, 1, 2]
    opened(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def header(told: object, data: bytes = bytes(8)) -> bytes:
    text = json.dumps(told).encode()
    return len(text).to_bytes(8, "little") + text + data


CRAFTED = {
    "empty": b"",
    "no header": b"\0" * 7,
    "a header without an end": (1 << 62).to_bytes(8, "little") + b"{}",
    "no JSON": (2).to_bytes(8, "little") + b"[[",
    "a list": header([1]),
    "an unknown type": header({"w": {"dtype": "Q7", "shape": [2], "data_offsets": [0, 8]}}),
    "more values than bytes": header({"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}}),
    "a negative size": header({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}),
    "offsets outside": header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}),
    "a type of eight bits and a wider name": header(
        {"w": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, b"abc"
    ),
}


@pytest.mark.parametrize("what", CRAFTED)
def test_a_crafted_file_of_tensors_is_refused(what: str, tmp_path: Path) -> None:
    """Its length and checksum are right: whoever writes the one can write the other."""
    journal = opened(tmp_path)
    journal.finish_arrays("k", {"w": np.arange(3)})
    journal.settle()
    path = tmp_path / "r.json"
    state = json.loads(path.read_text())
    content = CRAFTED[what]
    entry = {"crc32": zlib.crc32(content), "size": len(content), "types": {"w": "bfloat16"} if "wider" in what else {}}
    state["tensors"]["k"] |= entry
    path.write_text(json.dumps(state))
    (tmp_path / "r.tensors" / "0.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="holds no tensors that can be read"):
        opened(tmp_path).arrays("k")


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r.tensors").mkdir()
    (tmp_path / "r.tensors" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds 'notes.txt', which is not of this job"):
        opened(tmp_path)


# ---- values ----------------------------------------------------------------------------------------------------------


def test_a_journal_remembers_numbers_exactly(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    book = Journal(path, {"model": "a"})
    book.finish("conv", {"sqnr": math.inf, "kl": 0.1 + 0.2, "list": [-math.inf]})
    book.finish("probe", [1.5, math.inf])
    path.write_text(path.read_text()[:20])  # a disk that lost the last write: the one before counts
    assert Journal(path, {"model": "a"}).done("probe", list[float]) is None
    book.finish("probe", [1.5, math.inf])
    book.settle()
    assert Journal(path, {"model": "a"}).done("probe", list[float]) == [1.5, math.inf]
    kept = Journal(path, {"model": "a"}).done("conv", dict[str, float | list[float]])
    assert kept == {"sqnr": math.inf, "kl": 0.1 + 0.2, "list": [-math.inf]}
    json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [file.name for file in tmp_path.iterdir()] == ["l.json"]


@pytest.mark.parametrize("other", ["model", "data"])
def test_a_journal_of_something_else_is_refused_and_kept(tmp_path: Path, other: str) -> None:
    path = tmp_path / "l.json"
    Journal(path, {"model": "a", "data": "b"}).finish("conv", 1.0)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=f"another {other} "):
        Journal(path, {"model": "a", "data": "b", other: "new"})
    assert path.read_bytes() == before


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    path.write_text('{"version": 1, "done": {')
    with pytest.raises(ConfigError, match="damaged"):
        Journal(path, {})


def test_an_input_that_comes_late_is_that_of_before(tmp_path: Path) -> None:
    opened(tmp_path).same("the samples", b"\x01\x02")
    opened(tmp_path).same("the samples", b"\x01\x02")
    opened(tmp_path).same("the labels", b"\x03")
    with pytest.raises(DataError, match="the ledger: the samples are not those of before"):
        opened(tmp_path).same("the samples", b"\x01\x03")


@pytest.mark.parametrize("name, plain", [
    ("a", True), ("A-b_c+1.x", True), (".a", True), ("a" * 255, True), ("a" * 256, False), ("", False), (".", False),
    ("..", False), ("...", False), ("a/b", False), ("a\\b", False), ("c:a", False), ("a b", False), ("a\n", False),
])  # fmt: skip
def test_names_of_files_that_belong_to_a_folder(name: str, plain: bool, tmp_path: Path) -> None:
    """One part of a path on every system; 255 characters are the most that file systems take."""
    with nullcontext() if plain else pytest.raises(DataError, match="plain name"):
        assert own_file(tmp_path, name, DataError) == tmp_path / name


def test_a_job_that_kept_no_tensors_leaves_nothing(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.begin()
    journal.finish("k", 1.0)
    journal.remove()
    assert list(tmp_path.iterdir()) == []
    journal.remove()  # and nothing is asked of what is gone


def test_what_is_forgotten_is_gone_and_the_rest_stays(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.finish_arrays("one", {"w": np.array([1])})
    journal.finish_arrays("other", {"w": np.array([2])})
    for _ in range(2):
        journal.forget("one")
        journal.forget("never kept")
        again = opened(tmp_path)
        assert again.arrays("one") is None and values(again.arrays("other")) == [2]
    journal.settle()
    assert len(files(tmp_path)) == 1


def test_a_journal_without_a_file_keeps_values_for_the_process_and_no_tensors(tmp_path: Path) -> None:
    journal = Journal(None, {"job": "1"})
    assert not journal and opened(tmp_path)
    journal.begin()
    journal.finish("k", 3)
    journal.finish_arrays("t", {"w": np.zeros(2)})
    journal.forget("t")
    assert journal.done("k", int) == 3 and journal.arrays("t") is None and journal.file("t") is None
    journal.settle()
    journal.remove()
    assert not list(tmp_path.iterdir())


def test_a_journal_that_begins_again_keeps_what_it_has(tmp_path: Path) -> None:
    opened(tmp_path).begin()
    assert (tmp_path / "r.json").exists()
    opened(tmp_path).finish("k", 3)
    opened(tmp_path).begin()
    assert opened(tmp_path).done("k", int) == 3


def test_a_mapping_has_one_of_the_keys_that_are_asked_for(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for key in ("a", "b", "z"):
        journal.finish(key, {key: 1.5})
    for key in ("a", "b"):
        assert opened(tmp_path).done(key, dict[str, float], ("a", "b")) == {key: 1.5}
    with pytest.raises(ConfigError, match="'z' has no 'a'"):
        opened(tmp_path).done("z", dict[str, float], ("a", "b"))


@pytest.mark.parametrize("kept", [True, False])
def test_a_journal_is_empty_until_something_is_finished(kept: bool, tmp_path: Path) -> None:
    """A value or a tensor; one that is forgotten again is nothing finished."""
    journal = Journal(tmp_path / "j.json" if kept else None)
    assert journal.is_empty
    if kept:
        journal.finish_arrays("weights", {"w": np.arange(3)})
        assert not journal.is_empty
        journal.forget("weights")
        assert journal.is_empty
    journal.finish("value", 1.0)
    assert not journal.is_empty


def test_a_job_that_did_nothing_is_over_and_files_that_went_are_not_missed(tmp_path: Path) -> None:
    opened(tmp_path).settle()
    journal = opened(tmp_path)
    for number in range(2):
        journal.finish_arrays("s k", {"w": np.array([number])})
    (tmp_path / "r.tensors" / "0.safetensors").unlink()
    journal.finish_arrays("s k", {"w": np.array([2])})
    assert values(opened(tmp_path).arrays("s k")) == [2] and files(tmp_path) == ["1.safetensors", "2.safetensors"]


def test_a_file_is_worked_on_by_one_job_and_no_file_by_any(tmp_path: Path) -> None:
    with Journal.held(None), Journal.held(None), Journal.held(tmp_path / "r.json"):
        with pytest.raises(OutputError, match=r"r\.json"), Journal.held(tmp_path / "r.json"):
            pass
        with Journal.held(tmp_path / "other.json"):
            pass
