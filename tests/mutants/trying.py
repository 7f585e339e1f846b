"""Trying a mutant: in a copy of a process that has everything loaded, or in one that starts with the mutant.

Most of a test run is imports. ``Warm`` is a plugin of pytest that collects the tests once and forks for every mutant:
in the child the changed code takes the place of the old one in every function that is alive, and the tests run. What
only happens while a file is imported (tables, defaults, decorators), or in processes that a test starts, cannot be seen
so: ``cold`` forks before anything of ours is imported and imports a tree of sources that holds the mutant.

Whatever kills a mutant has to pass without it, in the same kind of process: a test that fails anyway is no witness, and
a hang is one only if the same test, unbroken, needs less than half of the time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
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
FAILED = (
    *(pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR),
    pytest.ExitCode.USAGE_ERROR,  # a conftest.py cannot be imported, because the package cannot
)
QUIET = ["-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--assert=plain"]

PAUSE, LATE = 5.0, 6.0
WAITING = 5.0
"""A test that waits hangs after so many times the seconds that it may compute: others compute on this machine, too."""
IMPORT = 30.0
LATER = (
    "quark",
    "transformers",
    "compressed_tensors",
    "gguf",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "scipy",
    "accelerate",
)
"""Packages that functions import when they are called."""
SCOUT = 10.0
"""Seconds for each of the tests that are run once to see what they import."""
BROKEN = "a hang or a crash"
"""In the place of the test that noticed, where no test had begun."""

Turn = dict[str, float]
"""Tests that are asked together, each with the seconds that it takes."""
#: A change, and the tests that are asked, in turns: the second is for what survives the first.
Trial = tuple[Place, list[Turn]]


def longest(turn: Turn) -> float:
    """The seconds after which the tests of a turn hang; one test hangs after ``LATE`` times its own and ``PAUSE``."""
    return WAITING * (4 * PAUSE + LATE * sum(turn.values()))


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
    """A plugin of pytest, in the child: writes which tests noticed, and ends the child at a test that hangs.

    Attributes:
        failures: the file that names them; ``running`` beside it names the test that runs.
        asked: how long each test takes.
        share: of the time after which it hangs.
    """

    failures: Path
    asked: Turn = field(default_factory=dict)
    share: float = 1.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write which test begins; the signals, which nothing here handles, end the process also within native code."""
        self.failures.with_name("running").write_text(nodeid, encoding="utf-8")
        seconds = self.share * (PAUSE + LATE * self.asked[nodeid])
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, WAITING * seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A line for a test that failed."""
        if report.failed:
            with self.failures.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_runtest_logfinish(self) -> None:
        """It ended."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.failures.with_name("running").unlink()

    def clear(self) -> None:
        """Forget what is written."""
        self.failures.write_text("", encoding="utf-8")
        self.failures.with_name("running").unlink(missing_ok=True)

    def witness(self) -> str:
        """The first test that failed; or else the one that ran when the process ended, or what stands for none."""
        failed = self.failures.read_text(encoding="utf-8").splitlines()  # one may also fail while it is torn down
        running = self.failures.with_name("running")
        return failed[0] if failed else running.read_text(encoding="utf-8") if running.exists() else BROKEN


def cold(place: Place, turn: Turn) -> str:
    """The test that notices a change, everything of ours imported anew; empty where it lives.

    The same test, or the same tests if the collection breaks, pass with the sources as they are, in half of the time.
    """
    while turn and (witness := _imported(place, tuple(turn.items()))):
        checked = {test: took for test, took in turn.items() if test == witness} or turn
        if not _imported(None, tuple(checked.items()), 0.5):
            return witness
        turn = {test: took for test, took in turn.items() if test not in checked}
    return ""


