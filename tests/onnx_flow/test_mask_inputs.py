"""Inputs that mask the scores of a Softmax: they may be infinite, and take the range of nothing."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.judged import configuration, opened, sqnr

from quark.errors import DataError
from quark.onnx import ModelQuantizer
from quark.onnx.graph.model import load
from quark.onnx.qdq.masks import added_masks, mask_inputs

SCORES = "kt = Transpose<perm = [0,2,1]>(k) s = MatMul(q, kt)"
WEIGHED = "p = Softmax<axis = -1>(m) a = MatMul(p, v)"
ATTENTION = {
    "added": f"{SCORES} m0 = Squeeze(mask, one) m = Add(s, m0) {WEIGHED}",
    "biased": f"{SCORES} m0 = Squeeze(mask, one) m1 = Add(m0, bias) m2 = Add(m1, s) m = Max(m2, low) {WEIGHED}",
    "scaled": f"{SCORES} m0 = Squeeze(mask, one) m1 = Mul(m0, two) m = Add(s, m1) {WEIGHED}",
    "inside": "a = Attention<q_num_heads = 4, kv_num_heads = 4>(q, k, v, mask)",
    "inside, of ONNX Runtime": "a = com.microsoft.MultiHeadAttention<num_heads = 4>(q, k, v, , , mask)",
}
NUMBERS = {"one": np.array([1]), "two": np.array(2, np.float32), "low": np.array(-3e38, np.float32)}
NUMBERS |= {name: models.normal(32, 32, seed=seed) / 6 for seed, name in enumerate(("wq", "wk", "wv", "wo"))}
NUMBERS["bias"] = models.normal(16, 16, seed=9)


def attention(kind: str) -> onnx.ModelProto:
    text = f"""g (float[1,16,32] x, float[1,1,16,16] mask) => (float y) {{
        q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) {ATTENTION[kind]} y = MatMul(a, wo) }}"""
    read = {name: array for name, array in NUMBERS.items() if f"{name})" in text or f"({name}" in text}
    made = models.model(text, read, 23 if kind == "inside" else 17)
    made.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return made


def feeds(hidden: float) -> list[dict[str, np.ndarray]]:
    generator, mask = np.random.default_rng(0), np.triu(np.full((1, 1, 16, 16), hidden, np.float32), 1)
    return [{"x": generator.standard_normal((1, 16, 32)).astype(np.float32), "mask": mask} for _ in range(3)]


@pytest.mark.parametrize("hidden", [-1e4, -np.inf])
@pytest.mark.parametrize("kind", ATTENTION)
def test_a_mask_of_the_sample_takes_no_range(kind: str, hidden: float) -> None:
    """Added masks cost 25 dB and more, and infinite ones were refused, or NaN under MX9."""
    proto, samples = attention(kind), feeds(hidden)
    wanted = [opened(proto).run(None, sample)[0] for sample in samples]
    for preset in ("A8W8", "XINT8", "MX9"):
        made = ModelQuantizer(configuration(preset)).quantize_model(proto, None, samples)
        assert made is not None
        session = opened(made)
        near = [sqnr(x, session.run(None, sample)[0]) for x, sample in zip(wanted, samples, strict=True)]
        assert min(near) > 20, preset


def test_what_no_mask_can_be_is_refused_as_before() -> None:
    samples = feeds(-np.inf)
    samples[1]["mask"][0, 0, 0, 0] = np.nan
    with pytest.raises(DataError, match="input 'mask': 1 NaN and 120 infinite"):
        ModelQuantizer(configuration("A8W8")).quantize_model(attention("added"), None, samples)


@pytest.mark.parametrize(
    "body",
    [
        "s = MatMul(x, w) m = Add(s, x) y = Softmax(m)",  # the layer reads it, too
        "t = Transpose<perm = [1, 0]>(x) s = MatMul(t, w) m = Add(s, x) y = Softmax(m)",  # moved before
        "u = Relu(x) m = Add(u, z) y = Softmax(m)",  # nothing is computed by a layer
        "s = MatMul(z, w) m = Add(s, x) y = Relu(m)",  # no Softmax
        "s = MatMul(z, w) m = Add(s, x) y = Softmax(m) r = Relu(m)",  # something else reads the sum
    ],
)
def test_what_else_is_added_is_no_mask(body: str) -> None:
    more = ", float r" if " r = " in body else ""
    model = load(
        models.model(f"g (float[8,8] x, float[8,8] z) => (float y{more}) {{ {body} }}", {"w": models.normal(8, 8)})
    )
    assert mask_inputs(model) == set() and added_masks(model) == set()


@pytest.mark.parametrize(
    "bound",
    [
        "n1 = Unsqueeze(n, one) c = Less(places, n1)",
        "n1 = Mul(n, two) n2 = Unsqueeze(n1, one) c = GreaterOrEqual(places, n2)",
        "r = Range(zero, twenty, step) n1 = Unsqueeze(n, one) c = Greater(n1, r)",
    ],
)
def test_lengths_are_not_rounded(bound: str) -> None:
    """A length of 17 that becomes 16.97 leaves a value out."""
    text = f"""g (float[2,20,8] x, float[2] n) => (float[2,20] m, float y) {{ {bound}
        m = Cast<to = 1>(c) m1 = Unsqueeze(m, two_axes) h = MatMul(x, w) y = Mul(h, m1) }}"""
    numbers = {
        "one": np.array([1]),
        "two": np.array(0.5, np.float32),
        "two_axes": np.array([2]),
        "w": models.normal(8, 8),
    }
    numbers |= {"places": np.arange(20, dtype=np.float32), "zero": np.array(0, np.float32)}
    numbers |= {"twenty": np.array(20, np.float32), "step": np.array(1, np.float32)}
    read = {name: array for name, array in numbers.items() if f"{name})" in text or f"{name}," in text}
    proto, generator = models.model(text, read, 17), np.random.default_rng(0)
    samples = [
        {"x": generator.standard_normal((2, 20, 8)).astype(np.float32), "n": np.array([20, count], np.float32)}
        for count in range(3, 20)
    ]
    for preset in ("A8W8", "A16W8", "XINT8"):
        made = ModelQuantizer(configuration(preset)).quantize_model(proto, None, samples)
        assert made is not None
        for sample in samples:
            wanted, found = (opened(one).run(["m"], sample)[0] for one in (proto, made))
            np.testing.assert_array_equal(wanted, found)
