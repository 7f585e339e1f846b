"""What a resume file remembers after a cut: the last write that is whole counts, and what nobody needs is gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quark.errors import ConfigError
from quark.onnx.resume import Resume


def opened(folder: Path) -> Resume:
    return Resume(folder / "r.json", "m", {"a": "1"})


def values(found: object) -> object:
    return None if found is None else found["w"].tolist()  # type: ignore[index]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "r.tensors").glob("*.bin"))


def test_files_are_numbered_and_replaced_ones_go(tmp_path: Path) -> None:
    resume = opened(tmp_path)
    for number in range(4):
        resume.finish("s", "k", {"w": np.array([number])})
    assert len(files(tmp_path)) == 2  # the last, and the one before in case that is cut
    resume.finish("s", "other", {"w": np.array([9])})
    resume.finish("s", "other", {"w": np.array([10])})
    again = opened(tmp_path)
    assert (values(again.done("s", "k")), values(again.done("s", "other"))) == ([3], [10])
    resume.settle()
    assert len(files(tmp_path)) == 2
    assert (values(again.done("s", "k")), values(again.done("s", "other"))) == ([3], [10])


def test_a_first_write_that_was_cut_before_its_file_is_taken_over(tmp_path: Path) -> None:
    opened(tmp_path).finish("s", "k", {"w": np.array([1])})
    assert files(tmp_path) == ["0.bin"]
    (tmp_path / "r.json").unlink()  # as if it had never been written
    again = opened(tmp_path)
    assert again.done("s", "k") is None
    again.finish("s", "k", {"w": np.array([2])})
    assert files(tmp_path) == ["0.bin"] and values(opened(tmp_path).done("s", "k")) == [2]
    resume = opened(tmp_path)
    resume.finish("s", "l", {"w": np.array([3])})
    assert files(tmp_path) == ["0.bin", "1.bin"]


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("version", 1, True),
        ("version", 2, False),
        ("next", 10**9, True),
        ("next", 10**9 + 1, False),
        ("next", -1, False),
        ("next", 0, True),
        ("extra", 1, False),
    ],
)
def test_what_a_state_may_hold(tmp_path: Path, field: str, value: int, fits: bool) -> None:
    import json

    resume = opened(tmp_path)
    resume.finish("s", "k", {"w": np.array([1])})
    resume.settle()
    path = tmp_path / "r.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    if fits:
        assert values(opened(tmp_path).done("s", "k")) == [1]
    else:
        with pytest.raises(ConfigError):
            opened(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("size", -1), ("file", "../x.bin"), ("file", "x.bin"), ("shape", [-1])])
def test_what_an_entry_may_hold(tmp_path: Path, field: str, value: object) -> None:
    import json

    resume = opened(tmp_path)
    resume.finish("s", "k", {"w": np.array([1])})
    resume.settle()
    path = tmp_path / "r.json"
    state = json.loads(path.read_text())
    entry = state["entries"]["s"]["k"]
    (entry["arrays"][0] if field == "shape" else entry)[field] = value
    path.write_text(json.dumps(state))
    with pytest.raises(ConfigError):
        opened(tmp_path)


@pytest.mark.parametrize("cut", ["half", "nothing", "gone"])
def test_a_last_write_that_was_cut_is_taken_back(tmp_path: Path, cut: str) -> None:
    resume = opened(tmp_path)
    for number in range(3):
        resume.finish("s", str(number), {"w": np.arange(10 * number, 10 * number + 8)})
    newest = max((tmp_path / "r.tensors").glob("*.bin"), key=lambda path: int(path.stem))
    if cut == "gone":
        newest.unlink()
    else:
        newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2] if cut == "half" else b"")
    again = opened(tmp_path)
    assert again.done("s", "2") is None
    assert [values(again.done("s", str(k))) for k in (0, 1)] == [list(range(8)), list(range(10, 18))]
    again.finish("s", "2", {"w": np.arange(3)})
    assert values(opened(tmp_path).done("s", "2")) == [0, 1, 2]
    assert values(opened(tmp_path).done("s", "1")) == list(range(10, 18))


def test_an_older_entry_that_was_damaged_is_told(tmp_path: Path) -> None:
    resume = opened(tmp_path)
    for number in range(3):
        resume.finish("s", str(number), {"w": np.arange(8)})
    oldest = min((tmp_path / "r.tensors").glob("*.bin"), key=lambda path: int(path.stem))
    content = bytearray(oldest.read_bytes())
    content[0] ^= 1
    oldest.write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged"):
        opened(tmp_path).done("s", "0")
    oldest.unlink()
    with pytest.raises(ConfigError, match="is missing"):
        opened(tmp_path).done("s", "0")


def test_what_differs_is_named_three_at_most(tmp_path: Path) -> None:
    Resume(tmp_path / "r.json", "m", dict.fromkeys("abcd", "1")).finish("s", "k", {})
    with pytest.raises(ConfigError, match="another configuration: a was 1, is 2, b was 1, is 2, c was 1, is 2") as told:
        Resume(tmp_path / "r.json", "m", dict.fromkeys("abcd", "2"))
    assert "d was" not in str(told.value)
    with pytest.raises(ConfigError, match="d was 1, is absent"):
        Resume(tmp_path / "r.json", "m", dict.fromkeys("abc", "1"))
    with pytest.raises(ConfigError, match="another model"):
        Resume(tmp_path / "r.json", "n", dict.fromkeys("abcd", "1"))


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r.tensors").mkdir()
    (tmp_path / "r.tensors" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds 'notes.txt', which is not of this job"):
        opened(tmp_path)
