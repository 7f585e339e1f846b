"""TensorQuantOverrides, every key; biases of 16 bits, biases of a scale of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.config.options import parse_options
from quark.config.overrides import parse_overrides
from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.onnx import (
    CalibMethod,
    CalibrationMethod,
    ExtendedCalibrationMethod,
    ExtendedQuantType,
    Int8Spec,
    Int16,
    Int32Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    QuantType,
    ScaleType,
    UInt8,
)
from quark.onnx.flow import Result

GRAPH = """g (float[1,4,8,8] x) => (float[1,4,4,4] y) {
    [c1] a = Conv<pads = [1,1,1,1]>(x, w, b) [p] s = MaxPool<kernel_shape = [1,1]>(a)
    [left] u = Conv(s, v) [right] t = Conv(s, v2) [join] j = Add(u, t) [end] y = Conv(j, v3) }"""
WEIGHTS = {
    "w": models.normal(4, 4, 3, 3, seed=1),
    "b": models.normal(4, seed=2),
    "v": models.normal(4, 4, 3, 3, seed=3),
    "v2": models.normal(4, 4, 3, 3, seed=4),
    "v3": models.normal(4, 4, 3, 3, seed=5),
}


def run(overrides: dict[str, Any] | None = None, layer: QLayerConfig | None = None, **options: Any) -> Result:
    proto = models.model(GRAPH, WEIGHTS)
    given = {"PrintSummary": False, **options}
    if overrides is not None:
        given["TensorQuantOverrides"] = overrides
    base = layer or QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
    feed = models.feeds(proto)
    result = ModelQuantizer(QConfig(base, extra_options=given)).run(proto, None, [feed])
    assert result.proto is not None
    onnx.checker.check_model(result.proto, full_check=True)
    x, y = models.session(proto).run(None, feed)[0], models.session(result.proto).run(None, feed)[0]
    assert np.sum(x**2) / np.sum((x - y) ** 2) > 10
    return result


def told(*entries: dict[str, Any], name: str = "a", **options: Any) -> Any:
    return run({name: list(entries)}, **options).plan.tensors[name]


@pytest.mark.parametrize("given", [Int16, "Int16", "int16", "QInt16", QuantType.Int16, ExtendedQuantType.QInt16])
def test_a_type_can_be_written_in_every_way(given: Any) -> None:
    tensor = told({"quant_type": given})
    assert tensor.spec.format == "int16" and tensor.reason == "TensorQuantOverrides['a']"


@pytest.mark.parametrize(
    ("given", "row"),
    [
        *((ExtendedQuantType.QBFP, "bfp16"), (ExtendedQuantType.QMX, "mxint8"), (QuantType.QFLOAT8E5M2, "fp8_e5m2")),
        *(("FP8E4M3", "fp8_e4m3"), ("MX9", "mx9"), ("MXFP4E2M1", "mxfp4"), ("MXFP8E4M3", "mxfp8_e4m3")),
    ],
)
def test_the_names_of_data_types_and_enumerations_are_known(given: Any, row: str) -> None:
    assert parse_overrides({"a": [{"quant_type": given}]})["a"].format == row


def test_the_weight_search_can_be_named_as_documents_do() -> None:
    scales = {
        method: float(run(WeightCalibrateMethod=method).plan.tensors["w"].scale)  # type: ignore[arg-type]
        for method in (None, CalibrationMethod.MinMax, ExtendedCalibrationMethod.MinMSE, "MinMSE")
    }
    plain, minmax, searched, named = scales.values()
    assert plain == minmax != searched == named


def test_a_tensor_that_is_told_something_shares_its_scale_no_more() -> None:
    plan = run({"a": [{"quant_type": UInt8, "symmetric": False}]}).plan
    assert plan.tensors["a"].group == "a" and plan.tensors["s"].group == "s"
    assert (plan.tensors["a"].spec.format, plan.tensors["s"].spec.format) == ("uint8", "int8")
    assert plan.tensors["a"].zero_point != 0


def test_a_range_and_parameters_are_taken_as_given() -> None:
    assert float(told({"rmin": -12.7, "rmax": 1.0}).scale) == np.float32(0.1)
    fixed = told({"scale": 0.25, "zero_point": 3})
    assert (float(fixed.scale), int(fixed.zero_point)) == (0.25, 3)


@pytest.mark.parametrize("name", ["a", "w"])
@pytest.mark.parametrize("side", ["rmin", "rmax"])
def test_one_side_of_a_range_leaves_the_other_to_the_data(name: str, side: str) -> None:
    found, given = told({"symmetric": False}, name=name).range, -7.5 if side == "rmin" else 7.5
    lo, hi = told({"symmetric": False, side: given}, name=name).range
    assert (lo, hi) == ((given, found[1]) if side == "rmin" else (found[0], given))


def test_one_side_of_a_range_channel_by_channel() -> None:
    values = WEIGHTS["w"].reshape(4, -1)
    highs = [float(k + values[k].max()) for k in range(4)]
    entries = [{"rmax": high, "symmetric": False, **({"axis": 0} if not k else {})} for k, high in enumerate(highs)]
    lo, hi = told(*entries, name="w").range
    np.testing.assert_array_equal(hi, highs)
    np.testing.assert_array_equal(lo, values.min(1))


def test_channels_have_a_range_or_parameters_each() -> None:
    ranges = told(
        *({"rmin": -1.27 * k, "rmax": 0.0, **({"axis": 0} if k == 1 else {})} for k in (1, 2, 3, 4)), name="w"
    )
    np.testing.assert_allclose(ranges.scale, np.float32([0.01, 0.02, 0.03, 0.04]))
    fixed = told(*({"scale": 0.05 * k, "zero_point": 0, "axis": 0} for k in (1, 2, 3, 4)), name="w")
    np.testing.assert_allclose(fixed.scale, np.float32([0.05, 0.1, 0.15, 0.2]))
    assert told({"axis": 0}, name="w").scale.shape == (4,)


@pytest.mark.parametrize(
    ("type_name", "symmetric", "levels"),
    [("int8", True, 128), ("int8", False, 128), ("uint8", False, 127), ("int16", True, 32768)],
)
def test_a_reduced_range_uses_half_of_the_codes(type_name: str, symmetric: bool, levels: int) -> None:
    tensor = told({"quant_type": type_name, "symmetric": symmetric, "reduce_range": True})
    lo, hi = min(tensor.range[0], 0), max(tensor.range[1], 0)
    span = 2 * max(-lo, hi) if symmetric else hi - lo
    assert float(tensor.scale) == pytest.approx(span / levels, rel=1e-6)
    codes = np.rint(np.array([lo, hi]) / float(tensor.scale)) + int(tensor.zero_point)
    assert codes.max() - codes.min() <= levels + 1
    assert codes.min() >= (0 if type_name == "uint8" else -levels // 2) and codes.max() <= (
        127 if levels < 1000 else 16384
    )


def test_convert_gives_some_readers_a_second_type() -> None:
    result = run(
        {"s": [{"quant_type": "int16", "convert": {"quant_type": "uint8", "symmetric": False, "recv_nodes": {"left"}}}]}
    )
    plan, graph = result.plan, result.proto.graph  # type: ignore[union-attr]
    assert plan.tensors["s"].spec.format == "int16" and plan.tensors["s_convert"].spec.format == "uint8"
    makers = {output: node for node in graph.node for output in node.output}
    reads = {node.name: makers[node.input[0]] for node in graph.node if node.name in ("left", "right")}
    assert reads["left"].input[2] != reads["right"].input[2]
    behind = makers[makers[reads["left"].input[0]].input[0]]  # Q of the second type reads the DQ of the first
    assert behind is reads["right"] and not any(node.op_type == "Identity" for node in graph.node)


def test_overrides_win_over_layers() -> None:
    assert (
        told({"quant_type": "int16"}, layer=QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())).spec.format
        == "int16"
    )


def test_a_tensor_that_is_not_quantized_stays_float(caplog: pytest.LogCaptureFixture) -> None:
    result = run({"y": [{"quant_type": "int16"}]}, NodesToExcludeOutputQuantization=["end"])
    assert "y" not in result.plan.tensors and "'y' is not quantized" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"aa": [{"quant_type": "int8"}]}, r"unknown tensor in TensorQuantOverrides 'aa'. Did you mean 'a'"),
        ({"a": [{"quant_typ": "int8"}]}, r"'quant_typ'. Did you mean 'quant_type'"),
        ({"a": [{"quant_type": "int9"}]}, r"quant_type of TensorQuantOverrides\['a'\] 'int9'"),
        ({"a": [{"scale": 1.0}]}, r"scale needs zero_point"),
        ({"a": [{"rmin": 1e4}]}, r"\['a'\]: rmin 10000.0 lies beyond the largest value"),
        ({"w": [{"rmax": -1e4}]}, r"\['w'\]: rmax -10000.0 lies beyond the smallest value"),
        ({"a": [{"scale": 1.0, "zero_point": 0, "symmetric": True}]}, r"leave out symmetric"),
        ({"a": [{"scale": -1.0, "zero_point": 0}]}, r"scale must be positive"),
        ({"a": [{"scale": 1.0, "zero_point": 300}]}, r"zero_point must lie in -128..127"),
        ({"a": [{"rmin": 1.0, "rmax": 0.0}]}, r"rmin must not be above rmax"),
        ({"w": [{"scale": 1.0, "zero_point": 0}, {"scale": 1.0, "zero_point": 0}]}, r"2 entries, one per channel"),
        ({"w": [{"scale": 1.0, "zero_point": 0, "axis": 0}, {"scale": 1.0, "zero_point": 0}]}, r"2 entries for 4 chan"),
        ({"w": [{"quant_type": "bfloat16", "axis": 0}]}, r"'bfloat16' has no scale per channel"),
        ({"a": {"quant_type": "int8"}}, r"must be a list of dictionaries"),
        ({"w": [{"rmin": -1.0, "rmax": 1.0, "axis": 0}] * 3}, r"3 entries for 4 channels"),
        ({"w": [{"rmin": -1.0, "rmax": 1.0, "axis": 7}] * 4}, r"axis must lie in -4..3, not 7"),
        ({"w": [{"axis": "0"}]}, r"axis must be a whole number, not '0'"),
        ({"a": [{"axis": 1}]}, r"axis is for constants"),
        ({"a": [{"symmetric": "no"}]}, r"symmetric must be True or False, not 'no'"),
        ({"a": [{"reduce_range": 0}]}, r"reduce_range must be True or False, not 0"),
        ({"a": [{"rmin": float("nan"), "rmax": 1.0}]}, r"rmin must be finite, not nan"),
        ({"a": [{"scale": float("inf"), "zero_point": 0}]}, r"scale must be finite, not inf"),
        ({"a": [{"scale": 1.0, "zero_point": 0.5}]}, r"zero_point must be a whole number, not 0.5"),
        ({"w": [{"axis": 0, "quant_type": "int8"}, {"quant_type": "int16"}]}, r"all channels have the same quant_type"),
        ({"a": [{"convert": {"quant_type": "uint8", "recv_nodes": "left"}}]}, r"recv_nodes must be a list"),
        ({"a": [{"convert": {"quant_type": "uint8", "recv_nodes": {"join"}}}]}, r"'join' does not read this tensor"),
        ({"a": [{"quant_type": "uint8", "symmetric": True, "reduce_range": True}]}, r"reduce_range is for integers"),
        *(
            ({name: [{"convert": {"quant_type": "uint8"}}]}, rf"\['{name}'\]: convert is for activations")
            for name in "wb"
        ),
        ({"y": [{"convert": {"quant_type": "uint8"}}]}, r"\['y'\] convert: no node reads this tensor"),
        ({"a": [{"convert": {"quant_type": "uint8", "recv_nodes": []}}]}, r"\['a'\] convert: no node reads this"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(given)


# ---- biases ----------------------------------------------------------------------------------------------------------


def bias(plan: Plan) -> tuple[str, np.ndarray, float]:
    """Format, scale, and how many times the product of scales that is."""
    scale = np.asarray(plan.tensors["b"].scale, np.float64)
    product = float(plan.tensors["x"].scale) * float(plan.tensors["w"].scale)  # type: ignore[arg-type]
    return plan.tensors["b"].spec.format, scale, float(scale / product)


def test_int16_biases_are_rescaled_until_they_fit() -> None:
    result = run(Int16Bias=True)
    name, scale, times = bias(result.plan)
    assert name == "int16" and np.log2(times) == pytest.approx(round(np.log2(times)), abs=1e-5) and times >= 1
    codes = next(onnx.numpy_helper.to_array(t) for t in result.proto.graph.initializer if t.name == "b_quantized")  # type: ignore[union-attr]
    assert codes.dtype == np.int16
    np.testing.assert_allclose(codes * scale, WEIGHTS["b"], atol=float(scale) * 0.51)
    assert np.abs(codes.astype(int)).max() > 32767 / 2 or times == pytest.approx(1)


def test_a_bias_of_its_own_type_gets_the_product_of_scales_or_its_own() -> None:
    layer = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec(), bias=Int32Spec())
    assert bias(run(layer=layer).plan)[2] == pytest.approx(1)
    own = run(layer=layer, AdjustBiasScale=False).plan
    assert bias(own)[1] == pytest.approx(np.abs(WEIGHTS["b"]).max() / (2**31 - 1), rel=1e-6)


def test_an_overridden_bias_is_adjusted_unless_that_is_turned_off() -> None:
    wanted = {"b": [{"quant_type": "int32", "scale": 0.001, "zero_point": 0}]}
    assert bias(run(wanted).plan)[2] == pytest.approx(1)
    assert float(bias(run(wanted, AdjustBiasScale=False).plan)[1]) == pytest.approx(0.001)


TOLD: dict[str, dict[str, Any]] = {
    "quant_type": {"quant_type": "int16"},
    "symmetric": {"symmetric": False},
    "reduce_range": {"reduce_range": True},
    "range": {"rmin": -9.0, "rmax": 9.0},
    "value": {"scale": 0.5, "zero_point": 0},
    "channels": {"axis": 0, "scale": 0.5, "zero_point": 0},
    "range of channels": {"axis": 0, "rmin": -9.0, "rmax": 9.0},
}
#: Channels of an activation are refused.
WHERE = [(name, key) for name in "awb" for key in TOLD if name != "a" or "channels" not in key]


@pytest.mark.parametrize(("name", "key"), WHERE)
def test_what_is_told_has_an_effect_or_the_log_says_why_not(
    name: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
    plan = run_loosely({name: [TOLD[key]]}, base)
    plain = run_loosely({}, base)
    changed = {one for one in plan if told_of(plan, one) != told_of(plain, one)}
    assert changed or f"TensorQuantOverrides['{name}']" in caplog.text


def run_loosely(overrides: dict[str, Any], layer: QLayerConfig) -> dict[str, Any]:
    """The tensors of the plan; what was told may be too coarse for a good model."""
    proto = models.model(GRAPH, WEIGHTS)
    options = {"PrintSummary": False, "TensorQuantOverrides": overrides}
    return ModelQuantizer(QConfig(layer, extra_options=options)).run(proto, None, [models.feeds(proto)]).plan.tensors


def told_of(plan: dict[str, Any], name: str) -> Any:
    """What an override can change of a tensor."""
    one = plan.get(name)
    return one and (one.spec, repr(one.scale), repr(one.zero_point))


def test_the_older_option_of_types_is_read() -> None:
    with pytest.warns(DeprecationWarning, match="TensorQuantOverrides"):
        options = parse_options({"MixedPrecisionTensor": {QuantType.QUInt16: ["a", "b"], "Int16": ["c"]}})
    found = {name: one.format for name, one in parse_overrides(options.TensorQuantOverrides).items()}
    assert found == {"a": "uint16", "b": "uint16", "c": "int16"}
    wrong = pytest.raises(ConfigError, match="MixedPrecisionTensor must be a dictionary from data type")
    with wrong, pytest.warns(DeprecationWarning):
        parse_options({"MixedPrecisionTensor": {"Int16": "c"}})


def test_specs_come_back_from_their_dictionaries() -> None:
    """What programs store and give to ``from_dict``: every enumeration with and without its class."""
    spec = QTensorConfig(False, ScaleType.PowerOf2, CalibMethod.Entropy, QuantGranularity.Group, UInt8, 32)
    assert QTensorConfig.from_dict(spec.to_dict()).to_spec() == spec.to_spec()
    short = {"symmetric": False, "scale_type": "PowerOf2", "calibration_method": "entropy", "data_type": "UInt8"}
    assert QTensorConfig.from_dict(short).scale_type is ScaleType.PowerOf2
    layer = QLayerConfig.from_dict({"activation": short, "input_tensors": short, "weight": {}, "bias": None})
    assert QLayerConfig.from_dict(layer.to_dict()).to_layer() == layer.to_layer()
    wrong = (({"scale_typ": 1}, "scale_type"), ({"scale_type": "Pow2"}, "PowerOf2"), ({"data_type": "Int9"}, "Int8"))
    for fields, words in wrong:
        with pytest.raises(ConfigError, match=words):
            QTensorConfig.from_dict(fields)
    with pytest.raises(ConfigError, match="weight"):
        QLayerConfig.from_dict({"weights": {}})
