"""The solver against brute force, and what it refuses."""

from __future__ import annotations

import ctypes
import itertools
import os
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quark.errors import ConfigError
from quark.search import knapsack
from quark.search.knapsack import choose

COSTS = st.integers(0, 40).map(float)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    layers, options = draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def table(values: st.SearchStrategy) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=layers * options, max_size=layers * options))).reshape(
            layers, options
        )

    load = table(st.one_of(COSTS, COSTS, COSTS, st.just(float("inf"))))
    load[:, 0] = np.where(np.isfinite(load[:, 0]), load[:, 0], 3.0)
    return table(COSTS), load, table(COSTS), draw(st.integers(0, 120)) / 1.0


def brute(objective: np.ndarray, load: np.ndarray, tie: np.ndarray, limit: float) -> tuple[float, float] | None:
    """The least (objective, tie) of all choices that keep the limit."""
    rows = range(len(objective))
    sums = [
        (sum(objective[i, j] for i, j in zip(rows, choice, strict=True)), sum(tie[i, j] for i, j in enumerate(choice)))
        for choice in itertools.product(range(objective.shape[1]), repeat=len(objective))
        if sum(load[i, j] for i, j in enumerate(choice)) <= limit
    ]
    return min(sums) if sums else None


@st.composite
def counts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Two options, one of which costs as much less in every layer: what is solved by sorting."""
    layers, gap = draw(st.integers(1, 6)), draw(st.sampled_from([0.0, 1.0, 3.0]))
    load = np.array([draw(st.tuples(COSTS, st.one_of(COSTS, st.just(float("inf"))))) for _ in range(layers)])
    first = np.array([draw(st.sampled_from([(0.0, gap), (gap, 0.0)])) for _ in range(layers)])
    return first, load, load, draw(st.integers(0, 120)) / 1.0


@pytest.mark.parametrize("drawn", [problems(), counts()], ids=["any", "counts"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_as_good_as_trying_everything(drawn: st.SearchStrategy, data: st.DataObject) -> None:
    objective, load, tie, limit = data.draw(drawn)
    found = choose(objective, load, limit, tie)
    best = brute(objective, load, tie, limit)
    if best is None:
        assert found is None
        return
    assert found is not None
    rows = np.arange(len(found))
    assert load[rows, found].sum() <= limit + 1e-6
    assert (objective[rows, found].sum(), tie[rows, found].sum()) == pytest.approx(best)


def test_small_losses_beside_large_sizes() -> None:
    loss = np.array([[1e-9, 0.0], [3e-9, 0.0], [2e-9, 0.0]])
    size = np.array([[1e9, 4e9], [1e9, 4e9], [1e9, 4e9]])
    found = choose(size, loss, 3.5e-9)
    assert found is not None and loss[np.arange(3), found].sum() <= 3.5e-9
    assert size[np.arange(3), found].sum() == 6e9


def test_a_layer_without_options_is_an_error() -> None:
    with pytest.raises(ConfigError, match="layer 1 has no option"):
        choose(np.array([[1.0], [np.inf]]), np.ones((2, 1)), 9.0)


def test_without_scipy_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ConfigError, match="pip install scipy"):
        choose(np.ones((1, 1)), np.ones((1, 1)), 9.0)


def test_what_the_solver_prints_on_its_own_does_not_reach_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    with knapsack._silent():
        ctypes.CDLL("ucrtbase" if os.name == "nt" else None).puts(b"a line of the solver")
    os.write(1, b"{}")
    assert capfd.readouterr().out == "{}"
