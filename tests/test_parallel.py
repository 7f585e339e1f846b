"""One helper for all workers: backends that stream results, and one that hands them over together, as Ray's does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import joblib
import pytest
from joblib._parallel_backends import ThreadingBackend

from quark import parallel
from quark.cli import main
from quark.errors import ConfigError, QuarkError


class Together(ThreadingBackend):
    """A backend without generators: joblib raises where one asks for them."""

    supports_return_generator = False


joblib.register_parallel_backend("together", Together)


@pytest.mark.parametrize("backend", ["threading", "loky", "together"])
@pytest.mark.parametrize("ordered", [True, False])
def test_every_backend_gives_the_same_results(backend: str, ordered: bool) -> None:
    with joblib.parallel_config(backend, n_jobs=2):
        found = list(parallel.results((joblib.delayed(divmod)(k, 7) for k in range(23)), None, ordered=ordered))
    assert (found if ordered else sorted(found)) == [divmod(k, 7) for k in range(23)]


def die(number: int) -> None:
    os._exit(9)


def test_a_worker_that_is_killed_is_told_in_a_sentence() -> None:
    with joblib.parallel_config("loky", n_jobs=2), pytest.raises(QuarkError, match="a worker was killed at its work"):
        list(parallel.results([parallel.delayed(die, 1)] * 2, None))


def test_calls_are_read_as_they_are_needed() -> None:
    """Calls with samples in them are not read to the end before a backend that returns them together has the first."""
    read: list[int] = []

    def calls() -> object:
        for k in range(40):
            read.append(k)
            yield joblib.delayed(abs)(-k)

    with joblib.parallel_config("together"):
        stream = parallel.results(calls(), 2)
        assert next(stream) == 0 and len(read) == 2 * parallel.PORTION
        assert list(stream) == list(range(1, 40))


def test_joblib_has_one_home() -> None:
    """Parallel is called nowhere else, so that no flow promises what a backend lacks."""
    root = Path(parallel.__file__).parent
    users = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if "Parallel(" in path.read_text()}
    assert users == {"parallel.py"}


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_a_cluster_that_is_not_installed_is_named(
    name: str, package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=f"needs the package '{package}'"):
        parallel.choose_backend(name)
    words = ["onnx", "sensitivity", "model.onnx", "--random", "--backend"]
    assert main([*words, name]) == 1 and package in capsys.readouterr().err
    assert main([*words, "lokky"]) == 1 and "loky" in capsys.readouterr().err
