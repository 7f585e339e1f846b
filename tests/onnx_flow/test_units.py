"""Changes of units at the edges of a model, expectations and places that are moved stay float, by structure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.judged import configuration, opened

from quark.onnx import ModelQuantizer
from quark.onnx.graph.model import load
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.qdq.expectations import takes_expectations
from quark.onnx.qdq.index_paths import computes_shapes
from quark.onnx.qdq.units import changes_units

PRESETS = ("A8W8", "A8W8_CPU", "XINT8", "A16W8", "MX9", "BF16")
MEAN, WIDE = np.array([1e5, 280, 3e-3, 0], np.float32), np.array([1e3, 15, 3e-3, 6], np.float32)
COLUMN = {"mean": MEAN.reshape(4, 1, 1), "wide": WIDE.reshape(4, 1, 1)}
LAYERS = {"w": models.normal(8, 4, 3, 3, scale=0.2), "v": models.normal(4, 8, 3, 3, scale=0.2)}
CONVS = "c = Conv<pads = [1,1,1,1]>(z, w) r = Relu(c) h = Conv<pads = [1,1,1,1]>(r, v)"


def weather(seed: int) -> dict[str, np.ndarray]:
    """Pressure, temperature, humidity and wind, each in its unit."""
    return {"x": models.normal(1, 4, 8, 8, seed=seed) * COLUMN["wide"] + COLUMN["mean"]}


def series(seed: int) -> dict[str, np.ndarray]:
    return {"x": models.normal(1, 24, 4, seed=seed) * WIDE + MEAN}


def rows(seed: int) -> dict[str, np.ndarray]:
    """Each row of a size of its own, the last one the smallest."""
    return {"x": models.normal(1, 24, 4, seed=seed) * np.exp(5 - 0.4 * np.arange(24, dtype=np.float32))[:, None]}


def diffusion(seed: int) -> dict[str, np.ndarray]:
    sigma = np.float32(np.exp(np.random.default_rng(seed).uniform(-5, 4)))
    return {"x": models.normal(1, 4, 8, 8, seed=seed) * np.sqrt(sigma**2 + 1), "sigma": np.full((1, 1, 1, 1), sigma)}


def energies(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.exp(models.normal(1, 4, 8, 8, seed=seed, scale=3))}


GRAPHS: dict[str, tuple[str, dict[str, np.ndarray], Callable[[int], dict[str, np.ndarray]], float]] = {
    "channels": (
        f"""g (float[1,4,8,8] x) => (float[1,4,8,8] y) {{
            d = Sub(x, mean) z = Div(d, wide) {CONVS} u = Mul(h, wide) y = Add(u, mean) }}""",
        COLUMN | LAYERS,
        weather,
        10,
    ),
    "samples": (
        """g (float[1,24,4] x) => (float[1,6,4] y) {
            m = ReduceMean<axes = [1]>(x) d = Sub(x, m) q = Mul(d, d) s = ReduceMean<axes = [1]>(q)
            e = Add(s, eps) n = Sqrt(e) z = Div(d, n) t = Transpose<perm = [0,2,1]>(z) a = MatMul(t, w) r = Relu(a)
            b = MatMul(r, v) h = Transpose<perm = [0,2,1]>(b) u = Mul(h, n) y = Add(u, m) }""",
        {"eps": np.array(1e-5, np.float32), "w": models.normal(24, 16, scale=0.2), "v": models.normal(16, 6)},
        series,
        10,
    ),
    "rows": (
        """g (float[1,24,4] x) => (float[1,24,4] y) {
            z = LayerNormalization(x, g) h = MatMul(z, w) r = Relu(h) y = MatMul(r, v) }""",
        {"g": np.ones(4, np.float32), "w": models.normal(4, 32, scale=0.3), "v": models.normal(32, 4)},
        rows,
        15,
    ),
    "places": (
        f"""g (float[1,4,8,8] x) => (float[1,4,8,8] y) {{
            a = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1]>(x) e = Add(a, eps) z = Div(x, e) {CONVS}
            y = Tanh(h) }}""",
        {"eps": np.array(1e-6, np.float32)} | LAYERS,
        energies,
        15,
    ),
    "head": (
        f"""g (float[1,4,8,8] x) => (float[1,4,8,8] y) {{ z = Identity(x) {CONVS.replace(", v)", ", heads, biases)")}
            y = Identity(h) }}""",
        {"w": LAYERS["w"], "heads": LAYERS["v"] * WIDE.reshape(4, 1, 1, 1), "biases": MEAN},
        lambda seed: {"x": models.normal(1, 4, 8, 8, seed=seed)},
        10,
    ),
    "foot": (
        """g (float[1,24,4] x) => (float[1,24,4] y) {
            h = MatMul(x, w) a = Add(h, b) r = Relu(a) y = MatMul(r, v) }""",
        {
            "w": models.normal(4, 32, scale=0.3) / WIDE[:, None],
            "b": -(MEAN / WIDE) @ models.normal(4, 32, scale=0.3),
            "v": models.normal(32, 4),
        },
        series,
        10,
    ),
    "noise": (
        f"""g (float[1,4,8,8] x, float[1,1,1,1] sigma) => (float[1,4,8,8] y) {{
            q = Mul(sigma, sigma) e = Add(q, one) n = Sqrt(e) i = Reciprocal(n) z = Mul(x, i) {CONVS}
            s = Div(one, e) k = Mul(x, s) o = Div(sigma, n) f = Mul(h, o) y = Add(k, f) }}""",
        {"one": np.array(1, np.float32)} | LAYERS,
        diffusion,
        30,
    ),
}


def inferred(proto: onnx.ModelProto) -> ir.Model:
    model = load(proto)
    infer_shapes(model)
    return model


def worst_channel(wanted: list[np.ndarray], found: list[np.ndarray], axis: int) -> float:
    """The least SQNR of a channel about its mean, in dB."""
    a, b = (np.moveaxis(np.stack(one), axis, 0).reshape(one[0].shape[axis - 1], -1) for one in (wanted, found))
    signal, noise = ((a - a.mean(1, keepdims=True)) ** 2).sum(1), ((a - b) ** 2).sum(1)
    return float(10 * np.log10(signal / np.maximum(noise, 1e-30)).min())


def answers(proto: onnx.ModelProto, preset: str, samples: list[dict[str, np.ndarray]]) -> list[list[np.ndarray]]:
    made = ModelQuantizer(configuration(preset)).quantize_model(proto, None, samples)
    assert made is not None
    return [[session.run(None, one)[0] for one in samples] for session in map(opened, (proto, made))]


@pytest.mark.parametrize("name", GRAPHS)
def test_no_channel_and_no_sample_is_lost(name: str) -> None:
    """Humidity became a constant, at 49 dB over all; a series of small numbers the mean of a large one's step."""
    text, weights, sample, least = GRAPHS[name]
    proto, samples = models.model(text, weights), [sample(seed) for seed in range(6)]
    for preset in PRESETS:
        wanted, found = answers(proto, preset, samples)
        assert worst_channel(wanted, found, 3 if name in ("samples", "foot") else 2) > least, preset


