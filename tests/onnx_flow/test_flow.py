"""The whole job through the public interface, on the demo's trained network and on old and odd models."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models
from tests.pairs import pairs

from quark.cli import main
from quark.config.presets import PRESETS
from quark.demo import data as digits
from quark.errors import ConfigError, DataError, ModelError, QuarkError
from quark.onnx import (
    CalibMethod,
    Config,
    Int4Spec,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    ScaleType,
    UInt4Spec,
    UInt8Spec,
    UInt16Spec,
    XInt8Spec,
    get_default_config,
)
from quark.onnx.graph.run import Runner

MODEL = digits.model_path()
QUIET = {"PrintSummary": False}
(TRAIN, _), (TEST, LABELS) = digits.split()
TEST, LABELS = TEST[:200], LABELS[:200]
FEEDS = [{"image": TRAIN[k : k + 8]} for k in range(0, 64, 8)]


def int8(**options: object) -> QConfig:
    spec = Int8Spec(calibration_method=CalibMethod.MinMax)
    return QConfig(QLayerConfig(input_tensors=spec, weight=spec), extra_options={**QUIET, **options})


def preset(name: str) -> Config:
    config = get_default_config(name)
    config.extra_options.update(QUIET)
    return Config(config)


def run(model: str | Path | onnx.ModelProto, images: np.ndarray = TEST) -> np.ndarray:
    return models.session(model).run(None, {"image": images})[0]


def sqnr(reference: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10((reference**2).sum() / ((reference - found) ** 2).sum()))


REFERENCE = run(MODEL)


# ---- the main job ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "db", "points"), [("A8W8", 20, 1.0), ("XINT8", 15, 1.5), ("A8W8_CPU", 28, 0.5), ("A16W8", 25, 1.0)]
)
def test_a_preset_gives_a_small_model_that_answers_alike(name: str, db: float, points: float, tmp_path: Path) -> None:
    out = tmp_path / "q.onnx"
    assert ModelQuantizer(preset(name)).quantize_model(MODEL, out, FEEDS) is None
    onnx.checker.check_model(str(out), full_check=True)
    found = run(out)
    assert sqnr(REFERENCE, found) > db
    right = [np.mean(logits.argmax(1) == LABELS) * 100 for logits in (REFERENCE, found)]
    assert right[1] >= right[0] - points
    assert out.stat().st_size < 0.32 * MODEL.stat().st_size
    assert os.listdir(tmp_path) == ["q.onnx"]


def test_a_proto_gives_a_proto_and_stays_as_it_was(tmp_path: Path) -> None:
    proto = onnx.load(MODEL)
    before = proto.SerializeToString()
    result = ModelQuantizer(int8()).quantize_model(proto, None, FEEDS)
    assert result is not None and proto.SerializeToString() == before
    ModelQuantizer(int8()).quantize_model(str(MODEL), str(tmp_path / "q.onnx"), FEEDS)
    np.testing.assert_array_equal(run(result), run(tmp_path / "q.onnx"))


def test_two_runs_of_one_configuration_write_the_same_bytes(tmp_path: Path) -> None:
    config = preset("U8S8_AAWS")
    before = copy.deepcopy(vars(config.global_quant_config))
    for name in ("one.onnx", "two.onnx"):
        ModelQuantizer(config).quantize_model(MODEL, tmp_path / name, FEEDS)
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()
    assert vars(config.global_quant_config) == before


def test_the_cpu_target_leaves_no_float_kernel_between_the_pairs(tmp_path: Path) -> None:
    out, optimized = tmp_path / "q.onnx", tmp_path / "optimized.onnx"
    config = preset("A8W8_CPU")
    config.global_quant_config.extra_options["FloatWhereFaster"] = False
    ModelQuantizer(config).quantize_model(MODEL, out, FEEDS)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(optimized), 3
    onnxruntime.InferenceSession(str(out), options, providers=["CPUExecutionProvider"])
    kernels = Counter(node.op_type for node in onnx.load(optimized).graph.node)
    floats = Counter(node.op_type for node in onnx.load(MODEL).graph.node)
    assert kernels["QLinearConv"] == floats["Conv"] > 0
    assert not {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "Add", "Relu"} & set(kernels), kernels
    assert kernels["QuantizeLinear"] == len(models.session(out).get_inputs())


def test_int8_shifted_into_uint8_is_the_same_model(tmp_path: Path) -> None:
    proto = models.model(
        "g (float[n,4] x) => (float[n,3] y) { h = MatMul(x, w)  y = Sigmoid(h) }", {"w": models.normal(4, 3)}
    )
    feeds = [{"x": models.normal(16, 4, seed=k)} for k in range(3)]
    spec = Int8Spec(calibration_method=CalibMethod.MinMax)
    config = {"global_config": QLayerConfig(input_tensors=spec, weight=spec), "extra_options": QUIET}
    plain = ModelQuantizer(QConfig(**config)).run(proto, None, feeds)
    shifted = ModelQuantizer(QConfig(**config, target="cpu")).run(proto, None, feeds)
    assert plain.plan.tensors["x"].spec.format == "int8" and shifted.plan.tensors["x"].spec.format == "uint8"
    assert plain.plan.tensors["x"].scale == shifted.plan.tensors["x"].scale
    assert shifted.plan.tensors["x"].zero_point == 128


METHODS = [CalibMethod.MinMax, CalibMethod.Percentile, CalibMethod.MinMSE]
GRANULARITIES = [QuantGranularity.Tensor, QuantGranularity.Channel, QuantGranularity.Group]
#: Bits of the activations -> least SQNR in dB that any sensible quantizer reaches with 8-bit weights on this network.
LEAST = {4: 2.0, 8: 20.0, 16: 25.0}


@pytest.mark.parametrize(
    ("spec", "method"), pairs([UInt4Spec, Int8Spec, UInt8Spec, Int16Spec, UInt16Spec, XInt8Spec], METHODS)
)
def test_every_activation_type_and_method(spec: type[QTensorConfig], method: CalibMethod) -> None:
    weight = Int8Spec(quant_granularity=QuantGranularity.Channel)
    config = QConfig(QLayerConfig(input_tensors=spec(calibration_method=method), weight=weight), extra_options=QUIET)
    result = ModelQuantizer(config).quantize_model(MODEL, None, FEEDS)
    assert result is not None
    least = LEAST[spec().data_type.bitwidth] - (5 if spec is XInt8Spec else 0)
    assert sqnr(REFERENCE, run(result)) > least


@pytest.mark.parametrize(
    ("spec", "granularity", "scale"),
    pairs(
        [Int4Spec, UInt4Spec, Int8Spec, UInt8Spec, Int16Spec], GRANULARITIES, [ScaleType.Float32, ScaleType.PowerOf2]
    ),
)
def test_every_weight_type_and_granularity(
    spec: type[QTensorConfig], granularity: QuantGranularity, scale: ScaleType
) -> None:
    weight = spec(quant_granularity=granularity, scale_type=scale, group_size=32)
    config = QConfig(QLayerConfig(weight=weight), extra_options={**QUIET, "WeightsOnly": True})
    result = ModelQuantizer(config).quantize_model(MODEL)
    assert result is not None
    least = {4: 6.0, 8: 28.0, 16: 60.0}[weight.data_type.bitwidth]
    if granularity is QuantGranularity.Tensor:
        least -= {4: 7.0, 8: 6.0, 16: 6.0}[weight.data_type.bitwidth]
    assert sqnr(REFERENCE, run(result)) > least - (3 if scale is ScaleType.PowerOf2 else 0)


def test_a_finer_granularity_and_a_wider_type_are_more_accurate() -> None:
    found = {}
    for bits, spec in ((4, Int4Spec), (8, Int8Spec)):
        for granularity in GRANULARITIES:
            weight = spec(quant_granularity=granularity, group_size=16)
            config = QConfig(QLayerConfig(weight=weight), extra_options={**QUIET, "WeightsOnly": True})
            found[bits, granularity] = sqnr(REFERENCE, run(ModelQuantizer(config).quantize_model(MODEL)))  # type: ignore[arg-type]
    for bits in (4, 8):
        tensor, channel, group = (found[bits, granularity] for granularity in GRANULARITIES)
        assert tensor < channel < group + 1.0
    assert all(found[4, granularity] + 15 < found[8, granularity] for granularity in GRANULARITIES)


def test_int16_scales_are_fractions_of_16_bit_integers() -> None:
    result = ModelQuantizer(int8(Int16Scale=True)).run(MODEL, None, FEEDS)
    scales = [float(np.asarray(t.scale)) for t in result.plan if t.role == "activation"]
    exact = [
        float(np.asarray(t.scale))
        for t in ModelQuantizer(int8()).run(MODEL, None, FEEDS).plan
        if t.role == "activation"
    ]
    for scale, reference in zip(scales, exact, strict=True):
        assert any(scale * 2**n == int(scale * 2**n) and scale * 2**n < 2**15 for n in range(17))
        assert abs(scale / reference - 1) < 0.01
    assert sqnr(REFERENCE, run(result.proto)) > 25  # type: ignore[arg-type]


def test_int16_scales_that_16_bits_do_not_hold_are_refused() -> None:
    tiny = [{"x": models.normal(8, 4) * 1e-4}]
    proto = models.model("g (float[n,4] x) => (float[n,4] y) { y = Sigmoid(x) }")
    with pytest.raises(ConfigError, match=r"Int16Scale cannot represent the scale"):
        ModelQuantizer(int8(Int16Scale=True)).quantize_model(proto, None, tiny)


# ---- calibration data -----------------------------------------------------------------------------------------------


class CountingReader:
    """A reader that notices how often it is asked."""

    def __init__(self, count: int) -> None:
        self.given, self.count = 0, count

    def get_next(self) -> dict[str, np.ndarray] | None:
        if self.given == self.count:
            return None
        self.given += 1
        return FEEDS[self.given % len(FEEDS)]


def test_only_as_many_samples_are_read_as_asked_for() -> None:
    reader = CountingReader(100)
    ModelQuantizer(int8(CalibDataSize=3)).quantize_model(MODEL, None, reader)
    assert reader.given == 3


def test_random_data_needs_no_reader_and_takes_shapes_and_ranges() -> None:
    options = {"UseRandomData": True, "RandomDataReaderInputShape": {"image": [2, 1, 32, 32]}}
    result = ModelQuantizer(int8(**options, RandomDataReaderInputDataRange={"image": [0, 3]})).run(MODEL)
    assert 2.9 < result.plan.tensors["image"].range[1] <= 3  # type: ignore[index]


def test_random_data_has_the_shape_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, ...]] = set()
    run = Runner.run

    def watched(self: Runner, feed: Any) -> Any:
        seen.add(feed["image"].shape)
        return run(self, feed)

    monkeypatch.setattr(Runner, "run", watched)
    ModelQuantizer(int8(UseRandomData=True, RandomDataReaderInputShape={"image": [3, 1, 32, 32]})).run(MODEL)
    assert seen == {(3, 1, 32, 32)}


def nan_feed() -> Iterator[dict[str, np.ndarray]]:
    yield FEEDS[0]
    bad = FEEDS[1]["image"].copy()
    bad[3, 0, 5, 5] = np.nan
    yield {"image": bad}


DATA_ERRORS = {
    "nothing": (None, "calibration data is needed.*UseRandomData"),
    "empty": ([], "no sample|empty"),
    "name": ([{"imag": TRAIN[:1]}], "imag.*image"),
    "shape": ([{"image": TRAIN[:1, 0]}], r"sample 0.*\[1, 32, 32\].*'image'"),
    "size": ([{"image": TRAIN[:1, :, :16]}], r"sample 0.*16, 32\].*'image'"),
    "type": ([{"image": TRAIN[:1].astype(np.float64) / 3}], r"float64.*'image'"),
    "nan": (nan_feed(), "image.*NaN|NaN.*image"),
}


@pytest.mark.parametrize("case", DATA_ERRORS)
def test_data_that_does_not_fit_is_refused_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    reader, message = DATA_ERRORS[case]
    with pytest.raises(DataError, match=message):
        ModelQuantizer(int8()).quantize_model(MODEL, tmp_path / "q.onnx", reader)
    assert not os.listdir(tmp_path)


# ---- models ---------------------------------------------------------------------------------------------------------


def test_an_already_quantized_model_is_refused() -> None:
    quantized = ModelQuantizer(int8()).quantize_model(MODEL, None, FEEDS)
    with pytest.raises(ModelError, match=r"already quantized.*DequantizeLinear"):
        ModelQuantizer(int8()).quantize_model(quantized, None, FEEDS)  # type: ignore[arg-type]


def test_a_missing_model_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.onnx"):
        ModelQuantizer(int8()).quantize_model(tmp_path / "nowhere.onnx", tmp_path / "q.onnx", FEEDS)
    with pytest.raises(ModelError, match=r"absent.*does not exist"):
        ModelQuantizer(int8()).quantize_model(MODEL, tmp_path / "absent" / "q.onnx", FEEDS)


def test_a_corrupt_model_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(MODEL.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"broken.onnx"):
        ModelQuantizer(int8()).quantize_model(broken, tmp_path / "q.onnx", FEEDS)
    assert os.listdir(tmp_path) == ["broken.onnx"]


def test_an_unknown_custom_operator_is_named_with_the_remedy() -> None:
    proto = models.model(
        "g (float[n,4] x) => (float[n,3] y) { h = my.domain.Swirl(x)  y = MatMul(h, w) }",
        {"w": models.normal(4, 3)},
        domains={"my.domain": 1},
    )
    with pytest.raises(ModelError, match=r"Swirl.*UserCustomOpLibPath"):
        ModelQuantizer(int8()).quantize_model(proto, None, [{"x": models.normal(2, 4)}])
    for preset in ("UINT8_DYNAMIC_QUANT", "MATMUL_NBITS"):  # no sample has to run through it
        quantizer = ModelQuantizer(QConfig.get_default_config(preset))
        made = quantizer.quantize_model(proto)
        assert made is not None and "Swirl" in {node.op_type for node in made.graph.node}
        assert quantizer.result is not None
        (run,) = [one for one in quantizer.result.passes if one.name == "first run"]
        assert run.fired == 0 and "not run: the node" in run.refused[0] and "Swirl" in run.refused[0]
        assert "name the library that defines it" in run.refused[0]


def test_an_output_without_a_shape_gets_the_one_that_its_node_makes() -> None:
    """Exporters leave it out; ONNX Runtime runs such models, and the checker refuses them."""
    weights = {"w": models.normal(4, 3)}
    proto = models.model("g (float[n, 4] x) => (float[n, 3] y) { h = Relu(x) y = MatMul(h, w) }", weights)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    quantizer = ModelQuantizer(int8())
    made = quantizer.quantize_model(proto, None, [{"x": models.normal(2, 4)}])
    assert made is not None and quantizer.result is not None
    assert [one.dim_param or one.dim_value for one in made.graph.output[0].type.tensor_type.shape.dim] == ["n", 3]
    assert "gives 'y' no shape, and its node makes [n,3]" in str(quantizer.result.passes)
    unknown = models.model(
        "g (float[n, 4] x) => (float[n, 3] y) { h = MatMul(x, w) y = my.domain.Swirl(h) }",
        weights,
        domains={"my.domain": 1},
    )
    unknown.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match=r"the output 'y' has no shape, and none can be inferred"):
        ModelQuantizer(QConfig.get_default_config("UINT8_DYNAMIC_QUANT")).quantize_model(unknown)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_of_double_precision_is_told_so(preset: str) -> None:
    """What scikit-learn and TensorFlow export of float64 data."""
    text = "g (double[n, 4] x) => (double[n, 3] y) { h = MatMul(x, w) c = Relu(h) y = Add(c, b) }"
    proto = models.model(text, {"w": np.eye(4, 3), "b": np.ones(3)})
    with pytest.raises(ModelError, match=r"MatMul: it computes in float64: export it in float32"):
        ModelQuantizer(QConfig.get_default_config(preset)).quantize_model(proto, None, [{"x": np.ones((2, 4))}])


def test_a_failed_job_keeps_an_older_file(tmp_path: Path) -> None:
    out = tmp_path / "q.onnx"
    out.write_bytes(b"older")
    with pytest.raises(DataError):
        ModelQuantizer(int8()).quantize_model(MODEL, out, [])
    assert out.read_bytes() == b"older" and os.listdir(tmp_path) == ["q.onnx"]


def test_nothing_to_quantize_is_said() -> None:
    proto = models.model("g (float[n,4] x) => (float[n,4] y) { y = Exp(x) }")
    with pytest.raises(ModelError, match=r"nothing in the model can be quantized.*Exp"):
        ModelQuantizer(int8()).quantize_model(proto, None, [{"x": models.normal(2, 4)}])


def half_model() -> onnx.ModelProto:
    weight = models.normal(12, 8, scale=0.3).astype(np.float16)
    bias = models.normal(8).astype(np.float16)
    return models.model("g (float16[n,12] x) => (float16[n,8] y) { y = Gemm(x, w, b) }", {"w": weight, "b": bias})


HALF_FEED = {"x": models.normal(64, 12).astype(np.float16)}


@pytest.mark.parametrize("options", [{}, {"QuantizeFP16": True, "UseFP32Scale": False}, {"ConvertFP16ToFP32": True}])
def test_float16_models_are_quantized_as_they_are_or_converted(options: dict[str, bool]) -> None:
    proto = half_model()
    result = ModelQuantizer(int8(**options)).quantize_model(proto, None, [HALF_FEED])
    assert result is not None
    onnx.checker.check_model(result, full_check=True)
    converted = options.get("ConvertFP16ToFP32", False)
    feed = {"x": HALF_FEED["x"].astype(np.float32 if converted else np.float16)}
    found = models.run(result, feed)[0]
    assert found.dtype == feed["x"].dtype
    assert sqnr(models.run(proto, HALF_FEED)[0].astype(np.float32), found.astype(np.float32)) > 28
    scales = {t.data_type for t in result.graph.initializer if t.name.endswith("_scale")}
    assert scales == {onnx.TensorProto.FLOAT16 if options.get("UseFP32Scale") is False else onnx.TensorProto.FLOAT}


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "XINT8"])
def test_a_converted_float16_model_is_compared_timed_and_reported(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The samples are those of the float16 model; the quantized one takes them as float32."""
    onnx.save(half_model(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=HALF_FEED["x"])
    paths = [str(tmp_path / name) for name in ("m.onnx", "q.onnx")]
    data = ["--data", str(tmp_path / "d.npz"), "--samples", "4", "--report", str(tmp_path / "page.html")]
    words = ["onnx", "quantize", paths[0], "-o", paths[1], "-p", preset, "--set", "ConvertFP16ToFP32=true", *data]
    assert main(words) == 0
    found = capsys.readouterr().out
    assert "accuracy  good" in found and "times as fast as float here" in found
    assert main(["onnx", "compare", *paths, *data]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"WeightScaled": True}, "bfloat16"),
    ],
)
def test_float16_options_that_contradict_the_model_are_refused(options: dict[str, bool], message: str) -> None:
    with pytest.raises(QuarkError, match=message):
        ModelQuantizer(int8(**options)).quantize_model(half_model(), None, [HALF_FEED])


