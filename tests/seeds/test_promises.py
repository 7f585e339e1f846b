"""What page 004 promises of options beside kind, default and effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from tests.onnx_flow import models
from tests.seeds.awkward import Reader, decibels, eight, network, quantized, samples
from tests.seeds.values import BLOCKS, BRAIN, POWERS

from quark.config.options import parse_options
from quark.errors import ConfigError, QuarkError
from quark.onnx import (
    CalibMethod,
    ExtendedQuantType,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    ScaleType,
)


def test_random_data_needs_a_range_for_every_input() -> None:
    """A missing one is an error of ours and a ValueError."""
    config = QConfig(eight(), extra_options={"UseRandomData": True, "RandomDataReaderInputDataRange": {"x": [-1, 1]}})
    with pytest.raises(ValueError, match="z") as caught:
        ModelQuantizer(config).quantize_model(network())
    assert isinstance(caught.value, QuarkError)


def test_random_data_without_a_range_lies_between_zero_and_one() -> None:
    config = QConfig(
        eight(), extra_options={"UseRandomData": True, "PrintSummary": False, "RandomDataReaderInputDataRange": None}
    )
    found = ModelQuantizer(config).run(network(), None, None).plan.tensors["x"].range
    assert found is not None and 0 <= found[0] <= found[1] < 1 and found[1] > 0.9


@pytest.mark.parametrize("bins", [0, 128, 2048])
def test_bins_decide_how_exact_a_percentile_is(bins: int) -> None:
    layer = eight(calibration_method=CalibMethod.Percentile)
    every = np.sort(np.abs(np.concatenate([feed["x"].ravel() for feed in samples()])))
    exact = every[int(np.ceil(0.9 * every.size)) - 1]
    found = quantized(layer, Percentile=90.0, NumBins=bins).plan.tensors["x"].range
    assert found is not None and max(-found[0], found[1]) == pytest.approx(
        exact, rel=1 / max(bins, 2048) if bins != 128 else 1 / 128
    )


@pytest.mark.parametrize(("layer", "copies"), [(eight(), True), (BRAIN, False), (BLOCKS, False)])
def test_biases_are_copied_for_integers_only(layer: QLayerConfig, copies: bool) -> None:
    graph = "g (float[1, 6, 9, 7] x) => (float y) { a = Conv (x, w, b) c = Conv (x, v, b) y = Add (a, c) }"
    weights = {
        "w": models.normal(4, 6, 3, 2) * 0.2,
        "v": models.normal(4, 6, 3, 2, seed=1) * 0.2,
        "b": models.normal(4),
    }
    proto = models.model(graph, weights, opset=17)
    found = quantized(layer, proto, [models.feeds(proto)], QuantizeBias=False).proto
    kept = [
        t
        for t in found.graph.initializer
        if list(t.dims) == [4] and t.data_type == TensorProto.FLOAT and "scale" not in t.name
    ]
    assert (len(kept) > 1) == copies


def test_an_unknown_mode_of_the_weight_search_is_percentile(caplog: pytest.LogCaptureFixture) -> None:
    """And the user hears of it."""
    found = [
        quantized(WeightCalibrateMethod="MinMSE", MinMSEModeFloatScale=mode).plan.tensors["w1"].scale
        for mode in ("percentile", "Percentile")
    ]
    assert np.array_equal(*found)
    assert "MinMSEModeFloatScale" in caplog.text


def test_int16_biases_come_with_an_opset_that_has_them() -> None:
    proto = quantized(Int16Bias=True).proto
    assert next(one.version for one in proto.opset_import if one.domain in ("", "ai.onnx")) >= 21
    stored = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    assert any(name.startswith("b") and kind == TensorProto.INT16 for name, kind in stored.items())
    assert decibels(proto) > 20


def test_a_moving_average_has_no_part_in_a_search() -> None:
    """With powers of two found by least error it should be off: it changes nothing there."""
    plain, moving = (quantized(POWERS, CalibMovingAverage=flag).proto.graph.initializer for flag in (False, True))
    assert [t.SerializeToString() for t in plain] == [t.SerializeToString() for t in moving]


def test_channels_are_not_for_the_npu() -> None:
    """No axis may be named for it; the flow keeps its limits either way."""
    result = quantized(POWERS, QDQOpTypePerChannelSupportToAxis={})
    assert all(np.size(one.scale) == 1 for one in result.plan.tensors.values() if one.scale is not None)


def test_the_default_axis_holds_where_no_other_is_named() -> None:
    layer = QLayerConfig(eight().input_tensors, weight=eight(quant_granularity=QuantGranularity.Channel).weight)
    plan = quantized(layer, QDQOpTypePerChannelSupportToAxis={"MatMul": 0}).plan.tensors
    assert {name: np.size(plan[name].scale) for name in ("w1", "w2", "w3", "w4", "w5", "w6", "w7")} == {
        "w1": 10,
        "w2": 10,
        "w3": 4,
        "w4": np.size(plan["w4"].scale),
        "w5": 11,
        "w6": 11,
        "w7": 11,
    }


RECOMMENDED = ["Reshape", "Transpose", "MaxPool", "Split", "Slice", "Squeeze", "Unsqueeze", "Gather"]


def test_the_recommended_passthrough() -> None:
    """What only moves or chooses values has the range of what it reads, and is not observed by itself."""
    plan = quantized(CalibPassthroughOpTypes=RECOMMENDED).plan.tensors
    assert plan["p"].range == plan["c"].range


@pytest.mark.parametrize("move", [*RECOMMENDED, "Flatten"])
def test_passthrough(move: str) -> None:
    """One operator at a time: by itself it has a range of its own, named it has that of its input."""
    body = {
        "Reshape": "m = Reshape (a, shape)",
        "Transpose": "m = Transpose <perm = [0, 2, 1]> (a)",
        "MaxPool": "m = MaxPool <kernel_shape = [2]> (a)",
        "Split": "m, other = Split <axis = 1> (a, parts)",
        "Slice": "m = Slice (a, one, three, one)",
        "Squeeze": "m = Squeeze (a, zero)",
        "Unsqueeze": "m = Unsqueeze (a, zero)",
        "Gather": "m = Gather <axis = 1> (a, one)",
        "Flatten": "m = Flatten (a)",
    }[move]
    words = {"shape": [1, 42], "parts": [1, 5], "one": [1], "three": [3], "zero": [0]}
    used = {name: np.array(value, np.int64) for name, value in words.items() if f" {name}" in body}
    proto = models.model(
        f"g (float[1, 6, 7] x) => (float y) {{ a = Sigmoid (x) {body} y = Mul (m, m) }}", used, opset=17
    )
    feeds = [{"x": models.normal(1, 6, 7, seed=k)} for k in range(3)]
    options = {"QuantizeAllOpTypes": True, "ForceQuantizeNoInputCheck": True}
    named = quantized(None, proto, feeds, **options, CalibPassthroughOpTypes=[move]).plan.tensors
    assert named["m"].range == named["a"].range


@pytest.mark.parametrize("level", [0, 1, 2, 3, 4])
def test_four_bits_run_at_every_level(level: int) -> None:
    parameters = {"GroupSize": 16, "AccuracyLevel": level}
    proto = quantized(UseMatMulNBits=True, MatMulNBitsParams=parameters).proto
    node = next(node for node in proto.graph.node if node.op_type == "MatMulNBits")
    assert {a.name: a.i for a in node.attribute}.get("accuracy_level", 0) == level
    assert decibels(proto) > 15


def test_metrics_come_from_a_reader_of_get_next() -> None:
    config = QConfig(eight(), extra_options={"EvalMetrics": True, "PrintSummary": False})
    result = ModelQuantizer(config).run(network(), None, Reader(samples()))
    assert result.metrics is not None
    own = QConfig(
        eight(),
        extra_options={"EvalMetrics": True, "EvalDataReader": Reader(samples(2, seed=4)), "PrintSummary": False},
    )
    assert ModelQuantizer(own).run(network(), None, Reader(samples())).metrics is not None


def test_images_with_channels_last_come_from_a_reader_of_get_next() -> None:
    """In the flow of the NPU, which looks at the first samples twice."""
    proto = quantized(POWERS, ConvertNCHWToNHWC=True).proto
    assert [dim.dim_value for dim in proto.graph.input[0].type.tensor_type.shape.dim][1:] == [9, 7, 6]


@pytest.mark.parametrize("simplified", [True, False])
def test_simplification_takes_the_options_of_the_tool(simplified: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every keyword of the example reaches onnxslim; without simplification it is not called."""
    onnxslim = pytest.importorskip("onnxslim")
    seen: list[dict[str, Any]] = []
    slim = onnxslim.slim
    monkeypatch.setattr(onnxslim, "slim", lambda model, **given: seen.append(given) or slim(model, **given))
    given = {
        "model_check": True,
        "skip_fusion_patterns": ["EliminationSlice"],
        "save_as_external_data": False,
        "verbose": True,
    }
    proto = quantized(SimplifyModel=simplified, SimplifyModelOptions=given).proto
    assert (len(seen) == 1) == simplified
    assert not seen or given.items() <= seen[0].items()
    assert decibels(proto) > 25