def test_rows_of_a_table_are_no_mask() -> None:
    """A mean of 1.6e9 among small ones kept the layer behind it float."""
    mean, wide = np.array([50, 1e5, 0.5, 1.6e9], np.float32), np.array([10, 1e4, 0.1, 1e6], np.float32)
    text = "g (float[4,4] x) => (float y) { d = Sub(x, mean) z = Div(d, wide) h = MatMul(z, w) y = Relu(h) }"
    proto = models.model(text, {"mean": mean, "wide": wide, "w": models.normal(4, 16)})
    samples = [{"x": models.normal(4, 4, seed=seed) * wide + mean} for seed in range(4)]
    plan = ModelQuantizer(configuration("A8W8")).run(proto, None, samples).plan
    assert "w" in plan.tensors and "x" not in plan.tensors


MEASURED = "m = ReduceMean<axes = [1]>(x)"


@pytest.mark.parametrize(
    "made",
    [
        f"{MEASURED} z = Sub(x, m)",
        f"{MEASURED} z = Div(x, m)",
        f"{MEASURED} n = Neg(m) z = Add(x, n)",
        f"{MEASURED} i = Reciprocal(m) z = Mul(x, i)",
        f"{MEASURED} i = Div(one, m) z = Mul(x, i)",
        f"{MEASURED} i = Pow(m, less) z = Mul(x, i)",
        f"{MEASURED} l = Relu(m) i = Pow(m, l) z = Mul(x, i)",  # an exponent that is not known
        f"{MEASURED} l = Log(m) n = Neg(l) i = Exp(n) z = Mul(x, i)",  # trained exponents: PCEN
        "m = Relu(x) z = LayerNormalization(m, g)",  # small rows were nothing: 0 dB
        "m = Relu(x) z = MeanVarianceNormalization<axes = [1]>(m)",
        "m = Relu(x) z = LpNormalization(m)",
    ],
)
def test_forms_of_a_normalization(made: str) -> None:
    numbers = {"w": models.normal(3, 3), "one": np.array(1, np.float32), "less": np.array(-0.5, np.float32)}
    numbers["g"] = np.ones(3, np.float32)
    read = {name: array for name, array in numbers.items() if f"{name})" in made or f"({name}" in made or name == "w"}
    text = f"g (float[8,3] x) => (float y) {{ {made} y = MatMul(z, w) }}"
    found = changes_units(inferred(models.model(text, read, 17)))
    assert {"m", "z"} <= {str(node.outputs[0].name) for node in found}