@pytest.mark.parametrize("option", ["QuantizeFP16", "UseFP32Scale"])
def test_float16_options_need_a_float16_model(option: str) -> None:
    with pytest.raises(ModelError, match=f"{option}.*float16 model"):
        ModelQuantizer(int8(**{option: True})).quantize_model(MODEL, None, FEEDS)


def test_weights_above_two_gigabytes_need_a_path() -> None:
    assert issubclass(ModelError, QuarkError)


# ---- manners --------------------------------------------------------------------------------------------------------


def test_the_callers_process_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.random.seed(5)  # noqa: NPY002 - the caller's global generator is what is watched
    expected = np.random.RandomState(5).rand()
    filters, level, handlers = list(warnings.filters), logging.getLogger().level, list(logging.getLogger().handlers)
    feeds = [{name: array.copy() for name, array in feed.items()} for feed in FEEDS]
    ModelQuantizer(int8(UseRandomData=True)).quantize_model(MODEL, tmp_path / "q.onnx")
    ModelQuantizer(int8()).quantize_model(MODEL, tmp_path / "q.onnx", feeds)
    assert list(warnings.filters) == filters
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == (level, handlers)
    assert Path.cwd() == tmp_path and os.listdir() == ["q.onnx"]
    assert np.random.rand() == expected  # noqa: NPY002
    assert all(np.array_equal(a["image"], b["image"]) for a, b in zip(feeds, FEEDS, strict=True))


