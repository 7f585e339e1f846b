"""Trying a mutant: in a copy of a process that has everything loaded, or in one that starts with the mutant.

Most of a test run is imports. ``Warm`` is a plugin of pytest that collects the tests once and forks for every mutant:
in the child the changed code takes the place of the old one in every function that is alive, and the tests run. What
only happens while a file is imported (tables, defaults, decorators), or in processes that a test starts, cannot be seen
so: ``cold`` forks before anything of ours is imported and imports a tree of sources that holds the mutant.
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


def forked(work: Callable[[], bool], seconds: float, *, loud: bool = False) -> bool:
    """What ``work`` says in a child with a folder of its own, silent unless ``loud``; True where it hangs or breaks."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _alone(folder, loud)
                os._exit(int(work()))
            os._exit(1)
        deadline = time.monotonic() + seconds
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                break
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what its tests have started
    return status != 0


def _alone(folder: str, loud: bool) -> None:
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in () if loud else range(3):
        os.dup2(silence, stream)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.update(threads)


def cold(place: Place, tests: list[str], seconds: float) -> bool:
    """Whether one of the tests notices the change, everything of ours imported anew."""

    def work() -> bool:
        sources = Path(tempfile.gettempdir()) / "src"
        shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
        (sources / place.file).write_text(changed_text(SOURCES / place.file, place), encoding="utf-8")
        sys.path[:0] = [str(sources), str(ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(sources), str(ROOT)])
        return pytest.main([*QUIET, "-p", "tests.mutants.unshrunk", *tests]) in FAILED

    return forked(work, seconds)


@dataclass(eq=False)
class Warm:
    """The plugin: asks ``plan`` for mutants with their tests and tells ``heard`` how each went.

    That is ``None`` for a change that is in no function.
    """

    plan: list[tuple[Place, list[str], float]]
    heard: Callable[[Place, bool | None], None]
    functions: dict[CodeType, list[FunctionType]] = field(default_factory=lambda: defaultdict(list))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of the tests: the mutants."""
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename.startswith(str(SOURCES)):
                self.functions[one.__code__].append(one)
        items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()
        for place, tests, seconds in self.plan:
            swapped = list(self._swaps(place))
            asked = [items[test] for test in tests if test in items]
            self.heard(place, forked(lambda s=swapped, a=asked: _fails(session, s, a), seconds) if swapped else None)
        return True

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
    session.config.option.maxfail = 1
    with contextlib.suppress(pytest_main.Failed, pytest_main.Interrupted):
        pytest_main.pytest_runtestloop(session)
    return bool(session.testsfailed)