@pytest.mark.parametrize("form", [(1, 6, 1, 1), (6, 1, 1)])
def test_instance_norm_with_scales_of_any_form(form: tuple[int, ...]) -> None:
    """Scale and bias of the written-out form become those of the operator, [C], and the node is one."""
    graph = """g (float[2, 6, 9, 7] x) => (float y) {
        m = GlobalAveragePool (x) c = Sub (x, m) s = Mul (c, c) v = GlobalAveragePool (s) e = Add (v, eps)
        q = Sqrt (e) i = Reciprocal (q) r = Mul (i, scale) mr = Mul (m, r) b = Sub (bias, mr) xr = Mul (x, r)
        y = Add (xr, b)
    }"""
    weights = {
        "scale": models.normal(*form) + 2,
        "bias": models.normal(*form, seed=1),
        "eps": np.float32(1e-5).reshape(()),
    }
    proto = models.model(graph, weights, opset=17)
    feeds = [models.feeds(proto, seed=k) for k in range(3)]
    for fused in (True, False):
        found = quantized(None, proto, feeds, FuseInstanceNorm=fused, QuantizeAllOpTypes=True).proto
        assert ([node.op_type for node in found.graph.node].count("InstanceNormalization") == 1) == fused
        exact, rounded = (models.run(one, feeds[0])[0] for one in (proto, found))
        assert np.abs(exact - rounded).max() < (0.05 if fused else 0.5) * np.abs(exact).max()


