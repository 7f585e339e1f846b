"""What every test may use: the folder of shared reference data, and reproducible property tests."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

# Before NumPy and torch are imported: their threads wait for each other busily, which is most of the time of small
# models where as many processes run as there are cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("QUARK_THREADS", "1")  # ONNX Runtime, likewise

# Compiled modules are kept, also where the caller's environment says otherwise: every process that a test starts would
# compile the package anew, and every worker would rewrite the assertions of all tests, and of hypothesis.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Nor does a test outlive its machine: what is written need not reach the disk, for which every file waited. Jobs that
# are killed with the power (tests/killing.py) run in processes of their own.
os.fsync = lambda handle: None

import hypothesis
import pytest

import quark  # noqa: F401 - before anything imports onnxruntime: its telemetry is off

hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
hypothesis.settings.load_profile("project")

ROOT = Path(__file__).parents[1]
BEFORE = pytest.StashKey[set[str]]()


def stray_files() -> set[str]:
    """Files of the checkout that git neither knows nor ignores; none where there is no checkout."""
    found = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return set(found.stdout.splitlines())


def pytest_collection() -> None:
    """Twenty thousand tests are no garbage: not looked through while they are made, nor at any time after it."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Nor are the libraries that tests import, again and again: every tenth second of the tests went there."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEFORE] = stray_files()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A test that leaves a file in the tree fails the run; the workers of xdist leave it to their controller."""
    strays = stray_files() - session.config.stash[BEFORE]
    if strays and not hasattr(session.config, "workerinput"):
        print(f"\nThe tests left files in the tree: {', '.join(sorted(strays))}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ``shared`` beside the repository: real models, real data and reference vectors."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("no folder 'shared' beside the repository")
    return folder


@pytest.fixture(scope="session")
def examples(shared: Path) -> Iterator[ModuleType]:
    """The loaders of the real models and their data; they import their neighbours when they are called."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("torch")
    folder = str(shared / "data")
    sys.path.insert(0, folder)
    yield importlib.import_module("load_examples")
    sys.path.remove(folder)


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for scales and clips try little, where a test does not depend on how much is tried."""
    channels = pytest.importorskip("quark.torch.algorithms.channels")
    monkeypatch.setattr(channels, "FACTORS", ((0.8, 1.25),))
    monkeypatch.setattr(channels, "CHANNELS", 8)
    for search in ("awq", "smooth"):
        monkeypatch.setattr(f"quark.torch.algorithms.{search}.GRID", ((0.0, 0.4, 0.8), (0.0, 0.5)))
    monkeypatch.setattr("quark.algorithms.awq.FINER", 0)
    monkeypatch.setattr("quark.algorithms.awq.CLIPS", 2)
