"""Observers: the ranges they find, against definitions written out and brute force, and one of a user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.torch_flow import oracle
from torch import nn

from quark.config.tensor import TensorSpec
from quark.errors import DataError
from quark.numerics.affine import Coding
from quark.numerics.granularity import Channel, Granularity, Group
from quark.observers.registry import SEARCHES, RangeMethod
from quark.torch import ModelQuantizer
from quark.torch.observer import SearchObserver
from quark.torch.quantization.config.config import (
    Int8PerTensorSpec,
    OCP_MXFP4DiffsSpec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
)
from quark.torch.quantization.config.type import Dtype, QSchemeType, RoundType, ScaleType, ZeroPointType
from quark.torch.quantization.observer import observer as observers
from quark.torch.quantization.observer.observer import ObserverBase, PerTensorMovingAverageMinMaxObserver

GENERATOR = torch.Generator().manual_seed(11)
NORMAL = torch.randn(64, 64, generator=GENERATOR)
HEAVY = NORMAL * NORMAL.abs() ** 2
SKEWED = NORMAL.exp() - 1


def calibrated(config: QTensorConfig, samples: list[torch.Tensor]) -> Any:
    """The input quantizer of a layer after calibration."""
    model = nn.Sequential(nn.Linear(samples[0].shape[-1], 2))
    ModelQuantizer(QConfig(QLayerConfig(input_tensors=config))).quantize_model(model, samples)
    return model[0].input_quantizer


def tensor_config(
    observer: type[ObserverBase], dtype: str = "int8", symmetric: bool = True, **fields: Any
) -> QTensorConfig:
    return QTensorConfig(Dtype[dtype], observer, False, QSchemeType.per_tensor, symmetric=symmetric, **fields)


def affine_error(x: np.ndarray, lo: float, hi: float, bits: int, symmetric: bool) -> float:
    """Mean squared error of the quantizer of a range."""
    lo, hi = min(lo, 0.0), max(hi, 0.0)
    lowest, highest = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    scale = max(-lo, hi) / ((highest - lowest) / 2) if symmetric else (hi - lo) / (highest - lowest)
    zero = 0 if symmetric else np.rint(-lo / scale)
    codes = np.clip(np.rint(x / scale) + zero, lowest, highest)
    return float(np.square((codes - zero) * scale - x).mean())


def error_of(quantizer: Any, x: torch.Tensor) -> float:
    return float((quantizer(x) - x).double().square().mean())


def test_min_max_runs_over_all_samples() -> None:
    quantizer = calibrated(
        tensor_config(observers.PerTensorMinMaxObserver, "uint8", False), [NORMAL, 3 * NORMAL, NORMAL]
    )
    lo, hi = 3 * float(NORMAL.min()), 3 * float(NORMAL.max())
    scale = (hi - lo) / 255
    assert quantizer.scale.item() == pytest.approx(scale, rel=1e-6)
    assert quantizer.zero_point.item() == round(-lo / scale)


def test_moving_average_weighs_newer_samples_more() -> None:
    class Fast(PerTensorMovingAverageMinMaxObserver):
        constant = 0.5

    samples = [NORMAL, 4 * NORMAL]
    lo, hi = float(NORMAL.min()), float(NORMAL.max())
    weights = np.array([0.5, 1.0])
    averages = [float((weights * [bound, 4 * bound]).sum() / weights.sum()) for bound in (lo, hi)]
    quantizer = calibrated(tensor_config(Fast, "uint8", False), samples)
    assert quantizer.scale.item() == pytest.approx((averages[1] - averages[0]) / 255, rel=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_percentile_cuts_the_tails_the_right_way_round(symmetric: bool) -> None:
    class Percentile(observers.PerTensorPercentileObserver):
        percentile = 99.0

    x = SKEWED
    quantizer = calibrated(tensor_config(Percentile, "int8" if symmetric else "uint8", symmetric), [x[:32], x[32:]])
    values = x.numpy().reshape(-1)
    if symmetric:
        scale = np.quantile(np.abs(values), 0.99) / 127.5
    else:
        scale = (np.quantile(values, 0.995) - np.quantile(values, 0.005)) / 255
    assert quantizer.scale.item() == pytest.approx(scale, rel=0.02)
    assert quantizer(x).max() > 3 * x.std()
    assert quantizer(x).min() < 0.9 * x.min()


@pytest.mark.parametrize(
    "name", ["PerTensorMSEObserver", "PerTensorHistogramObserver", "PerTensorHistogramObserverPro"]
)
@pytest.mark.parametrize(("data", "symmetric"), [(HEAVY, True), (HEAVY, False), (SKEWED, False)])
def test_least_squares_finds_what_brute_force_finds(name: str, data: torch.Tensor, symmetric: bool) -> None:
    """Over the whole histogram, both sides; negatives are kept (the error counts them)."""
    x = data.numpy().astype(np.float64)
    dtype = "int4" if symmetric else "uint4"
    quantizer = calibrated(tensor_config(getattr(observers, name), dtype, symmetric), [data])
    tried = np.linspace(0.05, 1, 60)
    best = min(
        affine_error(x, x.min() * low, x.max() * high, 4, symmetric)
        for low in tried
        for high in ([low] if symmetric else tried)
    )
    assert error_of(quantizer, data) < 1.02 * best
    minmax = calibrated(tensor_config(observers.PerTensorMinMaxObserver, dtype, symmetric), [data])
    assert error_of(quantizer, data) < 0.8 * error_of(minmax, data)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("PerTensorPowOf2MinMaxObserver", {"qscheme": QSchemeType.per_tensor}),
        ("PerTensorPowOf2MinMSEObserver", {"qscheme": QSchemeType.per_tensor}),
        ("PerChannelPowOf2MinMaxObserver", {"qscheme": QSchemeType.per_channel, "ch_axis": 0}),
        ("PerChannelPowOf2MinMSEObserver", {"qscheme": QSchemeType.per_channel, "ch_axis": 0}),
    ],
)
def test_power_of_two_scales(name: str, scheme: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.copy_(HEAVY)
    config = QTensorConfig(Dtype.int4, getattr(observers, name), symmetric=True, **scheme)
    ModelQuantizer(QConfig(QLayerConfig(weight=config))).quantize_model(model)
    scale = model[0].weight_quantizer.scale.numpy()
    assert np.all(np.log2(scale) % 1 == 0)
    rows = HEAVY.numpy().reshape(scale.size, -1).astype(np.float64)
    exact = np.abs(rows).max(1) / 7.5
    if "MinMSE" not in name:
        assert np.array_equal(scale.reshape(-1), 2.0 ** np.rint(np.log2(exact)))
        return
    errors = [
        np.square(np.clip(np.rint(rows / s[:, None]), -8, 7) * s[:, None] - rows).sum(1)
        for s in (2.0 ** (np.rint(np.log2(exact)) - k) for k in range(-1, 8))
    ]
    own = np.square(np.clip(np.rint(rows / scale.reshape(-1, 1)), -8, 7) * scale.reshape(-1, 1) - rows).sum(1)
    assert np.all(own <= 1.05 * np.min(errors, 0))


def test_a_power_of_two_scale_type_holds_for_every_observer() -> None:
    quantizer = calibrated(Int8PerTensorSpec(scale_type="power_of_2").to_quantization_spec(), [NORMAL])
    assert np.log2(quantizer.scale.item()) == np.rint(np.log2(float(NORMAL.abs().max()) / 127.5))


@pytest.mark.parametrize(("kind", "dtype"), [(ScaleType.float16, np.float16), (ScaleType.bfloat16, None)])
def test_scale_types_round_the_scale(kind: ScaleType, dtype: Any) -> None:
    quantizer = calibrated(tensor_config(observers.PerTensorMinMaxObserver, scale_type=kind), [NORMAL])
    exact = np.float32(float(NORMAL.abs().max()) / 127.5)
    expected = np.float32(dtype(exact)) if dtype else torch.tensor(exact).bfloat16().float().item()
    assert quantizer.scale.item() == expected


@pytest.mark.parametrize(
    ("method", "rounding"),
    [
        (RoundType.half_even, np.rint),
        (RoundType.floor, np.floor),
        (RoundType.round, lambda v: np.sign(v) * np.floor(np.abs(v) + 0.5)),
    ],
)
def test_round_methods_are_honoured_on_the_cpu(method: RoundType, rounding: Any) -> None:
    x = torch.tensor([[127.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.25, -2.75]])
    quantizer = calibrated(tensor_config(observers.PerTensorMinMaxObserver, round_method=method), [x])
    np.testing.assert_array_equal(quantizer(x).numpy(), np.clip(rounding(x.numpy()), -128, 127))


@pytest.mark.parametrize("dtype", ["uint4", "int4"])
def test_a_real_zero_point_puts_the_smallest_value_on_the_lowest_code(dtype: str) -> None:
    """x = lo + k s with s = (hi - lo) / 15, though 0 is not in the range."""
    model = nn.Sequential(nn.Linear(16, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(NORMAL[:3, :16] + 7)
    weight = model[0].weight.detach().double().numpy()
    config = QTensorConfig(
        Dtype[dtype], qscheme=QSchemeType.per_channel, ch_axis=0, symmetric=False, zero_point_type=ZeroPointType.float32
    )
    ModelQuantizer.freeze(ModelQuantizer(QConfig(QLayerConfig(weight=config))).quantize_model(model))
    lo, hi = weight.min(1, keepdims=True), weight.max(1, keepdims=True)
    scale = (hi - lo) / 15
    np.testing.assert_allclose(model[0].weight.detach(), lo + np.rint((weight - lo) / scale) * scale, rtol=2e-6)
    lowest = -8 if dtype == "int4" else 0
    np.testing.assert_allclose(model[0].weight_quantizer.zero_point, (lowest - lo / scale)[:, 0], rtol=1e-5)


def test_mx_diffs_takes_the_better_of_two_exponents() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(HEAVY)
    spec = OCP_MXFP4DiffsSpec(ch_axis=-1).to_quantization_spec()
    ModelQuantizer.freeze(ModelQuantizer(QConfig(QLayerConfig(weight=spec))).quantize_model(model))
    dtype = oracle.FLOATS["fp4"][0]
    for part in oracle.group(-1, 32)((64, 64)):
        x = HEAVY.numpy()[part]
        top = 2.0 ** (np.ceil(np.log2(np.abs(x).max())) - 2)
        tried = [np.clip(x / s, -6, 6).astype(dtype).astype(np.float32) * np.float32(s) for s in (top, top / 2)]
        errors = [np.square(y - x).sum() for y in tried]
        np.testing.assert_array_equal(model[0].weight.detach().numpy()[part], tried[int(errors[1] < errors[0])])


class AbsoluteMean(ObserverBase):
    """A user's own: three times the mean magnitude."""

    def __init__(self, spec: Any, device: Any = None) -> None:
        super().__init__(spec, device)
        self.means: list[torch.Tensor] = []

    def observe(self, x: torch.Tensor) -> None:
        self.means.append(x.abs().mean())

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        widest = 3 * torch.stack(self.means).mean()
        return -widest, widest