@pytest.mark.parametrize(
    "body",
    [
        "d = Sub(x, mean) z = Div(d, std) h = MatMul(z, w) y = Relu(h)",  # a picture
        "z = Mul(x, g) h = MatMul(z, w) y = Relu(h)",  # a gate, no figure of a sample
        "h = MatMul(x, w) u = Mul(h, std) y = Add(u, mean)",  # a picture again
        "a = ReduceMean<axes = [1]>(x) z = Mul(x, a) h = MatMul(z, w) y = Relu(h)",  # a gate of its own
        "a = ReduceMean<axes = [1]>(x) z = Add(x, a) h = MatMul(z, w) y = Relu(h)",  # nothing is taken off
        "a = ReduceMean<axes = [1]>(x) k = Div(a, two) z = Mul(x, k) h = MatMul(z, w) y = Relu(h)",  # nor divided by
        "a = ReduceMean<axes = [1]>(x) y = Sub(x, a)",  # no layer
        "y = LpNormalization(x)",  # the same
        "h = MatMul(x, w) a = ReduceMean<axes = [1]>(h) y = Sub(h, a)",  # of features
        "r = Relu(x) d = Sub(r, far) z = Div(d, units) h = MatMul(z, w) y = Relu(h)",  # of features, too
        "h = MatMul(x, w) u = Mul(h, units) r = Relu(u) y = MatMul(r, w)",  # no output
        "h = MatMul(x, narrow) r = Relu(h) y = MatMul(r, narrow)",  # no channel that would be lost
        "e = Gather(w, i) z = LpNormalization(e) y = MatMul(z, w)",  # embeddings
        "e = Gather(w, i) q = Mul(e, e) m = ReduceMean<axes = [1]>(q) z = Mul(e, m) y = MatMul(z, w)",  # embeddings
    ],
)
def test_what_changes_no_units(body: str) -> None:
    numbers = {"mean": np.array([0.485, 0.456, 0.406], np.float32), "std": np.array([0.229, 0.224, 0.225], np.float32)}
    numbers |= {"w": models.normal(3, 3), "units": np.array([1e-3, 1, 1e3], np.float32)}
    numbers["narrow"] = np.diag([1, 0.01, 0]).astype(np.float32)
    numbers |= {"far": np.array([1e5, 1, 1], np.float32), "two": np.array(2, np.float32)}
    read = {name: array for name, array in numbers.items() if f"{name})" in body or f"({name}" in body}
    model = inferred(models.model(f"g (float[8,3] x, float[8,3] g, int64[8] i) => (float y) {{ {body} }}", read))
    assert changes_units(model) == set()


