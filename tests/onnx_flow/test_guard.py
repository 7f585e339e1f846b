"""A change of the float model that makes the quantized model worse on calibration data is put back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from tests.onnx_flow import models
from tests.onnx_flow import test_linear_algorithms as linear

from quark.config.options import Options
from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.ir.surgery import constant_array, set_constant
from quark.measure import guard
from quark.measure.gain import gain
from quark.onnx import (
    AlgoConfig,
    AWQConfig,
    ChannelEqualizationConfig,
    CLEConfig,
    GPTQConfig,
    Int3Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuarotConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)
from quark.onnx.algorithms import losses, smoothquant, stages
from quark.onnx.algorithms.stages import TRANSFORMS
from quark.onnx.graph.model import load
from quark.onnx.graph.report import PassReport

REAL = Path(__file__).parents[2] / ".." / "shared" / "data" / "models"
EIGHT = QLayerConfig(linear.INT8, linear.INT8)
GUARDED: dict[type[AlgoConfig], Callable[..., AlgoConfig]] = {
    CLEConfig: lambda keep_worse: CLEConfig(keep_worse=keep_worse),
    ChannelEqualizationConfig: lambda keep_worse: ChannelEqualizationConfig(keep_worse=keep_worse),
    SmoothQuantConfig: lambda keep_worse: SmoothQuantConfig(alpha=1.0, keep_worse=keep_worse),
    QuarotConfig: lambda keep_worse: QuarotConfig(keep_worse=keep_worse),
    AWQConfig: lambda keep_worse: AWQConfig(keep_worse=keep_worse),
    SVDQuantConfig: lambda keep_worse: SVDQuantConfig(svd_rank=2, min_layer_size=4, keep_worse=keep_worse),
}


def relative_loss(source: Any, layer: QLayerConfig, algorithms: list[AlgoConfig], feeds: list[dict[str, Any]]) -> float:
    """What the guard promises not to raise, from the written model and the float one."""
    config = QConfig(layer, algo_config=algorithms, extra_options={"PrintSummary": False})
    proto = ModelQuantizer(config).quantize_model(source, None, feeds)
    data = source.SerializeToString() if isinstance(source, onnx.ModelProto) else str(source)
    sessions = [onnxruntime.InferenceSession(one) for one in (data, proto.SerializeToString())]
    results = [[session.run(None, feed) for feed in feeds] for session in sessions]
    loss = 0.0
    for number in range(len(results[0][0])):
        x, y = (np.stack([sample[number] for sample in side]).astype(np.float64) for side in results)
        loss += float(np.square(x - y).sum() / np.square(x).sum())
    return loss


def test_every_transformation_is_under_the_contract() -> None:
    assert set(GUARDED) == set(TRANSFORMS)


def detector(folder: Path, layers: int | None) -> Path:
    """The face detector, or its first convolutions."""
    path = REAL / "ultraface_rfb320.onnx"
    if not path.exists():
        pytest.skip("the shared models are not beside the repository")
    if layers is None:
        return path
    proto = onnx.shape_inference.infer_shapes(onnx.load(path))
    last = [node.output[0] for node in proto.graph.node if node.op_type == "Relu"][layers - 1]
    (folder / "cut.onnx").write_bytes(onnx.utils.Extractor(proto).extract_model(["input"], [last]).SerializeToString())
    return folder / "cut.onnx"


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        *((kind, 6) for kind in (CLEConfig, ChannelEqualizationConfig)),
        *(pytest.param(kind, None, marks=pytest.mark.slow) for kind in GUARDED),
    ],
)
def test_no_transformation_is_worse_than_nothing_on_a_face_detector(
    kind: type[AlgoConfig], layers: int | None, tmp_path: Path
) -> None:
    """The guard looks at what comes out."""
    path = detector(tmp_path, layers)
    feeds = [{"input": models.normal(1, 3, 240, 320, seed=seed)} for seed in range(1)]
    plain = relative_loss(path, EIGHT, [], feeds)
    assert relative_loss(path, EIGHT, [GUARDED[kind](keep_worse=False)], feeds) <= plain * (1 + 1e-6)


def widened() -> onnx.ModelProto:
    """Even inputs, and one channel of them with large weights: to even out the weights makes the inputs uneven."""
    graph = "net (float[N, 16] x) => (float[N, 6] y) { h = MatMul (x, a) r = Tanh (h) y = MatMul (r, b) }"
    weights = {"a": models.normal(16, 12), "b": models.normal(12, 6, seed=2)}
    weights["a"][0] *= 30
    return models.model(graph, weights, opset=17)


def test_what_does_harm_is_put_back_and_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoothquant, "STRENGTHS", (1.0,))  # it would see by itself that this does harm
    model = widened()
    feeds = [{"x": models.normal(8, 16, seed=seed)} for seed in range(4)]
    layer = linear_layer()
    plain = relative_loss(model, layer, [], feeds)
    kept = relative_loss(model, layer, [SmoothQuantConfig(alpha=0.0, keep_worse=True)], feeds)
    with caplog.at_level(logging.WARNING):
        guarded = relative_loss(model, layer, [SmoothQuantConfig(alpha=0.0)], feeds)
    assert kept > plain * 1.05 and guarded == pytest.approx(plain, rel=1e-6)
    assert "smooth_quant is put back" in caplog.text


def test_what_helps_stays() -> None:
    config = QConfig(linear_layer(), algo_config=[SmoothQuantConfig()], extra_options={"PrintSummary": False})
    result = ModelQuantizer(config).run(linear.NET, None, linear.SAMPLES)
    (report,) = [one for one in result.passes if one.name == "smooth_quant"]
    assert report.fired and not any("put back" in line for line in report.refused)


def linear_layer() -> QLayerConfig:
    return QLayerConfig(linear.INT8, linear.Int16Spec(calibration_method=linear.CalibMethod.MinMax))


def noise_of(*outputs: tuple[float, ...]) -> np.ndarray:
    """Noise per sample, for each output."""
    return np.array(outputs, np.float64).T


@pytest.mark.parametrize(
    ("with_it", "without", "kept"),
    [
        ((0.5, 0.5, 0.5), (1.0, 1.0, 1.0), True),
        ((0.9, 1.0, 0.9), (1.0, 0.8, 1.1), False),  # smaller by 3 per cent, give or take 12
        ((0.8, 0.9, 0.7), (1.0, 1.0, 1.0), True),
        ((0.9,), (1.0,), True),
        ((0.99,), (1.0,), False),  # fewer than four samples must gain 2 per cent
        ((0.99, 0.99, 0.99), (1.0, 1.0, 1.0), False),
        ((0.99, 0.99, 0.99, 0.99), (1.0, 1.0, 1.0, 1.0), True),
        ((1.0, 1.0), (1.0, 1.0), False),
        ((0.0, 0.0), (0.0, 0.0), False),
        ((np.inf, 0.5), (1.0, 1.0), False),
    ],
)
def test_a_gain_that_chance_explains_is_none(with_it: tuple, without: tuple, kept: bool) -> None:
    assert gain(noise_of(with_it), noise_of(without)).sure is kept


def test_no_output_pays_for_another() -> None:
    without = noise_of((1.0, 1.1, 0.9), (1.0, 1.1, 0.9))
    assert gain(noise_of((0.1, 0.11, 0.09), (1.0, 1.1, 0.9)), without).sure
    surely_worse, hardly_worse = (noise_of((0.1, 0.11, 0.09), other) for other in ((1.2, 1.3, 1.1), (1.3, 0.9, 0.9)))
    assert not gain(surely_worse, without).sure and not gain(surely_worse, without).harmless
    assert gain(hardly_worse, without).sure  # by 0.03 where the two gain 1.1 on average
    small, surely_traded = (noise_of((0.9, 0.99, 0.81), other) for other in ((1.3, 0.9, 0.9), (1.03, 1.13, 0.93)))
    assert not gain(small, without).sure and gain(small, without).harmless  # by 0.03, give or take 0.14
    assert not gain(surely_traded, without).sure and not gain(surely_traded, without).harmless  # by 0.03, surely


def test_the_error_of_a_gain_is_that_of_the_bootstrap() -> None:
    random = np.random.default_rng(0)
    with_it, without = (np.exp(random.normal(size=40) + shift) for shift in (0.0, 0.3))
    found = gain(noise_of(tuple(with_it)), noise_of(tuple(without)))
    drawn = random.integers(0, 40, (4000, 40))
    drawn_gains = np.log(without[drawn].sum(1) / with_it[drawn].sum(1))
    assert found.mean == pytest.approx(np.log(without.sum() / with_it.sum()))
    assert found.error == pytest.approx(drawn_gains.std(), rel=0.1)


def uneven() -> onnx.ModelProto:
    """Two layers that equalization evens out in full or in part."""
    graph = """
    net (float[1, 4, 8, 8] x) => (float[1, 4, 8, 8] y) {
        a = Conv <kernel_shape = [1, 1]> (x, w) b = Relu (a) y = Conv <kernel_shape = [1, 1]> (b, v)
    }"""
    weights = {"w": models.normal(8, 4, 1, 1), "v": models.normal(4, 8, 1, 1, seed=2)}
    weights["w"][:2] *= 20
    return models.model(graph, weights, opset=17)


def test_a_transformation_goes_as_far_as_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part is tried and the best stays: what comes out is exactly that part alone."""
    model, feeds = uneven(), [{"x": models.normal(1, 4, 8, 8, seed=seed)} for seed in range(6)]

    def weights(config: CLEConfig) -> tuple[list[bytes], Any]:
        found = ModelQuantizer(QConfig(EIGHT, algo_config=[config], extra_options={"PrintSummary": False}))
        result = found.run(model, None, feeds)
        return [one.SerializeToString() for one in result.proto.graph.initializer], result

    alone = {}
    for part in stages.PARTS[CLEConfig]:
        with monkeypatch.context() as patch:
            patch.setitem(stages.PARTS, CLEConfig, ())
            patch.setitem(stages.TRANSFORMS, CLEConfig, partial(stages.TRANSFORMS[CLEConfig], part=part))
            config = CLEConfig(keep_worse=True, cle_scale_use_threshold=False)
            alone[part] = weights(config)[0], relative_loss(model, EIGHT, [config], feeds)
    plain = relative_loss(model, EIGHT, [], feeds)
    best = min(alone, key=lambda part: alone[part][1])
    made, result = weights(CLEConfig(keep_worse=False, cle_scale_use_threshold=False))
    assert alone[best][1] < 0.7 * plain and best != 1
    assert made == alone[best][0] and len({tuple(one) for one, _ in alone.values()}) == len(alone)
    (report,) = [one for one in result.passes if one.name == "cle"]
    assert f"taken to the power of {best:g}" in report.refused


