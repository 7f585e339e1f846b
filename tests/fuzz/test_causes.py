"""Every reader against damaged files: one sentence, or the right answer; in bounded time; nothing left behind.

The default suite takes a part of the causes, spread over all fields; `make slow` takes all; `make fuzz` mutates on.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from tests.fuzz.causes import Cause, judge
from tests.fuzz.readers import READERS, causes

#: Causes of each reader that the default suite judges.
SHARE = 60
ALL = [one for reader in READERS for one in causes(reader)]


def part(reader: str) -> list[Cause]:
    """Every n-th cause: causes of one field stand together, so that all fields are met."""
    found = causes(reader)
    return list(found[:: max(1, len(found) // SHARE)])


QUICK = [one for reader in READERS for one in part(reader)]


def check(one: Cause, folder: Path) -> None:
    reader = READERS[one.reader]
    for library in reader.needs:
        pytest.importorskip(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judge(str(one), one.make, reader.read, folder)


@pytest.mark.parametrize("one", QUICK, ids=str)
def test_damage_is_refused_in_a_sentence_or_does_no_harm(one: Cause, tmp_path: Path) -> None:
    check(one, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("one", [one for one in ALL if one not in QUICK], ids=str)
def test_all_other_damage(one: Cause, tmp_path: Path) -> None:
    check(one, tmp_path)


def test_causes_are_many_and_differ() -> None:
    assert len({(one.reader, one.field, one.damage) for one in ALL}) == len(ALL)
    assert {reader for reader in READERS if len(causes(reader)) < 60} == set()