def test_a_group_norm_around_an_instance_norm_stays_right() -> None:
    """The form of exporters: Reshape, InstanceNormalization, Reshape, Mul, Add."""
    graph = """g (float[2, 6, 9, 7] x) => (float y) {
        r = Reshape (x, flat) n = InstanceNormalization <epsilon = 1e-5> (r, ones, zeros) b = Reshape (n, back)
        m = Mul (b, scale) y = Add (m, bias)
    }"""
    weights = {"flat": np.array([0, 2, -1], np.int64), "back": np.array([2, 6, 9, 7], np.int64)}
    weights |= {"ones": np.ones(2, np.float32), "zeros": np.zeros(2, np.float32)}
    weights |= {"scale": models.normal(6, 1, 1) + 2, "bias": models.normal(6, 1, 1, seed=1)}
    proto = models.model(graph, weights, opset=17)
    feeds = [models.feeds(proto, seed=k) for k in range(3)]
    found = quantized(None, proto, feeds, QuantizeAllOpTypes=True).proto
    exact, rounded = (models.run(one, feeds[0])[0] for one in (proto, found))
    assert np.abs(exact - rounded).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("form", ["reflect", "edge"])
def test_pads_share_a_position_in_the_flow_of_the_npu(form: str) -> None:
    """By themselves, and where an entry gives what reads them another range."""
    graph = f"""g (float[1, 6, 9, 7] x) => (float y) {{
        a = Conv (x, w, b)
        p = Pad <mode = "{form}"> (a, pads)
        [next] y = Conv (p, v, c)
    }}"""
    weights = {"w": models.normal(4, 6, 3, 2) * 0.2, "b": models.normal(4), "v": models.normal(5, 4, 1, 1)}
    weights |= {"c": models.normal(5), "pads": np.array([0, 0, 1, 2, 0, 0, 1, 0], np.int64)}
    proto = models.model(graph, weights, opset=17)
    feeds = [models.feeds(proto, seed=k) for k in range(3)]
    other = QLayerConfig(
        eight(scale_type=ScaleType.PowerOf2, calibration_method=CalibMethod.Percentile).input_tensors,
        weight=POWERS.weight,
    )
    scales = {}
    for flag in (None, True, False):
        given = {"Percentile": 50.0, "PrintSummary": False, **({} if flag is None else {"AlignPad": flag})}
        config = QConfig(POWERS, {other: ["next"]}, extra_options=given)
        plan = ModelQuantizer(config).run(proto, None, Reader(feeds)).plan.tensors
        scales[flag] = float(plan["a"].scale), float(plan["p"].scale)
    assert scales[True][0] == scales[True][1] and scales[None] == scales[True]
    assert scales[False][0] > scales[False][1]


def test_a_block_type_cannot_have_channels() -> None:
    with pytest.raises(ConfigError, match="axis"):
        parse_options({"TensorQuantOverrides": {"w1": [{"quant_type": ExtendedQuantType.QBFP, "axis": 0}]}})


def test_every_tensor_has_a_shape_on_request(tmp_path: Path) -> None:
    proto = quantized(FillAllValueInfo=True).proto
    stated = {value.name for value in (*proto.graph.value_info, *proto.graph.output)}
    assert {name for node in proto.graph.node for name in node.output} <= stated
    onnx.checker.check_model(proto, full_check=True)
