"""A calibration method is one row for both flows: the change drill with a made-up one, every built-in one in torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from tests.onnx_flow import models
from torch import nn

import quark
import quark.onnx as q
from quark.config import presets
from quark.config.options import Options
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError, known
from quark.numerics.granularity import Channel, Group, Tensor
from quark.observers import SEARCHES, registry
from quark.onnx.calibration import find_ranges
from quark.onnx.qdq.parameters import from_range, weight_range
from quark.onnx.qdq.settings import request_of
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.fake_quantize import FakeQuantize
from quark.torch.observer import SearchObserver
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype
from quark.torch.stage import Stage

F32 = np.float32
RNG = np.random.default_rng(23)
X = (RNG.normal(size=(6, 20)) ** 3).astype(np.float32)
W = (RNG.normal(size=(20, 8)) ** 3).astype(np.float32)
SCHEMES: dict[str, dict[str, Any]] = {
    "per_tensor": {},
    "per_channel": {"ch_axis": 0},
    "per_group": {"ch_axis": -1, "group_size": 5},
    "per_block": {"block_size": (3, 8)},  # blocks at the edges are smaller
}


def three_sigma(statistic: Any, grid: Any, factor: float = 3.0) -> tuple[float, float]:
    """The mean and so many standard deviations to both sides: made up for this test."""
    values, weights = statistic.points()
    mean = np.average(values, weights=weights)
    spread = np.sqrt(np.average(np.square(values - mean), weights=weights))
    return mean - factor * spread, mean + factor * spread


@pytest.fixture
def made_up() -> Iterator[str]:
    quark.register_calibration("three_sigma", three_sigma)
    yield "three_sigma"
    quark.unregister_calibration("three_sigma")


def config_of(scheme: str, method: str, **settings: Any) -> QTensorConfig:
    fields = {"narrow": True, "calibration_method": method, "calibration_settings": settings or None}
    return QTensorConfig(Dtype.int8, qscheme=scheme, **SCHEMES[scheme], **fields)


def torch_model(weight: QTensorConfig, inputs: QTensorConfig | None = None) -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 8, bias=False))
    model[0].weight.data = torch.from_numpy(W.T.copy())
    config = QConfig(QLayerConfig(input_tensors=inputs, weight=weight))
    return ModelQuantizer(config).quantize_model(model, [torch.from_numpy(X)])


@pytest.mark.parametrize("settings", [{}, {"factor": 2.0}], ids=["usual", "settings"])
@pytest.mark.parametrize("channels", [True, False], ids=["channel", "tensor"])
def test_a_made_up_method_finds_the_same_ranges_in_both_flows(
    made_up: str, channels: bool, settings: dict[str, Any]
) -> None:
    kind = q.QuantGranularity.Channel if channels else q.QuantGranularity.Tensor
    proto = models.model("g (float[n,20] x) => (float[n,8] y) { y = MatMul(x, w) }", {"w": W})
    own = {"calibration_method": made_up, "calibration_settings": settings or None}
    weight = q.QTensorConfig.from_dict(q.QTensorConfig(quant_granularity=kind, **own).to_dict())
    layer = q.QLayerConfig(q.QTensorConfig(**own), weight)
    options = {"PrintSummary": False, "OpTypesToExcludeOutputQuantization": ["MatMul"]}
    result = q.ModelQuantizer(q.QConfig(layer, extra_options=options)).run(proto, None, [{"x": X}])
    session = onnxruntime.InferenceSession(result.proto.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": X})[0]
    scheme = "per_channel" if channels else "per_tensor"
    model = torch_model(config_of(scheme, made_up, **settings), config_of("per_tensor", made_up, **settings))
    for name, quantizer in (("w", model[0].weight_quantizer), ("x", model[0].input_quantizer)):
        assert result.plan.tensors[name].spec.method == quantizer.stage.spec.method == made_up
        assert made_up in quantizer.extra_repr()
        assert dict(result.plan.tensors[name].spec.settings) == settings
        np.testing.assert_array_equal(np.reshape(result.plan.tensors[name].scale, -1), quantizer.scale.reshape(-1))
    with torch.no_grad():
        expected = model(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert float(model[0].weight_quantizer.scale.max()) < np.abs(W).max() / 127  # it clips: not min/max


def test_a_made_up_method_goes_to_files_and_back(made_up: str, tmp_path: Path) -> None:
    model = torch_model(config_of("per_group", made_up, factor=2.0))
    export_safetensors(model, tmp_path / "m")
    fresh = import_model_from_safetensors(nn.Sequential(nn.Linear(20, 8, bias=False)), tmp_path / "m")
    with torch.no_grad():
        assert torch.equal(fresh(torch.from_numpy(X)), model(torch.from_numpy(X)))
    del SEARCHES[made_up]
    try:
        with pytest.raises(ConfigError, match="three_sigma"):
            import_model_from_safetensors(nn.Sequential(nn.Linear(20, 8, bias=False)), tmp_path / "m")
    finally:
        quark.register_calibration(made_up, three_sigma)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", sorted(set(SEARCHES) - {"distribution", "mse_most_common"}))
def test_every_method_works_for_every_scheme_of_torch(method: str, scheme: str) -> None:
    """Each scale is what the method finds in the elements of that scale alone."""
    quantizer = torch_model(config_of(scheme, method))[0].weight_quantizer
    granularity, grid = quantizer.granularity, quantizer.stage.grid
    weight, row = np.ascontiguousarray(W.T), SEARCHES[method]
    numbers = np.arange(quantizer.scale.numel()).reshape(granularity.parameter_shape(weight.shape))
    owner = np.broadcast_to(np.asarray(granularity.expand(numbers, weight.shape)), weight.shape)
    for number, scale in enumerate(quantizer.scale.reshape(-1).tolist()):
        alone = weight[owner == number]
        if row.rows is None:
            statistic = row.observe({})
            statistic.update(alone)
            lo, hi = row.find(statistic, grid, {})
        else:  # a weight is searched by the codes that are stored
            lo, hi = (float(side[0]) for side in row.of_rows(alone.reshape(1, -1), grid, {}))
        assert scale == float(grid.parameters(lo, hi)[0])


def scales_of_onnx(spec: TensorSpec, samples: list[np.ndarray], weight: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points as the ONNX flow finds them."""
    if weight:
        return from_range(spec, *weight_range(samples[0], spec, "w"), False)
    request = request_of(spec, Options())
    statistic = request.search.observe(request.settings)
    for sample in samples:
        statistic.update(sample)
    return from_range(spec, *find_ranges({"x": request}, {"x": statistic})["x"], False)


