"""Every reader against damaged files: one sentence, or the right answer; in bounded time; nothing left behind.

The default suite takes a part of the causes, spread over all fields; `make slow` takes all; `make fuzz` mutates on.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies
from tests.fuzz.causes import Cause, Finding, judge
from tests.fuzz.mutation import mutate_files
from tests.fuzz.readers import READERS, causes

#: Causes of each reader that the default suite judges.
SHARE = 60
WHOLE = ("as it should be", "as they should be")
ALL = [one for reader in READERS for one in causes(reader)]


def parts(reader: str) -> tuple[list[Cause], list[Cause]]:
    """Every n-th cause, and the others: causes of one field stand together, so that all fields are met."""
    found = causes(reader)
    step = max(1, len(found) // SHARE)
    return list(found[::step]), [one for place, one in enumerate(found) if place % step]


QUICK = [one for reader in READERS for one in parts(reader)[0]]
OTHERS = [one for reader in READERS for one in parts(reader)[1]]


def check(one: Cause, folder: Path) -> str:
    reader = READERS[one.reader]
    for library in reader.needs:
        pytest.importorskip(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge(str(one), one.make, reader.read, folder)


@pytest.mark.parametrize("one", QUICK, ids=str)
def test_damage_is_refused_in_a_sentence_or_does_no_harm(one: Cause, tmp_path: Path) -> None:
    check(one, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("one", OTHERS, ids=str)
def test_all_other_damage(one: Cause, tmp_path: Path) -> None:
    check(one, tmp_path)


@pytest.mark.parametrize("reader", READERS)
@hypothesis.given(which=strategies.integers(0, 10**6), seed=strategies.integers(0, 2**32))
@hypothesis.settings(max_examples=25, suppress_health_check=list(hypothesis.HealthCheck))
def test_mutated_bytes(reader: str, which: int, seed: int) -> None:
    found = causes(reader)
    one = found[which % len(found)]
    made = replace(one, damage=f"{one.damage}, mutation {seed}", make=partial(mutate_files, one.make, seed))
    with tempfile.TemporaryDirectory() as name:
        check(made, Path(name))


@pytest.mark.parametrize("one", [one for one in ALL if one.damage in WHOLE], ids=str)
def test_what_is_not_damaged_is_read(one: Cause, tmp_path: Path) -> None:
    assert check(one, tmp_path) == "answered"


#: What may lie in the place of a file: it is no regular file, or another size than anyone expects.
ODD: dict[str, Callable[[Path], object]] = {
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "an empty file": lambda path: path.touch(),
    "a terabyte of nothing": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
}


@pytest.mark.skipif(sys.platform != "linux", reason="links, pipes and files with holes of Linux")
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("reader", READERS)
def test_what_lies_in_the_place_of_a_file(reader: str, odd: str, tmp_path: Path) -> None:
    """Every file of an undamaged case, or of the first where all are damaged; an alarm ends what waits for a pipe."""
    whole = next((one for one in causes(reader) if one.damage in WHOLE), causes(reader)[0])
    (tmp_path / "names").mkdir()
    whole.make(tmp_path / "names")
    names = [path.relative_to(tmp_path / "names") for path in sorted((tmp_path / "names").rglob("*")) if path.is_file()]

    def instead(folder: Path, name: Path) -> None:
        whole.make(folder)
        (folder / name).unlink()
        ODD[odd](folder / name)

    for number, name in enumerate(names):
        (tmp_path / str(number)).mkdir()
        one = replace(whole, damage=f"{odd} is {name}", make=partial(instead, name=name))
        previous = signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(20)
        try:
            check(one, tmp_path / str(number))
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, previous)


def _too_long(*_: object) -> None:
    raise Finding("it waits")


def test_causes_are_many_and_differ() -> None:
    assert len({(one.reader, one.field, one.damage) for one in ALL}) == len(ALL)
    assert {reader for reader in READERS if len(causes(reader)) < 60} == set()
