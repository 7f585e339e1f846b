"""Every case of the peer's operator library (603), through stock ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tests.operators.running import assert_same, run_operator

pytestmark = pytest.mark.golden
FILE = Path(__file__).parents[3] / "shared" / "golden" / "block.npz"
INPUTS = ("a", "b", "c", "d", "e", "f", "ties", "special", "edge")


@cache
def golden() -> tuple[dict[str, np.ndarray], list[dict]]:
    if not FILE.is_file():
        pytest.skip("no folder 'shared' beside the repository")
    with np.load(FILE) as data:
        arrays = {name: data[name] for name in data.files if name != "meta"}
        return arrays, json.loads(bytes(data["meta"]))["cases"]


def cases(name: str) -> Iterator[tuple[dict, np.ndarray, np.ndarray]]:
    arrays, described = golden()
    for case in described:
        if case["input"] == name:
            yield case, arrays[f"in.{name}"], arrays[case["output"]]


EMAX = {"fp8_e5m2": 15, "fp8_e4m3": 8, "fp6_e3m2": 4, "fp6_e2m3": 2, "fp4_e2m1": 2}


def right_rows(case: dict, x: np.ndarray) -> np.ndarray:
    """Rows where the peer is right: its scales for small floats fall below 2**-127, which E8M0 cannot hold."""
    emax = EMAX.get(case["attributes"].get("element_dtype", ""))
    if emax is None or case["input"] != "special":
        return np.ones(len(x), bool)
    amax = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=1)
    return (amax == 0) | (np.frexp(amax)[1] - 1 - emax >= -127)


def test_the_file_has_every_case() -> None:
    assert len(golden()[1]) == sum(len(list(cases(name))) for name in INPUTS) == 603


@pytest.mark.parametrize("name", INPUTS)
def test_static_shapes(name: str) -> None:
    for case, x, want in cases(name):
        rows = right_rows(case, x)
        assert rows.sum() >= len(x) - 3
        got = run_operator(case["op"], x, case["attributes"])
        assert_same(got[rows], want[rows])


@pytest.mark.parametrize("opset", [13, 17])
def test_older_opsets(opset: int) -> None:
    for name in ("ties", "c", "special"):
        for case, x, want in list(cases(name))[::3]:
            rows = right_rows(case, x)
            assert_same(run_operator(case["op"], x, case["attributes"], opset=opset)[rows], want[rows])


@pytest.mark.parametrize("name", ["b", "c", "edge"])
def test_dynamic_shapes(name: str) -> None:
    for case, x, want in list(cases(name))[::2]:
        assert_same(run_operator(case["op"], x, case["attributes"], dynamic=True), want)
