"""A GELU that is written out by a cube and Tanh keeps small numbers, whatever the largest one is."""

from __future__ import annotations

import numpy as np
import pytest
from tests.onnx_flow import models

from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.graph.model import load
from quark.onnx.qdq.powers import saturating_powers

HALVED = "u = Mul (s, root) t = Tanh (u) o = Add (t, one) g = Mul (h, o) e = Mul (g, half)"
CHAIN = "q0 = Mul (q, cubic) " + " ".join(f"q{k + 1} = Add (q{k}, one)" for k in range(10))
#: The graph from h to e, and the tensors of the nodes that stay float.
FORMS = {
    "a power": (f"c = Pow (h, three) k = Mul (c, cubic) s = Add (h, k) {HALVED}", "c k s u t"),
    "products": (f"q = Mul (h, h) c = Mul (q, h) k = Mul (cubic, c) s = Add (k, h) {HALVED}", "q c k s u t"),
    "factors": (f"q = Mul (h, h) k = Mul (q, cubic) p = Add (k, one) s = Mul (h, p) {HALVED}", "q k p s u t"),
    "a square": ("q = Mul (h, h) u = Mul (q, cubic) e = Sigmoid (u)", "q u e"),
    "no power": ("u = Mul (h, root) e = Tanh (u)", ""),
    "two layers": ("b = MatMul (x, v) u = Mul (h, b) e = Sigmoid (u)", ""),
    "a long way": ("q = Mul (h, h) " + CHAIN + " e = Tanh (q10)", ""),
    "no polynomial": ("q = Mul (h, h) r = Sqrt (q) u = Mul (r, h) e = Tanh (u)", ""),
}


def model_of(form: str):  # type: ignore[no-untyped-def]
    numbers = {"three": 3, "cubic": 0.044715, "root": (2 / np.pi) ** 0.5, "one": 1, "half": 0.5}
    weights = {"w": models.normal(16, 32, scale=2.5), "v": models.normal(16, 32), "z": models.normal(32, 8)}
    text = f"g (float[4, 16] x) => (float[4, 8] y) {{ h = MatMul (x, w) {FORMS[form][0]} y = MatMul (e, z) }}"
    return models.model(text, weights | {name: np.float32(value) for name, value in numbers.items()}, 17)


@pytest.mark.parametrize("form", FORMS)
def test_what_lies_between(form: str) -> None:
    found = {str(node.outputs[0].name) for node in saturating_powers(load(model_of(form)))}
    assert found == set(FORMS[form][1].split())


@pytest.mark.parametrize("preset", ["A8W8", "XINT8"])
@pytest.mark.parametrize("form", ["a power", "products", "factors"])
def test_small_numbers_stay(form: str, preset: str) -> None:
    """Of h up to 30, all below 6 had the Tanh of 0; of rows that are small, nothing else."""
    proto, random = model_of(form), np.random.default_rng(5)
    rows = np.array([[1], [0.1], [0.1], [0.1]], np.float32)  # one token is ten times as large as the others
    samples = [{"x": (random.normal(size=(4, 16)) * rows).astype(np.float32)} for _ in range(8)]
    config = QConfig.get_default_config(preset)
    config.global_quant_config.extra_options.update(PrintSummary=False)
    made = ModelQuantizer(config).quantize_model(proto, None, samples)
    [x], [y] = models.run(proto, samples[0]), models.run(made, samples[0])
    small, error = x[1:], (x - y)[1:]
    assert 10 * np.log10(np.square(small).sum() / np.square(error).sum()) > 10
