"""Page 000: calibration methods, data types, scales, granularity, symmetry, and the specification written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.seeds import text
from tests.seeds.awkward import Reader, decibels, eight, network, quantized, samples

import quark.onnx
from quark.errors import ConfigError
from quark.numerics.affine import Coding
from quark.numerics.formats import get_format
from quark.onnx import (
    CalibMethod,
    Int8Spec,
    Int16Spec,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    ScaleType,
)

METHODS = ("MinMax", "Percentile", "LayerwisePercentile", "MinMSE", "Entropy", "Distribution")
#: Name of the text -> class, smallest and largest value (None: the text gives none).
TYPES: dict[str, tuple[str, float | None, float | None]] = {
    "Int4": ("Int4", -8, 7),
    "UInt4": ("UInt4", 0, 15),
    "Int8": ("Int8", -128, 127),
    "UInt8": ("UInt8", 0, 255),
    "Int16": ("Int16", -32768, 32767),
    "UInt16": ("UInt16", 0, 65535),
    "Int32": ("Int32", -(2.0**31), 2.0**31 - 1),
    "UInt32": ("UInt32", 0, 2.0**32 - 1),
    "Float16": ("Float16", -65504, 65504),
    "BFloat16": ("BFloat16", 2.0**-126, (2 - 2**-7) * 2.0**127),
    "BFP16": ("BFP16", None, None),
    "MX4": ("MX4", None, None),
    "MX6": ("MX6", None, None),
    "MX9": ("MX9", None, None),
    "MX Int8": ("MXInt8", None, None),
    "MXFP4 E2M1": ("MXFP4E2M1", -6, 6),
    "MXFP6 E3M2": ("MXFP6E3M2", -28, 28),
    "MXFP6 E2M3": ("MXFP6E2M3", -7.5, 7.5),
    "MXFP8 E5M2": ("MXFP8E5M2", -57344, 57344),
    "MXFP8 E4M3": ("MXFP8E4M3", -448, 448),
}
#: Bounds that the text writes as powers, or not at all.
WORDS = {"/": None, "-2³¹": -(2.0**31), "2³¹ - 1": 2.0**31 - 1, "2³² - 1": 2.0**32 - 1, "2⁻¹²⁶": 2.0**-126}
WORDS |= {"(2 - 2⁻⁷) x 2¹²⁷": (2 - 2**-7) * 2.0**127}
#: What can be expected of the worse output.
ROUGH = {"Int4": 5.0, "UInt4": 5.0, "MX4": 4.0, "MXFP4E2M1": 8.0, "MX6": 15.0, "MXFP6E3M2": 15.0, "MXFP6E2M3": 18.0}


def ranges(method: str, **options: Any) -> tuple[float, float]:
    layer = eight(calibration_method=CalibMethod[method])
    found = quantized(layer, **options).plan.tensors["x"].range
    assert found is not None
    return found


@pytest.mark.parametrize("method", METHODS)
def test_method(method: str) -> None:
    """What each keeps of the values, by its definition; Distribution has no integers to work on."""
    x = np.concatenate([feed["x"].ravel() for feed in samples()]).astype(np.float64)
    if method == "Distribution":
        with pytest.raises(ConfigError, match="FP8"):
            ranges(method)
        return
    lo, hi = ranges(method)
    if method == "MinMax":
        assert (lo, hi) == pytest.approx((x.min(), x.max()))
        return
    assert x.min() - 1e-6 <= lo < 0 < hi <= x.max() + 1e-6
    scale, full = max(-lo, hi) / 127, np.abs(x).max() / 127
    error, plain = (float(np.square(x - step * np.clip(np.rint(x / step), -128, 127)).mean()) for step in (scale, full))
    if method == "MinMSE":
        tried = [full * 2.0 ** (-k / 16) for k in range(48)]
        best = min(float(np.square(x - step * np.clip(np.rint(x / step), -128, 127)).mean()) for step in tried)
        assert error <= 1.02 * best
    assert error <= plain * (1.001 if method != "LayerwisePercentile" else 2)


@pytest.mark.parametrize("layer", ["FP8E4M3Spec", "FP8E5M2Spec"])
def test_distribution_of_fp8(layer: str) -> None:
    spec = getattr(quark.onnx, layer)(calibration_method=CalibMethod.Distribution)
    assert decibels(quantized(QLayerConfig(input_tensors=spec, weight=spec)).proto) > 12


def test_layers_are_judged_for_themselves() -> None:
    """Layerwise percentile may take another candidate for every tensor."""
    options = {"PercentileCandidates": [70.0, 100.0], "LWPMetric": "mse"}
    plan = quantized(eight(calibration_method=CalibMethod.LayerwisePercentile), **options).plan.tensors
    wide, cut = (
        quantized(eight(calibration_method=CalibMethod.LayerwisePercentile), PercentileCandidates=[share]).plan.tensors
        for share in (100.0, 70.0)
    )
    chosen = [name for name in ("x", "r", "l", "u", "h") if plan[name].range == wide[name].range]
    assert chosen and all(plan[name].range in (wide[name].range, cut[name].range) for name in ("x", "r", "l", "u", "h"))


@pytest.mark.parametrize("name", TYPES)
def test_data_type(name: str) -> None:
    kind, low, high = TYPES[name]
    given = getattr(quark.onnx, kind)
    row = get_format(given.format)
    if kind == "BFloat16":
        assert (float(np.finfo("float32").tiny), row.max) == (
            low,
            high,
        )  # the text's least value is the least normal one
    elif low is not None:
        element = getattr(row, "element", row)
        assert (float(element.min), float(element.max)) == (low, high)
        assert (given.min_value, given.max_value) in ((low, high), (None, None))
    spec = getattr(quark.onnx, f"{kind}Spec")()
    assert decibels(quantized(QLayerConfig(input_tensors=spec, weight=spec)).proto) > ROUGH.get(kind, 18.0)


@text.needed
def test_data_types_are_those_of_the_text() -> None:
    every = text.lines("000")
    start = every.index("Data Type |") + 4
    cells = [line.removesuffix(" |") for line in every[start : every.index("Scale Type#")]]
    rows = [cells[k : k + 3] for k in range(0, len(cells), 3)]
    assert [row[0] for row in rows] == list(TYPES)
    for name, *bounds in rows:
        for said, ours in zip(bounds, TYPES[name][1:], strict=True):
            value = WORDS[said] if said in WORDS else float(said.replace(",", ""))
            assert value == ours, name


def test_scale_types() -> None:
    assert {"Float32", "PowerOf2", "Int16"} <= set(ScaleType.__members__)
    assert {"Tensor", "Channel", "Group"} == set(QuantGranularity.__members__)


@pytest.mark.parametrize("symmetric", [True, False])
def test_formula(symmetric: bool) -> None:
    """Codes are round(x / scale), plus the zero point where there is one."""
    x = np.linspace(-1, 3, 999, dtype=np.float32)
    scale, zero = np.float32(3 / 127) if symmetric else np.float32(4 / 255), np.int32(0 if symmetric else -64)
    codes = np.asarray(Coding(get_format("int8")).quantize(x, scale, zero))
    expected = np.clip(np.rint(x / scale) + zero, -128, 127)
    np.testing.assert_array_equal(codes, expected)
    back = np.asarray(Coding(get_format("int8")).dequantize(codes, scale, zero))
    inside = np.abs(expected) < 127
    assert np.abs(back - x)[inside].max() <= scale / 2 * 1.001


def indented(code: str) -> str:
    """The class of the snippet, whose lines have lost their indentation."""
    found, depth = [], 0
    for line in code.split("\n"):
        depth = 0 if depth == 8 and not line.startswith("super()") else depth
        found.append(" " * (4 if line.startswith(("def ", "):")) else depth) + line)
        depth = {"class": 4, "def": 8, "):": 8}.get(line.split(" ")[0].split("(")[0] if line != "):" else "):", depth)
        if line.startswith("def __init__("):
            depth = 9  # parameters
        elif line == "):":
            depth = 8
    return "\n".join(found)


@text.needed
def test_the_specification_written_out() -> None:
    start, _ = text.block("000", "from quark.onnx import", "quantizer = ")
    lines = text.lines("000")[start - 1 :]
    lines[-1] = lines[-1].split("ModelQuantizer(config)")[0] + "ModelQuantizer(config)"
    given = {
        name: getattr(quark.onnx, name) for name in ("QTensorConfig", "ScaleType", "QuantGranularity", "BaseDataType")
    }
    exec(compile(indented("\n".join(lines)), "000", "exec"), given)
    shipped = Int8Spec(calibration_method=CalibMethod.MinMax)
    assert given["config"].compile() == QConfig(QLayerConfig(input_tensors=shipped, weight=shipped)).compile()  # type: ignore[attr-defined]
    proto = given["quantizer"].quantize_model(network(), None, Reader(samples()))  # type: ignore[attr-defined]
    assert decibels(proto) > 25


def test_the_default_of_eight_bits() -> None:
    spec = Int8Spec()
    assert (spec.symmetric, spec.scale_type) == (True, ScaleType.Float32)
    assert (spec.calibration_method, spec.quant_granularity) == (CalibMethod.Percentile, QuantGranularity.Tensor)
    assert spec.data_type is quark.onnx.Int8
    assert set(METHODS) <= set(CalibMethod.__members__)


def test_wider_codes_cost_less() -> None:
    """Data type and symmetry decide about accuracy."""
    wide = QLayerConfig(input_tensors=Int16Spec(), weight=Int16Spec())
    narrow = QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())
    widest, middle, least = (
        decibels(quantized(layer).proto) for layer in (wide, narrow, eight(data_type=quark.onnx.Int4))
    )
    assert widest > middle + 3 > least + 10