@cache
def _imported(place: Place | None, asked: tuple[tuple[str, float], ...], share: float = 1.0) -> str:
    """The first test that fails in a tree of sources with a change, or in an unchanged one; empty where none does."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        noticing = Witnesses(Path(folder) / "failures", dict(asked), share)
        noticing.clear()

        def work() -> bool:
            sources = Path(tempfile.gettempdir()) / "src"
            shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
            if place is not None:
                (sources / place.file).write_text(changed_text(SOURCES / place.file, place), encoding="utf-8")
            sys.path[:0] = [str(sources), str(ROOT)]
            os.environ["PYTHONPATH"] = os.pathsep.join([str(sources), str(ROOT)])
            words = [*QUIET, "-p", "tests.mutants.unshrunk", *dict(asked)]
            return pytest.main(words, plugins=[noticing]) in FAILED

        return noticing.witness() if forked(work, WAITING * IMPORT + share * longest(dict(asked))) else ""


@dataclass(eq=False)
class Warm(Witnesses):
    """The plugin: asks ``plan`` for mutants with their tests and tells ``heard`` how each went.

    That is ``None`` for a change that is in no function. The tests come in turns: the second is for what survives the
    first.
    """

    plan: list[Trial] = field(default_factory=list)
    heard: Callable[[Place, bool | None, str], None] = print
    functions: dict[CodeType, list[FunctionType]] = field(default_factory=lambda: defaultdict(list))
    items: dict[str, pytest.Item] = field(default_factory=dict)
    honest: dict[str, bool] = field(default_factory=dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of the tests: the mutants, each with its witness on the unchanged code.

        A test that fails without a change is not a witness: what it had killed is tried without it.
        """
        self.items = {item.nodeid: item for item in session.items}
        self._import_what_tests_do(session)
        gc.unfreeze()  # tests/conftest.py freezes what there is after the collection: it would not be listed
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename.startswith(str(SOURCES)):
                self.functions[one.__code__].append(one)
        gc.collect()
        gc.freeze()
        for place, turns in self.plan:
            swapped = list(self._swaps(place))
            witness = next(filter(None, (self._witness(session, swapped, turn) for turn in turns if swapped)), "")
            self.heard(place, bool(witness) if swapped else None, witness)
        return True

    def _import_what_tests_do(self, session: pytest.Session) -> None:
        """Import what tests import while they run, as a child tells that runs one of each file: every fork would."""
        asked = {test for _, turns in self.plan for turn in turns for test in turn}
        first = {test.split("::")[0]: test for test in sorted(asked & set(self.items), reverse=True)}
        names = self.failures.with_name("modules")
        before = set(sys.modules)

        def scout() -> bool:
            for test in first.values():
                self.asked = {test: SCOUT}
                _fails(session, [], [self.items[test]])
                names.write_text("\n".join(sorted(set(sys.modules) - before)), encoding="utf-8")
            return False

        forked(scout, SCOUT * len(first))
        for name in names.read_text(encoding="utf-8").split() if names.exists() else ():
            if name.partition(".")[0] in LATER and not name.endswith("__main__"):
                with contextlib.suppress(Exception):  # whatever ends it, the tests import it again, if they need it
                    importlib.import_module(name)

    def _witness(self, session: pytest.Session, swapped: list[tuple[FunctionType, CodeType]], turn: Turn) -> str:
        """The test that notices changed functions, and passes without the change; empty where none does."""
        turn = {test: took for test, took in turn.items() if test in self.items and self.honest.get(test, True)}
        while turn and (witness := self._first(session, swapped, turn)):
            checked = {test: took for test, took in turn.items() if test == witness} or turn
            if witness == BROKEN or witness not in self.honest:
                self.honest[witness] = not self._first(session, [], checked, 0.5)
            if self.honest[witness]:
                return witness
            turn = {test: took for test, took in turn.items() if test not in checked}
        return ""

    def _first(
        self, session: pytest.Session, swapped: list[tuple[FunctionType, CodeType]], turn: Turn, share: float = 1.0
    ) -> str:
        """The first test that fails in a child that has changed functions; empty where none does."""
        self.clear()
        self.asked, self.share = turn, share
        tests = [self.items[test] for test in turn]
        return self.witness() if forked(lambda: _fails(session, swapped, tests), share * longest(turn)) else ""

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


def _fails(session: pytest.Session, swapped: list[tuple[FunctionType, CodeType]], asked: list[pytest.Item]) -> bool:
    for function, code in swapped:
        function.__code__ = code
    session.items[:] = asked
    given = getattr(session.config, "_tmp_path_factory")  # noqa: B009 - not public
    given._given_basetemp = Path(tempfile.gettempdir()) / "pytest"
    with contextlib.suppress(pytest_main.Failed, pytest_main.Interrupted):
        pytest_main.pytest_runtestloop(session)
    return bool(session.testsfailed)