def test_a_part_that_changes_nothing_does_not_undo_one_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, feeds = uneven(), [{"x": models.normal(1, 4, 8, 8, seed=seed)} for seed in range(6)]
    equalize = stages.TRANSFORMS[CLEConfig]

    def only_whole(given: ir.Model, config: CLEConfig, context: Any, part: float = 1.0) -> PassReport:
        return equalize(given, config, context, part=0.5) if part == 1 else PassReport(config.name, 0)

    monkeypatch.setitem(stages.PARTS, CLEConfig, (1.0, 0.5))
    monkeypatch.setitem(stages.TRANSFORMS, CLEConfig, only_whole)
    config = CLEConfig(keep_worse=False, cle_scale_use_threshold=False)
    assert relative_loss(model, EIGHT, [config], feeds) < 0.7 * relative_loss(model, EIGHT, [], feeds)
    found = ModelQuantizer(QConfig(EIGHT, algo_config=[config], extra_options={"PrintSummary": False}))
    (report,) = [one for one in found.run(model, None, feeds).passes if one.name == "cle"]
    assert report.fired and not report.refused


def spoil(given: ir.Model, plan: Plan, config: object, context: object) -> PassReport:
    """An algorithm that swears by what it did, and did harm: all weights are half as large again."""
    for tensor in plan.of_role("weight"):
        value = given.graph.initializers[tensor.name]
        set_constant(value, np.asarray(constant_array(value)) * np.float32(1.5))
        plan.put(replace(tensor, changes=("tuned",)))
    return PassReport("gptq", 2, ())


