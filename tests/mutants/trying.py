"""Trying a mutant: in a copy of a process that has everything loaded, or in one that starts with the mutant.

Most of a test run is imports. ``Warm`` is a plugin of pytest that collects the tests once and forks for every mutant:
in the child the changed code takes the place of the old one in every function that is alive, and the tests run. What
only happens while a file is imported (tables, defaults, decorators), or in processes that a test starts, cannot be seen
so: ``cold`` forks before anything of ours is imported and imports a tree of sources that holds the mutant.

Whatever kills a mutant has to pass without it, in the same kind of process: a test that fails anyway is no witness, and
a hang is one only if the same tests, unbroken, need less than half of the time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from _pytest import main as pytest_main
from tests.mutants.covering import ROOT, SOURCES
from tests.mutants.places import Place, changed_text

BYTES = 8 << 30
"""Of data that a mutant's tests may ask for."""
FAILED = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
QUIET = ["-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--assert=plain"]

HOUR = 3600.0
BROKEN = "a hang or a crash"
"""In the place of the test that noticed."""

#: A change, and the tests that are asked, in turns: the second is for what survives the first. Each with its seconds.
Trial = tuple[Place, list[tuple[list[str], float]]]


def forked(work: Callable[[], bool], seconds: float, *, loud: bool = False) -> bool:
    """What ``work`` says in a child with a folder of its own, silent unless ``loud``; True where it hangs or breaks."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _alone(folder, loud)
                os._exit(int(work()))
            os._exit(1)
        deadline, done, status = time.monotonic() + seconds, 0, 1
        try:
            while not done and time.monotonic() < deadline:
                time.sleep(0.01)
                done, status = os.waitpid(child, os.WNOHANG)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # also what its tests have started
            if not done:
                os.waitpid(child, 0)
    return not done or status != 0


def _alone(folder: str, loud: bool) -> None:
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in () if loud else range(3):
        os.dup2(silence, stream)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.update(threads)


@dataclass(eq=False)
class Witnesses:
    """A plugin of pytest, in the child: writes which tests noticed."""

    failures: Path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A line for a test that failed."""
        if report.failed:
            with self.failures.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def cold(place: Place, tests: list[str], seconds: float) -> str:
    """The test that notices a change, everything of ours imported anew; empty where it lives.

    The same test, or the same tests if they hang or the collection breaks, pass with the sources as they are.
    """
    while tests and (witness := _imported(place, tuple(tests), seconds)):
        checked, most = ([witness], HOUR) if witness in tests else (tests, seconds / 2)
        if not _imported(None, tuple(checked), most):
            return witness
        tests = [test for test in tests if test not in checked]
    return ""


@cache
def _imported(place: Place | None, tests: tuple[str, ...], seconds: float) -> str:
    """The first test that fails in a tree of sources with a change, or in an unchanged one; empty where none does."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        failures = Path(folder) / "failures"
        failures.touch()

        def work() -> bool:
            sources = Path(tempfile.gettempdir()) / "src"
            shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
            if place is not None:
                (sources / place.file).write_text(changed_text(SOURCES / place.file, place), encoding="utf-8")
            sys.path[:0] = [str(sources), str(ROOT)]
            os.environ["PYTHONPATH"] = os.pathsep.join([str(sources), str(ROOT)])
            words = [*QUIET, "-p", "tests.mutants.unshrunk", *tests]
            return pytest.main(words, plugins=[Witnesses(failures)]) in FAILED

        noticed = forked(work, seconds)
        return next(iter(failures.read_text(encoding="utf-8").splitlines()), BROKEN) if noticed else ""


@dataclass(eq=False)
class Warm(Witnesses):
    """The plugin: asks ``plan`` for mutants with their tests and tells ``heard`` how each went.

    That is ``None`` for a change that is in no function. The tests come in turns, each with its seconds: the second is
    for what survives the first.
    """

    plan: list[Trial]
    heard: Callable[[Place, bool | None, str], None]
    functions: dict[CodeType, list[FunctionType]] = field(default_factory=lambda: defaultdict(list))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of the tests: the mutants, then their witnesses on the unchanged code.

        A test that fails without a change is not a witness: what it had killed is tried without it.
        """
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename.startswith(str(SOURCES)):
                self.functions[one.__code__].append(one)
        items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()
        witnesses = {place: self._noticed(session, items, place, turns) for place, turns in self.plan}
        self._failing(session, [], [items[test] for test in {*witnesses.values()} if test in items], 0)
        liars = set(self.failures.read_text(encoding="utf-8").split("\n"))
        for place, turns in self.plan:
            if witnesses[place] in liars - {""}:
                honest = [([test for test in tests if test not in liars], seconds) for tests, seconds in turns]
                self._noticed(session, items, place, honest)
        return True

    def _noticed(
        self, session: pytest.Session, items: dict[str, pytest.Item], place: Place, turns: list[tuple[list[str], float]]
    ) -> str:
        """The test that notices a change; empty where it lives, or is in no function."""
        swapped = list(self._swaps(place))
        noticed, witness = False, ""
        for tests, seconds in turns if swapped else []:
            asked = [items[test] for test in tests if test in items]
            noticed = self._failing(session, swapped, asked, 1, seconds)
            failed = self.failures.read_text(encoding="utf-8").splitlines()  # one may also fail while it is torn down
            witness = failed[0] if failed else BROKEN if noticed else ""
            if witness == BROKEN and self._failing(session, [], asked, 1, seconds / 2):
                noticed, witness = False, ""
            if noticed:
                break
        self.heard(place, noticed if swapped else None, witness)
        return witness

    def _failing(
        self,
        session: pytest.Session,
        swapped: list[tuple[FunctionType, CodeType]],
        asked: list[pytest.Item],
        most: int,
        seconds: float = HOUR,
    ) -> bool:
        """Whether one of some tests fails in a child that has changed functions; ``failures`` then names it."""
        self.failures.write_text("", encoding="utf-8")
        return bool(asked) and forked(lambda: _fails(session, swapped, asked, most), seconds)

    def _swaps(self, place: Place) -> Iterator[tuple[FunctionType, CodeType]]:
        """(function, its changed code); nothing where the change is outside functions."""
        path = SOURCES / place.file
        old = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
        new = compile(changed_text(path, place), str(path), "exec", dont_inherit=True)
        for before, after in _pairs(old, new):
            if before != after:
                yield from ((function, after) for function in self.functions.get(before, ()))


def _pairs(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    yield old, new
    inside = [[one for one in code.co_consts if isinstance(one, CodeType)] for code in (old, new)]
    if [one.co_name for one in inside[0]] == [one.co_name for one in inside[1]]:
        for before, after in zip(*inside, strict=True):
            yield from _pairs(before, after)


def _fails(
    session: pytest.Session, swapped: list[tuple[FunctionType, CodeType]], asked: list[pytest.Item], most: int
) -> bool:
    for function, code in swapped:
        function.__code__ = code
    session.items[:] = asked
    given = getattr(session.config, "_tmp_path_factory")  # noqa: B009 - not public
    given._given_basetemp = Path(tempfile.gettempdir()) / "pytest"
    session.config.option.maxfail = most
    with contextlib.suppress(pytest_main.Failed, pytest_main.Interrupted):
        pytest_main.pytest_runtestloop(session)
    return bool(session.testsfailed)