def scales_of_torch(spec: TensorSpec, samples: list[np.ndarray], weight: bool) -> tuple[np.ndarray, np.ndarray]:
    """The same as the torch flow finds them."""
    quantizer = FakeQuantize(Stage(spec, SearchObserver), "x", constant=weight)
    quantizer.start(torch.device("cpu"))
    for sample in samples:
        quantizer(torch.from_numpy(sample))
    quantizer.finish()
    return known(quantizer.scale, "scale").numpy(), known(quantizer.zero_point, "zero point").numpy()


def outlier(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[1, 3] = 1e4
    return x


#: Values whose ranges are hard to find, made of normal ones.
DATA: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "normal": np.asarray,
    "an outlier": outlier,
    "constant": lambda x: np.full_like(x, -0.7),
    "zeros": np.zeros_like,
    "near zero": lambda x: x * F32(1e-30),
    "one-sided": lambda x: np.abs(x) + F32(0.5),
    "tiny": lambda x: x * F32(1e-8),
    "huge": lambda x: x * F32(1e30),
    "skewed": np.exp,
    "float16": lambda x: x.astype(np.float16),
    "large": lambda x: np.tile(x, (16, 32)) * np.linspace(1, 2, 2048, dtype=F32),  # values are passed over
}
FOR_WEIGHTS = {"minmax", "mse"}


