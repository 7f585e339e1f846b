"""The budgets that ``docs/reliability.md`` promises are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quark import reading
from quark.files import ours, untrusted
from quark.numerics import array_files
from quark.observers import registry
from quark.onnx import image_files
from quark.onnx.graph import budget
from quark.onnx.qdq import masks

model_files = pytest.importorskip("quark.torch.export.model_files")

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
#: How each row of the table begins -> the constants, in its order.
CODE = {
    "nodes of a model": [budget.NODES],
    "subgraphs in subgraphs": [budget.DEPTH],
    "a tensor made of constants": [budget.CONSTANT_BYTES],
    "any tensor of a fixed size": [budget.TENSOR_BYTES],
    "rounds of a Loop": [budget.ROUNDS],
    "one run of a model with a Loop": [budget.LOOP_SECONDS],
    "one array of a `.npz`": [array_files.WHOLE],
    "header of a `.npy`": [array_files.LONGEST_HEADER, array_files.MOST_AXES],
    "a text or JSON file": [reading.LARGEST_TEXT],
    "a file beside the tensors": [model_files.COPIED],
    "a configuration, recipe or plan": [untrusted.CONFIG_BYTES],
    "a file that an interrupted job": [untrusted.STATE_BYTES],
    "the decisions in a model's metadata": [untrusted.WORDS],
    "what is read of a file": [ours.LOOKED_AT, ours.FIELDS],
    "scales of a tensor": [registry.MOST_ROWS],
    "values of a constant": [masks._SIZE_LIMIT],
    "pixels of an image": [image_files.PIXELS],
}


def told(cell: str) -> list[float]:
    """The numbers of a cell: "64 KiB, and 32 axes" are 65,536 and 32."""
    found = re.findall(r"2\^(\d+)|\b(\d[\d,]*)\b(?: ([KMGT]iB)\b)?", cell.partition("(")[0].partition(" such as")[0])
    return [2 ** int(power) if power else int(number.replace(",", "")) * UNITS.get(unit, 1)
            for power, number, unit in found]  # fmt: skip


@pytest.mark.parametrize("begin", CODE)
def test_the_budgets_of_the_page(begin: str) -> None:
    rows = [line.split("|")[1:3] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    ((_, cell),) = [row for row in rows if row[0].strip().startswith(begin)]
    assert told(cell) == CODE[begin]
