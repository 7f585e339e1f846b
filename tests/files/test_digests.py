"""Digests of files, and the words for what differs: a digest of an older version has to be the same today."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from quark.files.identity import difference, digest_of_file, digests_of


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    content = {"empty": b"", "small": b"abc", "large": bytes(range(256)) * (1 << 15) + b"end"}
    for name, some in content.items():
        (tmp_path / name).write_bytes(some)
        assert digest_of_file(tmp_path / name) == hashlib.blake2b(some, digest_size=16).hexdigest()
    assert digests_of(tmp_path / name for name in content) == {
        name: hashlib.blake2b(some, digest_size=16).hexdigest() for name, some in content.items()
    }


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ([1, 2], [1, 2], None),
        ([["a", 1], ["b", 2]], [["a", 1], ["b", 3]], "another it.b (was 2, is 3)"),
        ({"a": [1, [2]]}, {"a": [1, [3]]}, "another it.a (was [2], is [3])"),
        ([["x", [["y", 1]]]], [["x", [["y", 2]]]], "another it.x.y (was 1, is 2)"),
        ([1, 2, 3], [1, 5, 3], "another it (was [1, 2, 3], is [1, 5, 3])"),
        ([1, 2], [1, 2, 3], "another it (was [1, 2], is [1, 2, 3])"),
        ({"a": 1}, {"b": 1}, 'another it (was {"a": 1}, is {"b": 1})'),
        (["x", 1], ["y", 1], 'another it (was ["x", 1], is ["y", 1])'),
        ([1, "a"], [1, "b"], 'another it (was [1, "a"], is [1, "b"])'),
    ],
)
def test_the_innermost_part_that_differs_is_told(before: object, now: object, words: str | None) -> None:
    """``[name, value]`` is a field; of other lists the whole is shown."""
    assert difference({"it": json.dumps(before)}, {"it": json.dumps(now)}) == words


def test_three_differences_are_told_and_what_one_side_lacks() -> None:
    before = dict.fromkeys("abcde", "x")
    assert difference(before, dict.fromkeys("acde", "x")) == "another b (was x, is absent)"
    assert difference({}, {"new": "x"}) == "another new (was absent, is x)"
    told = difference(before, dict.fromkeys("abcde", "y"))
    assert told == ", ".join(f"another {name} (was x, is y)" for name in "abc")


@pytest.mark.parametrize(("length", "shown"), [(59, 59), (60, 60), (61, 57), (200, 57)])
def test_a_long_value_is_cut_to_sixty_characters(length: int, shown: int) -> None:
    words = difference({"it": "x" * length}, {"it": "y"})
    assert words == f"another it (was {'x' * shown}{'...' if shown < length else ''}, is y)"
