"""Models that find nothing: values decide how many elements there are, and sometimes there are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.graph.model import load
from quark.onnx.qdq import empty

#: What is computed from the values that were found, [K]: operator -> text.
ON_FOUND = {
    "Add": "y = Add (found, found)",
    "Add of a constant": "y = Add (found, two)",
    "Mul": "y = Mul (found, found)",
    "Mul of columns": "r = Unsqueeze (found, last) q = Concat <axis = 1> (r, r) p = Mul (q, r) y = Reshape (p, all)",
    "Softmax": "y = Softmax (found)",
    "Sigmoid": "y = Sigmoid (found)",
    "LeakyRelu": "y = LeakyRelu (found)",
    "Concat": "y = Concat <axis = 0> (found, found)",
    "MatMul": "r = Unsqueeze (found, last) q = MatMul (r, row) y = Reshape (q, all)",
}
RUN = """
import sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 2
for path in sys.argv[1:]:
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    for sign in (1, -1):
        print(*session.run(None, {"x": sign * numpy.ones((1, 3, 6, 6), numpy.float32)})[0].shape, flush=True)
"""


def finds(text: str) -> onnx.ModelProto:
    """Positive values of a map, and what is computed from them."""
    graph = f"""g (float[1, 3, 6, 6] x) => (float[K] y) {{
        c = Conv (x, w) high = Greater (c, zero) where = NonZero (high) rows = Transpose <perm = [1, 0]> (where)
        found = GatherND (c, rows) {text}
    }}"""
    weights = {
        "w": np.abs(models.normal(4, 3, 3, 3)),
        "zero": np.float32(0),
        "two": np.float32(2),
        "last": np.int64([1]),
        "all": np.int64([-1]),
        "row": models.normal(1, 4),
    }
    return models.model(graph, {name: value for name, value in weights.items() if name in graph}, 17)


@pytest.mark.parametrize("preset", ["XINT8", "A8W8", "A8W8_CPU"])
def test_a_quantized_model_that_finds_nothing_runs(preset: str, tmp_path: Path) -> None:
    """In a process of its own, with two threads: one that fails there ends it."""
    config = get_default_config(preset)
    config.extra_options |= {"FloatWhereFaster": False, "FloatDecoding": False}
    samples = [{"x": models.normal(1, 3, 6, 6, seed=seed)} for seed in range(3)]
    paths = [tmp_path / f"{number}.onnx" for number in range(len(ON_FOUND))]
    for path, text in zip(paths, ON_FOUND.values(), strict=True):
        onnx.save(finds(text), tmp_path / "m.onnx")
        ModelQuantizer(Config(global_quant_config=config)).run(tmp_path / "m.onnx", path, samples)
    run = subprocess.run([sys.executable, "-c", RUN, *paths], capture_output=True, text=True)
    found = [int(count) for count in run.stdout.split()]
    ended = list(ON_FOUND)[len(found) // 2 :]
    assert run.returncode == 0, f"{ended[:1]}: {run.returncode} {run.stderr[-300:]}"
    assert ended == [] and min(found[::2]) > 0 and set(found[1::2]) == {0}, found


@pytest.mark.parametrize("name", ON_FOUND)
def test_which_nodes_stay_float(name: str) -> None:
    expected = {name.split()[0]} & {"Add", "Mul", "Softmax"}
    assert {node.op_type for node in empty.may_be_empty(load(finds(ON_FOUND[name])))} == expected


def test_sizes_that_values_do_not_decide() -> None:
    """Found rows are written into a map: its size is known, and what follows is computed with codes."""
    graph = """g (float[1, 4] x) => (float[1, 4] y, float[1, 4] z) {
        high = Greater (x, zero) where = NonZero (high) rows = Transpose <perm = [1, 0]> (where)
        found = GatherND (x, rows) s = ScatterND (x, rows, found) y = Add (s, x) z = Mul (x, x)
    }"""
    assert not empty.may_be_empty(load(models.model(graph, {"zero": np.float32(0)}, 17)))