def tuned_by(
    run: Callable[..., PassReport], config: GPTQConfig | None, model: onnx.ModelProto, feeds: Any, layer: Any = None
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(stages.TUNES, GPTQConfig, run)
        algorithms = [] if config is None else [config]
        made = QConfig(layer or linear_layer(), algo_config=algorithms, extra_options={"PrintSummary": False})
        return ModelQuantizer(made).run(model, None, feeds)


def test_tuned_weights_that_make_the_model_worse_are_put_back(caplog: pytest.LogCaptureFixture) -> None:
    model, feeds = widened(), [{"x": models.normal(8, 16, seed=seed)} for seed in range(4)]
    plain, kept = (tuned_by(spoil, one, model, feeds) for one in (None, GPTQConfig(keep_worse=True)))
    with caplog.at_level(logging.WARNING):
        result = tuned_by(spoil, GPTQConfig(), model, feeds)
    assert result.proto.SerializeToString() == plain.proto.SerializeToString()
    assert "gptq is put back in 2 of 2 layers" in caplog.text and not any(tensor.changes for tensor in result.plan)
    assert kept.proto.SerializeToString() != plain.proto.SerializeToString()


def test_only_the_harmful_half_is_put_back() -> None:
    """Three layers in a row; the weights of the first become finer, those of the last are spoilt."""
    graph = "net (float[N, 8] x) => (float[N, 8] y) { p = MatMul (x, a) q = MatMul (p, b) y = MatMul (q, c) }"
    weights = {name: models.normal(8, 8, seed=seed) for seed, name in enumerate("abc")}
    model, feeds = models.model(graph, weights, opset=17), [{"x": models.normal(8, 8, seed=seed)} for seed in range(6)]

    def run(given: ir.Model, plan: Plan, config: object, context: object) -> PassReport:
        """``a`` gets a grid of 8 bits, ``c`` is half as large again."""
        fine, spoilt = plan.tensors["a"], given.graph.initializers["c"]
        plan.put(replace(fine, spec=replace(fine.spec, format="int8"), scale=np.float32(0.02)))
        set_constant(spoilt, np.asarray(constant_array(spoilt)) * np.float32(1.5))
        return PassReport("gptq", 2, ())

    def last_layer(proto: onnx.ModelProto) -> list[bytes]:
        return [one.SerializeToString() for one in proto.graph.initializer if one.name.startswith("c_")]

    layer = QLayerConfig(Int16Spec(), Int3Spec())
    plain, spoilt, result = (
        tuned_by(run, one, model, feeds, layer) for one in (None, GPTQConfig(keep_worse=True), GPTQConfig())
    )
    (report,) = [one for one in result.passes if one.name == "gptq"]
    assert result.plan.tensors["a"].spec.format == "int8" and report.fired == 1
    assert "put back in 1 of 2 layers" in report.refused[-1]
    assert last_layer(plain.proto) and last_layer(result.proto) == last_layer(plain.proto) != last_layer(spoilt.proto)


@pytest.mark.parametrize("kind", GUARDED, ids=lambda kind: kind.name)
def test_the_flag_is_a_flag(kind: type[AlgoConfig]) -> None:
    with pytest.raises(ConfigError, match="keep_worse"):
        kind(keep_worse=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(("room", "run_again"), [(guard.BUDGET, 0), (0, 3), (2 * 4 * 8, 1)])
def test_answers_of_the_float_model_are_kept_where_there_is_room(
    room: int, run_again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three samples whose answers take 32 bytes each."""
    monkeypatch.setattr(guard, "BUDGET", room)
    model = load(models.model("g (float[1, 8] x) => (float[1, 8] y) { y = Relu (x) }", {}, 17))
    feeds = [{"x": models.normal(1, 8, seed=seed)} for seed in range(3)]
    reference = losses.reference(model, feeds, Options())
    runs: list[Any] = []
    first = list(reference)
    monkeypatch.setattr(losses.Runner, "run", noted(runs, losses.Runner.run))
    for (feed, values), (_, again), given in zip(first, reference, feeds, strict=True):
        np.testing.assert_array_equal(values["y"], np.maximum(given["x"], 0))
        np.testing.assert_array_equal(values["y"], again["y"])
        assert feed is given
    assert len(runs) == run_again


def noted(runs: list[Any], run: Any) -> Any:
    def call(self: Any, feed: Any) -> Any:
        runs.append(feed)
        return run(self, feed)

    return call
