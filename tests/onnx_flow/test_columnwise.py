"""GPTAQ and Qronos in a graph: the weights of the torch flow, from inputs of the float and the quantized model."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.algorithms.gptaq import excess
from quark.algorithms.gptq import loss
from quark.errors import ConfigError, DataError
from quark.onnx import (
    AlgoConfig,
    GPTAQConfig,
    GPTQConfig,
    Int4Spec,
    Int8Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QronosConfig,
    QuantGranularity,
)
from quark.onnx.algorithms import nbits
from quark.onnx.algorithms.gptq import grid_of, lost, on_grid
from quark.onnx.algorithms.moments import Moments, in_halves, summed
from quark.onnx.quantization.config.tuners import algorithm

WIDE, PAIRED, KINDS = 32, (GPTAQConfig, QronosConfig), (GPTQConfig, GPTAQConfig, QronosConfig)
INT4 = Int4Spec(quant_granularity=QuantGranularity.Channel)
LAYER = QLayerConfig(Int8Spec(), weight=INT4)
WEIGHTS = {"v": models.normal(WIDE, WIDE) * 0.3, "w": models.normal(WIDE, 24, seed=1)}
NET = models.model(
    f"net (float[N, {WIDE}] x) => (float[N, 24] y) {{ h = MatMul (x, v) r = Tanh (h) y = MatMul (r, w) }}", WEIGHTS
)
SAMPLES = [
    {"x": models.normal(60, 8, seed=k) @ models.normal(8, WIDE) + 0.2 * models.normal(60, WIDE, seed=k)}
    for k in range(6)
]


def quantized(*algorithms: AlgoConfig, net: onnx.ModelProto = NET, samples: Any = SAMPLES, **options: Any) -> Any:
    extra = {"WeightsOnly": True, "PrintSummary": False, **options}
    return ModelQuantizer(QConfig(LAYER, algo_config=list(algorithms), extra_options=extra)).run(net, None, samples)


def dequantized(proto: onnx.ModelProto) -> list[np.ndarray]:
    """What the two MatMul multiply, in the order of the graph."""
    proto = onnx.ModelProto.FromString(proto.SerializeToString())
    del proto.graph.output[:]
    for node in proto.graph.node:
        if node.op_type == "MatMul":
            proto.graph.output.add(name=node.input[1])
    return models.session(proto).run(None, SAMPLES[0])


@pytest.mark.parametrize("kind", PAIRED)
def test_a_layer_gets_the_weights_of_the_torch_flow(kind: type[AlgoConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from quark.torch.algorithms import gptq as torch_flow
    from quark.torch.algorithms.inputs import Sums
    from quark.torch.quantization.config import config

    result = quantized(kind(keep_worse=True))
    first, second = dequantized(result.proto)
    sums = Sums(torch.zeros(WIDE, WIDE))
    for feed in SAMPLES:
        x = feed["x"].astype(np.float64)
        reached, wanted = (np.tanh(x @ weight).astype(np.float32) for weight in (first, WEIGHTS["v"]))
        sums.add(torch.from_numpy(reached), torch.from_numpy(wanted))
    made: list[Any] = []
    monkeypatch.setattr(torch_flow, "tune", lambda _, rounder, *rest, **named: made.append(rounder(sums)))
    torch_flow.run_columns(None, getattr(config, kind.__name__)())  # type: ignore[arg-type]
    grid = grid_of(result.plan.tensors["w"], WEIGHTS["w"]).transposed
    expected = made[0](SimpleNamespace(weight=torch.from_numpy(WEIGHTS["w"].T.copy()), grid=grid.map(torch.tensor)))
    np.testing.assert_allclose(second.T, expected.numpy(), atol=1e-6)
    assert np.abs(second.T - np.asarray(grid.round(WEIGHTS["w"].T))).max() > 0.01


@pytest.mark.parametrize("kind", PAIRED)
def test_settings_have_the_names_and_defaults_of_the_torch_flow(kind: type[AlgoConfig]) -> None:
    pytest.importorskip("torch")
    from quark.torch.quantization.config import config

    theirs, ours = getattr(config, kind.__name__)(), kind()
    paths = {"inside_layer_modules", "model_decoder_layers"}  # of modules, which a graph has not
    shared = {one.name for one in fields(theirs)} - paths
    assert {one.name for one in fields(kind)} | {"name"} == shared | {"keep_worse", "layers"}
    shared -= {"layers"}  # none: an empty tuple here, a list there
    assert {name: getattr(ours, name) for name in shared} == {name: getattr(theirs, name) for name in shared}


def distance(proto: onnx.ModelProto) -> float:
    one, other = models.session(proto), models.session(NET)
    return float(np.mean([np.square(one.run(None, feed)[0] - other.run(None, feed)[0]).mean() for feed in SAMPLES]))


NBITS = {"UseMatMulNBits": True, "WeightsOnly": False}
GROUPS = {"Bits": 4, "GroupSize": 16, "Symmetric": False}


@pytest.mark.parametrize("options", [{}, {**NBITS, "MatMulNBitsParams": {"Algorithm": "GPTQ", **GROUPS}}])
def test_the_float_inputs_are_used(options: dict[str, Any]) -> None:
    plain, gptaq, qronos = (distance(quantized(kind(), **options).proto) for kind in KINDS)
    assert gptaq != plain and qronos < 0.9 * plain


@pytest.mark.parametrize("kind", PAIRED)
def test_few_bits_too_are_judged_by_the_float_inputs(kind: type[AlgoConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[np.ndarray, Moments]] = []

    def spied(weight: np.ndarray, seen: Moments, grid: Any, config: AlgoConfig) -> np.ndarray:
        calls.append((on_grid(weight, seen, grid, config), seen))
        return calls[-1][0]

    monkeypatch.setattr(nbits, "on_grid", spied)
    parameters = {"Algorithm": "GPTQ", **GROUPS}
    quantized(kind(), samples=[*SAMPLES, *SAMPLES], **NBITS, MatMulNBitsParams=parameters)  # enough for no halves
    (first, _), (_, seen) = calls
    x = np.concatenate([feed["x"] for feed in SAMPLES]).astype(np.float64)
    reached, wanted = np.tanh(x @ first.T), np.tanh(x @ WEIGHTS["v"])
    np.testing.assert_allclose(seen.hessian, reached.T @ reached / len(x), atol=1e-5)
    np.testing.assert_allclose(seen.cross, wanted.T @ reached / len(x), atol=1e-5)
    assert np.abs(seen.cross - seen.hessian).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_not_named_are_rounded_to_nearest_in_few_bits(kind: Any) -> None:
    def fired(*names: str) -> int:
        parameters = {"Algorithm": "GPTQ", **GROUPS}
        result = quantized(kind(layers=names), samples=[*SAMPLES, *SAMPLES], **NBITS, MatMulNBitsParams=parameters)
        return next(row.fired for row in result.passes if row.name == f"nbits_{kind.name}")

    assert (fired(), fired("y")) == (2, 1)
    with pytest.raises(ConfigError, match="'z'"):
        fired("z")


@pytest.mark.parametrize("kind", KINDS)
def test_no_data_is_an_error(kind: type[AlgoConfig]) -> None:
    with pytest.raises(DataError, match="calibration data is needed"):
        quantized(kind(), samples=None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_linear_layers_is_an_error(kind: type[AlgoConfig]) -> None:
    graph = "net (float[N, 3, 4] x) => (float[N, 2, 4] y) { y = Conv <kernel_shape = [1]> (x, w) }"
    net = models.model(graph, {"w": models.normal(2, 3, 1)})
    with pytest.raises(ConfigError, match=f"{kind.__name__}: the model has no MatMul or Gemm"):
        quantized(kind(), net=net, samples=[{"x": models.normal(2, 3, 4)}])


@pytest.mark.parametrize(
    ("kinds", "chosen", "words"),
    [
        ([GPTAQConfig], "DEFAULT", "GPTAQConfig has no part .* set MatMulNBitsParams={'Algorithm': 'GPTQ'}"),
        ([GPTQConfig, QronosConfig], "GPTQ", "GPTQConfig, QronosConfig would round the same weights .*; keep one"),
    ],
)
def test_what_few_bits_cannot_have_is_refused(kinds: list[type[AlgoConfig]], chosen: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        quantized(*(kind() for kind in kinds), **NBITS, MatMulNBitsParams={"Algorithm": chosen, **GROUPS})


def test_the_command_line_knows_them() -> None:
    assert [algorithm(name) for name in ("gptaq", "qronos")] == [GPTAQConfig(), QronosConfig()]
    with pytest.raises(ConfigError, match=r"gptaqq.*gptaq"):
        algorithm("gptaqq")


def test_the_loss_is_that_of_the_outputs() -> None:
    """Two weights differ in it by as much as their outputs differ in their distance to the float output, float64."""
    x, other = (models.normal(50, 8, seed=k).astype(np.float64) for k in (3, 4))
    other = x + 0.3 * other
    weight, one, two = (models.normal(5, 8, seed=k).astype(np.float64) for k in (5, 6, 7))
    seen = Moments(other.T @ other, x.T @ other)
    found = lost(one, weight, seen) - lost(two, weight, seen)
    exact = [np.square(x @ weight.T - other @ rounded.T).sum() for rounded in (one, two)]
    assert found == pytest.approx(exact[0] - exact[1], rel=1e-4)
    error = (one - weight).astype(np.float32)
    np.testing.assert_allclose(excess(error, weight, seen.hessian, seen.hessian), loss(error, seen.hessian), rtol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_halves_are_the_whole(count: int) -> None:
    pairs = [(models.normal(3, 7, 4, seed=k), models.normal(3, 7, 4, seed=k + 9)) for k in range(count)]
    one, other = in_halves(pairs, 4)
    both, whole = (one + other).mean, summed(pairs, 4).mean
    assert both.count == whole.count == 21 * count and bool(one.count and other.count) == (count > 0)
    rows, partners = (np.zeros((0, 4)), np.zeros((0, 4)))
    for one_pair in pairs:
        rows, partners = (np.append(a, b.reshape(-1, 4), 0) for a, b in zip((rows, partners), one_pair, strict=True))
    for moment in (both, whole):
        np.testing.assert_allclose(moment.hessian, rows.T @ rows / max(21 * count, 1), atol=1e-5)
        if count:
            np.testing.assert_allclose(moment.cross, partners.T @ rows / (21 * count), atol=1e-5)
