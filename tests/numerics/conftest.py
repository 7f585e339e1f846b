"""Where the reference vectors are: the committed subset, and the full set where it is at hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

COMMITTED = Path(__file__).parents[1] / "golden"


@pytest.fixture(params=["subset", pytest.param("full", marks=pytest.mark.golden)], scope="session")
def golden(request: pytest.FixtureRequest) -> Path:
    """The folder of reference vectors."""
    folder: Path = COMMITTED
    if request.param == "full":
        folder = request.getfixturevalue("shared") / "golden"
    return folder


@pytest.fixture(scope="session")
def vectors(golden: Path) -> Callable[[str], tuple[dict[str, np.ndarray], dict[str, Any]]]:
    """``vectors(file name)`` -> its arrays and its ``meta``."""

    def read(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        with np.load(golden / name) as file:
            arrays = {key: file[key] for key in file.files}
        return arrays, json.loads(bytes(arrays.pop("meta")))

    return read


@pytest.fixture(params=["shared memory", "torch's functions"], scope="module")
def torch_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways that a tensor is worked on: by NumPy where it is, and as on a GPU by torch (here in small chunks)."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "shared memory":
            patch.setattr("quark.numerics.array.shares_memory", lambda x: False)
        yield