@pytest.mark.parametrize("name", DATA)
def test_both_flows_find_the_same_ranges_for_the_same_data(name: str) -> None:
    """Every method, of activations and of weights, but MinMax under powers of two, which never overflows in ONNX."""
    samples = [DATA[name](np.random.default_rng(5 + k).normal(size=(8, 64)).astype(F32)) for k in (0, 1)]
    weights = itertools.product((True,), sorted(FOR_WEIGHTS), (Tensor(), Channel(0), Group(-1, 32)))
    inputs = itertools.product((False,), sorted(set(SEARCHES) - {"mse_most_common", "distribution"}), (Tensor(),))
    for (weight, method, kind), format, symmetric, rule in itertools.product(
        (*weights, *inputs), ("int8", "uint8", "int4", "fp8_e4m3"), (True, False), ("float32", "power_of_two")
    ):
        unlike = rule == "power_of_two" and (method in ("minmax", "moving_minmax"))
        if unlike or (format == "fp8_e4m3" and not symmetric) or (name == "large" and kind != Tensor()):
            continue
        spec = TensorSpec(format, granularity=kind, symmetric=symmetric, method=method, scale_rule=rule)
        (scale, zero), (other, other_zero) = (
            of(spec, samples[: 2 - weight], weight) for of in (scales_of_onnx, scales_of_torch)
        )
        np.testing.assert_allclose(np.ravel(scale), np.ravel(other), 1e-6, err_msg=f"{spec.describe()}, {weight=}")
        if spec.row.has_zero_point:
            np.testing.assert_array_equal(np.ravel(zero), np.ravel(other_zero), f"{spec.describe()}, {weight=}")


def test_methods_with_needs_of_their_own_work_where_these_are_met() -> None:
    fp8 = QTensorConfig(Dtype.fp8_e4m3, qscheme="per_channel", ch_axis=0, calibration_method="distribution")
    assert "distribution" in torch_model(fp8)[0].weight_quantizer.extra_repr()
    with pytest.raises(ConfigError, match="FP8"):
        torch_model(config_of("per_tensor", "distribution"))
    votes = QTensorConfig(Dtype.int8, qscheme="per_tensor", scale_type="pof2", calibration_method="mse_most_common")
    assert torch_model(votes)[0].weight_quantizer.scale.log2().frac().item() == 0