def test_the_summary_is_printed_unless_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    ModelQuantizer(int8()).quantize_model(MODEL, None, FEEDS)
    assert capsys.readouterr().out == ""
    ModelQuantizer(QConfig()).quantize_model(MODEL, None, FEEDS)
    assert "Conv" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: get_default_config("XINT88"), "unknown preset 'XINT88'. Did you mean 'XINT8'"),
        (lambda: QConfig(target="gpu"), "unknown target 'gpu'"),  # type: ignore[arg-type]
        (lambda: QConfig(extra_options={"UseRandomDatas": True}), "Did you mean 'UseRandomData'"),
        (lambda: QConfig(QLayerConfig(input_tensors=Int8Spec())), "the field weight is required"),
        (lambda: QConfig(QLayerConfig(weight=Int8Spec())), "input_tensors is required"),
        (lambda: Int8Spec(symmetric="yes"), "symmetric must be True or False"),
        (lambda: Int8Spec(calibration_method="MinMax"), "CalibMethod.MinMax"),
        (lambda: Int8Spec(data_type=np.int8), "data type class such as Int8"),
        (lambda: ModelQuantizer("A8W8"), "needs a QConfig or a Config"),  # type: ignore[arg-type]
        (lambda: Config("XINT8"), "get_default_config"),  # type: ignore[arg-type]
    ],
)
def test_a_configuration_that_cannot_work_is_refused_when_it_is_made(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("name", ["XINT8", "XINT8_CONFIG", "XINT8_QCONFIG"])
def test_a_preset_is_known_with_and_without_its_suffix(name: str) -> None:
    assert get_default_config(name).layer == get_default_config("XINT8").layer


def test_the_cpu_target_shifts_asymmetric_codes_without_moving_a_scale() -> None:
    """int8 with any zero point is uint8 with one that is 128 higher: the same values."""
    rows = {}
    for target in ("any", "cpu"):
        config = get_default_config("S8S8_AAWS")
        config.target = target
        config.extra_options.update(PrintSummary=False, UseRandomData=True)
        plan = ModelQuantizer(Config(config)).run(models.cnn()).plan
        rows[target] = {row.name: row for row in plan if row.role == "activation"}
    both = [(row, rows["cpu"][name]) for name, row in rows["any"].items() if name in rows["cpu"]]
    assert len(both) > 3 and {row.spec.format for row, _ in both} == {"int8"}
    for row, shifted in both:
        assert shifted.spec.format == "uint8" and np.array_equal(shifted.scale, row.scale)
        assert np.array_equal(shifted.zero_point, np.asarray(row.zero_point) + 128)