def test_an_observer_of_ones_own() -> None:
    quantizer = calibrated(tensor_config(AbsoluteMean), [NORMAL, 2 * NORMAL])
    assert quantizer.scale.item() == pytest.approx(3 * 1.5 * float(NORMAL.abs().mean()) / 127.5, rel=1e-6)


def test_static_scales_per_position_need_equal_shapes() -> None:
    config = QTensorConfig(Dtype.int8, is_dynamic=False, qscheme=QSchemeType.per_channel, ch_axis=1)
    with pytest.raises(DataError, match=r"input_tensors of '0'.*\[5\].*\[7\].*is_dynamic=True"):
        calibrated(config, [torch.ones(1, 5, 4), torch.ones(1, 7, 4)])


def test_the_searching_channel_observer_is_for_weights() -> None:
    config = QTensorConfig(
        Dtype.int8, observers.PerChannelPowOf2MinMSEObserver, False, QSchemeType.per_channel, ch_axis=-1
    )
    with pytest.raises(DataError, match="takes one sample"):
        calibrated(config, [NORMAL, NORMAL])


@pytest.mark.parametrize("name", ["PerTensorMinMaxObserver", "PerTensorMSEObserver", "PerTensorPercentileObserver"])
def test_values_that_are_not_finite_are_named(name: str) -> None:
    bad = NORMAL.clone()
    bad[3, 4] = torch.inf
    with pytest.raises(DataError, match=r"input_tensors of '0': 0 NaN and 1 infinite values among 4096"):
        calibrated(tensor_config(getattr(observers, name)), [NORMAL, bad])


ONCE = [name for name, row in SEARCHES.items() if row.rows is not None]


@pytest.mark.parametrize("method", ONCE)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", [Channel(0), Channel(1), Group(1, 16), Group(1, 24)], ids=str)
def test_all_scales_of_a_weight_are_found_at_once_and_as_well_as_one_by_one(
    method: str, symmetric: bool, granularity: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = TensorSpec("int4", symmetric, granularity=granularity, method=method)
    alone, weight = SearchObserver(spec), HEAVY[:24, :56]
    alone(weight)
    before = alone.range()

    def error(span: tuple[torch.Tensor, torch.Tensor]) -> float:
        scale, zero = (torch.as_tensor(one) for one in spec.grid.parameters(*(side.numpy() for side in span)))
        made = Coding(spec.grid.format, granularity, narrow=spec.narrow_codes).fake_quantize(weight, scale, zero)
        return float((made - weight).square().sum())

    monkeypatch.setattr(RangeMethod, "find", None)  # nothing looks at one row
    once = SearchObserver(spec)
    once.of_weight = True
    once(weight)
    found = once.range()
    assert found[0].shape == before[0].shape == granularity.parameter_shape(weight.shape)
    assert error(found) <= error(before) * 1.001  # both search by steps