def test_what_cannot_be_is_refused(made_up: str) -> None:
    for change, words in (
        ({"calibration_method": "tree_sigma"}, "Did you mean 'three_sigma'"),
        ({"calibration_method": made_up, "calibration_settings": {"facto": 2}}, "Did you mean 'factor'"),
        ({"calibration_method": made_up, "observer_cls": registry_observer()}, "give one of them"),
        ({"calibration_settings": {"factor": 2}}, "there is none"),
    ):
        with pytest.raises(ConfigError, match=words):
            QTensorConfig(Dtype.int8, qscheme="per_tensor", **change)
    with pytest.raises(ConfigError, match="no range to find"):
        QTensorConfig(Dtype.bfloat16, calibration_method=made_up)
    with pytest.raises(
        ConfigError, match="mxfp4 brings the scales of its blocks: the calibration method 'three_sigma'"
    ):
        q.MXFP4E2M1Spec(calibration_method=made_up).to_spec()
    for name in (made_up, "percentile"):
        with pytest.raises(ConfigError, match=f"'mxfp4:{name}/int8': mxfp4 brings the scales of its blocks"):
            presets.layer_of_types(f"mxfp4:{name}/int8")
        assert presets.layer_of_types(f"nvfp4:{name}/int8").inputs.method == name  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="calibration_method"):
        q.QTensorConfig(calibration_method="tree_sigma")
    for arguments, words in itertools.chain(
        [(("minmax", three_sigma), "exists already"), (("no name", three_sigma), "identifier")],
        [(("other", three_sigma, "histogramm"), "Did you mean 'histogram'"), (("other", 3), "callable")],
    ):
        with pytest.raises(ConfigError, match=words):
            quark.register_calibration(*arguments)  # type: ignore[arg-type]
    for method, given, words in (
        (made_up, {"facto": 2}, "Did you mean 'factor'"),
        (q.CalibMethod.Percentile, {"percentile": 99.0}, "are options"),
    ):
        with pytest.raises(ConfigError, match=words):
            q.QTensorConfig(calibration_method=method, calibration_settings=given).to_spec()
    for name, words in (("minmax", "built in"), ("tree_sigma", "not registered; registered: three_sigma")):
        with pytest.raises(ConfigError, match=words):
            quark.unregister_calibration(name)
    with pytest.raises(ConfigError, match="at most 65536"):
        registry.rows_of(made_up, registry.MOST_ROWS + 1, None, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("typed", {"factor": "high"}, "the calibration method 'typed': factor='high' must be a finite number"),
        ("typed", {"factor": float("nan")}, "factor=nan must be a finite number"),
        ("typed", {"factor": True}, "factor=True must be a finite number"),
        ("typed", {"rounds": 2.5}, "rounds=2.5 must be an integer"),
        ("typed", {"mode": 3}, "mode=3 must be text"),
        ("typed", {"both": 1}, "both=1 must be True or False"),
        ("typed", {"bins": "many"}, "bins='many' must be an integer"),
        ("mse", {"symmetric": 3}, "symmetric=3 must be True or False or None"),
        ("layerwise_percentile", {"candidates": 5}, "candidates=5 must be a list"),
        ("layerwise_percentile", {"candidates": ["a"]}, "must be a list, each entry of its type"),
        ("entropy", {"levels": 0}, "levels of the calibration method entropy is 0; it must be 1 or more"),
        ("mse_percentile", {"percentile": 300}, "Percentile is 300; it must be between 0 and 100"),
        ("moving_minmax", {"constant": 5}, "the constant of a moving average is 5; it must be between 0 and 1"),
    ],
)
def test_settings_are_of_their_types(method: str, settings: dict[str, Any], words: str) -> None:
    """As annotated or, where nothing is, of the type of the default; both flows ask the row of the method."""

    def typed(statistic: Any, grid: Any, factor=3, rounds: int = 2, mode="a", both=False, free=None) -> Any:  # type: ignore[no-untyped-def]
        return statistic.lo, statistic.hi

    quark.register_calibration("typed", typed)
    try:
        torch_model(config_of("per_tensor", "typed", factor=2, free=[1], both=True))
        with pytest.raises(ConfigError, match=re.escape(words)):
            torch_model(config_of("per_tensor", method, **settings))
        if method == "typed":
            with pytest.raises(ConfigError, match=re.escape(words)):
                q.QTensorConfig(calibration_method=method, calibration_settings=settings).to_spec()
    finally:
        quark.unregister_calibration("typed")


@pytest.mark.parametrize(
    "returned", [None, 1.0, (0.0, 1.0, 2.0), (np.nan, 1.0), (1.0, -1.0), ("0", "1"), (W, W), W[:2, :1]]
)
def test_a_search_that_returns_no_range_is_named(returned: Any) -> None:
    quark.register_calibration("odd", lambda statistic, grid: returned, "extremes")
    try:
        with pytest.raises(ConfigError, match=r"method 'odd' must return two finite numbers \(lo, hi\)"):
            torch_model(config_of("per_tensor", "odd"))
    finally:
        quark.unregister_calibration("odd")


def test_so_many_statistics_are_kept_and_no_more(made_up: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MOST_ROWS", 2)
    assert len(registry.rows_of(made_up, 2, None, {})[2]) == 2  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at most 2, and this tensor has 3 scales"):
        registry.rows_of(made_up, 3, None, {})  # type: ignore[arg-type]


def registry_observer() -> Any:
    from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver

    return PerTensorMinMaxObserver


def test_rows_hold_every_element_once() -> None:
    rows = Group(-1, 8).elements(W.T)
    assert sorted(np.concatenate(rows).tolist()) == sorted(W.reshape(-1).tolist())