BINS = {"bins": np.arange(64, dtype=np.float32), "column": np.arange(64, dtype=np.float32).reshape(64, 1)}
EXPECTED = {
    "weighed": "p = Softmax<axis = -1>(s) e = Mul(p, bins) y = ReduceSum(e, last)",
    "moved": "q = Softmax<axis = -1>(s) p = Reshape(q, same) e = Mul(bins, p) y = ReduceSum(e, last)",
    "multiplied": "p = Softmax<axis = -1>(s) y = MatMul(p, column)",
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_expectations_keep_their_bins(kind: str) -> None:
    """64 bins that are hardly told apart had two or three codes each: 5 dB."""
    body, numbers = EXPECTED[kind], {"w": models.normal(16, 64, scale=0.1), "last": np.array([-1])}
    numbers |= BINS | {"same": np.array([4, 64])}
    read = {name: array for name, array in numbers.items() if f"{name})" in body or f"({name}" in body or name == "w"}
    proto = models.model(f"g (float[4,16] x) => (float y) {{ s = MatMul(x, w) {body} }}", read, 17)
    samples = [{"x": models.normal(4, 16, seed=seed)} for seed in range(4)]
    for preset in ("A8W8", "XINT8"):
        wanted, found = (np.stack(one) - 31.5 for one in answers(proto, preset, samples))  # about the middle
        assert 10 * np.log10((wanted**2).sum() / ((wanted - found) ** 2).sum()) > 25, preset


@pytest.mark.parametrize(
    "body", ["e = Mul(p, x) y = ReduceSum(e)", "y = MatMul(p, few)", "e = Mul(p, two) y = ReduceSum(e)", "y = Relu(p)"]
)
def test_what_is_no_expectation(body: str) -> None:
    numbers = {"few": models.normal(8, 3), "two": np.full(8, 2, np.float32)}
    read = {name: array for name, array in numbers.items() if f"{name})" in body}
    model = inferred(models.model(f"g (float[8,8] x) => (float y) {{ p = Softmax<axis = -1>(x) {body} }}", read))
    assert takes_expectations(model) == set()


def test_places_that_are_moved_and_cameras() -> None:
    """A product of coordinates ended the walk: points were projected with a focal length in steps of 4."""
    text = """g (float[1,4,8,8] x, float[1,8,3] points, float[1,3,3] camera, float[1,1,8,2] grid)
        => (float[1,4,1,8] y, float[1,1,8,2] moved) {
        p = MatMul(points, camera) uv = Slice(p, zero, two, last) depth = Slice(p, two, three, last)
        at = Div(uv, depth) g = Unsqueeze(at, one) y = GridSample(x, g)
        f = Flatten(x) d = MatMul(f, w) step = Reshape(d, like) g1 = Add(grid, step) s = GridSample(x, g1)
        f2 = Flatten(s) d2 = MatMul(f2, v) step2 = Reshape(d2, like) g2 = Add(g1, step2) moved = Sub(g2, grid) }"""
    numbers = {name: np.array([number]) for number, name in enumerate(["zero", "one", "two", "three"])}
    numbers |= {
        "last": np.array([2]),
        "like": np.array([1, 1, 8, 2]),
        "w": models.normal(256, 16),
        "v": models.normal(32, 16),
    }
    model = inferred(models.model(text, numbers, 17))
    places = {node.outputs[0].name for node in computes_shapes(model)}
    assert {"p", "uv", "at", "g1", "g2", "moved"} <= places and not {"d", "d2", "f"} & places


@pytest.mark.parametrize("last", ["float[1, 4, 8, 6] y", "float[1, 4, 6, 6] y"])
def test_constants_along_different_axes_are_no_one_change(last: str) -> None:
    """Numbers per channel, then per column, of as many and of another number: only what stands at the edge counts."""
    columns = int(last.split(",")[-2])
    column = np.array([1, 1, 1, 1, 1, 1000], np.float32)
    row = np.array([1, 1, 1, 100], np.float32).reshape(4, 1, 1)
    text = f"""g (float[1, 4, {columns}, 6] x) => ({last}) {{
        a = Mul(x, row) b = Mul(a, column) c = Conv(b, w) d = Mul(c, column) y = Mul(d, row) }}"""
    model = load(models.model(text, {"row": row, "column": column, "w": models.normal(4, 4, 1, 1)}))
    infer_shapes(model)
    assert {str(node.outputs[0].name) for node in changes_units(model)} == {"a", "y"}
