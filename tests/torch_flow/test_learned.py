"""Scales that training learns: gradients against finite differences, persistence, starts, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.torch_flow.models import TwoLayers, data
from torch import nn

from quark.errors import ConfigError
from quark.torch import ModelQuantizer, learned_scales
from quark.torch.fake_quantize import calibrate_with
from quark.torch.learned import LearnedScale, LearnedStep, LearnedThreshold, learning_quantizer
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig, TQTSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType, TQTThresholdInitMeth
from quark.torch.quantization.observer import LSQObserver, PerTensorMSEObserver, TQTObserver

GENERATOR = torch.Generator().manual_seed(5)


def config(dtype: str = "int4", observer: type = LSQObserver, scheme: str = "per_tensor", **more: Any) -> QTensorConfig:
    axis = {"ch_axis": 0} if scheme == "per_channel" else {}
    return QTensorConfig(Dtype[dtype], observer_cls=observer, qscheme=QSchemeType[scheme], **axis, **more)


def quantizer(found: QTensorConfig, x: torch.Tensor, constant: bool = True) -> LearnedScale:
    made = learning_quantizer((found.to_stage(),), "w", constant)
    assert isinstance(made, LearnedScale)
    calibrate_with(made, x)
    return made


def slope(function: Callable[[float], float], at: float, width: float = 1e-6) -> float:
    return (function(at + width) - function(at - width)) / (2 * width)


@pytest.mark.parametrize(("dtype", "symmetric"), [("int4", True), ("int3", True), ("uint4", False)])
def test_lsq_gradient_is_the_slope_of_the_surrogate(dtype: str, symmetric: bool) -> None:
    """Rounding is a constant offset while x/s is inside, and y = s * bound outside: LSQ, equations 3 and 5."""
    x = torch.randn(200, generator=GENERATOR) * 2 + (0 if symmetric else 1)
    made = quantizer(config(dtype, symmetric=symmetric), x)
    made.scale = made.scale * 0.6  # type: ignore[operator]  # so that values are clipped
    upstream = torch.randn(200, generator=GENERATOR)
    leaf = x.clone().requires_grad_()
    (made(leaf) * upstream).sum().backward()
    scale, zero = float(made.scale), float(made.zero_point)  # type: ignore[arg-type]
    bits = int(dtype[-1])
    low, high = (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    low, high = low - zero, high - zero
    v = x.double().numpy() / scale
    offset = np.rint(v) - v

    def surrogate(s: float) -> float:
        u = x.double().numpy() / s
        y = np.where(v <= low, s * low, np.where(v >= high, s * high, s * (u + offset)))
        return float((y * upstream.double().numpy()).sum())

    factor = 1 / np.sqrt(200 * high)
    assert made.learned is not None and made.learned.grad is not None and leaf.grad is not None
    assert float(made.learned.grad) == pytest.approx(slope(surrogate, scale) * factor, rel=1e-4)
    inside = (v > low) & (v < high)
    assert 0 < inside.sum() < 200
    assert np.array_equal(leaf.grad.numpy(), np.where(inside, upstream.numpy(), 0))


def test_lsq_gradient_of_channels_is_that_of_each_alone() -> None:
    x = torch.randn(3, 40, generator=GENERATOR) * torch.tensor([[1.0], [5.0], [0.1]])
    whole = quantizer(config(scheme="per_channel"), x)
    whole.scale = whole.scale * 0.5  # type: ignore[operator]
    whole(x.clone().requires_grad_()).square().sum().backward()
    for row in range(3):
        alone = quantizer(config(), x[row])
        alone.scale = whole.scale[row].clone()  # type: ignore[index]
        alone(x[row].clone().requires_grad_()).square().sum().backward()
        torch.testing.assert_close(whole.learned.grad[row], alone.learned.grad)  # type: ignore[union-attr, index]


def test_tqt_gradient_is_the_slope_of_the_surrogate() -> None:
    """s = 2^(log2 t + constant): TQT, equations 6 to 8."""
    x = torch.randn(200, generator=GENERATOR) * 3
    made = quantizer(config("int4", TQTObserver), x)
    with torch.no_grad():
        made.learned.fill_(0.7)  # type: ignore[union-attr]
    leaf = x.clone().requires_grad_()
    made(leaf).pow(3).sum().backward()
    scale = 2.0 / 8
    assert float(made.scale) == scale  # type: ignore[arg-type]
    v = x.double().numpy() / scale
    rounded = np.rint(v)
    y = np.clip(rounded, -8, 7) * scale

    def surrogate(log2_t: float) -> float:
        s = scale * 2.0 ** (log2_t - 0.7)
        u = x.double().numpy() / s
        parts = np.where(rounded < -8, -8 * s, np.where(rounded > 7, 7 * s, s * (u + rounded - v)))
        return float((parts * 3 * y**2).sum())

    inside = (rounded >= -8) & (rounded <= 7)
    assert 0 < inside.sum() < 200
    assert float(made.learned.grad) == pytest.approx(slope(surrogate, 0.7), rel=1e-4)  # type: ignore[union-attr, arg-type]
    np.testing.assert_allclose(leaf.grad.numpy(), np.where(inside, 3 * y**2, 0), rtol=1e-5)  # type: ignore[union-attr]


def test_activations_weigh_the_gradient_by_one_sample() -> None:
    x = torch.randn(8, 10, generator=GENERATOR)
    weight, activation = quantizer(config(), x), quantizer(config(), x, constant=False)
    activation.learned.data = weight.learned.data.clone()  # type: ignore[union-attr]  # searched on a histogram
    for made in (weight, activation):
        made(x.clone().requires_grad_()).square().sum().backward()
    ratio = float(activation.learned.grad / weight.learned.grad)  # type: ignore[union-attr, operator]
    assert ratio == pytest.approx(np.sqrt(8), rel=1e-5)


def test_a_bad_scale_is_learned_away_and_stays_learned() -> None:
    """The peer takes the scale from the data again at each step; here only the optimizer moves it."""
    x = torch.randn(500, generator=GENERATOR)
    made = quantizer(config("int4"), x)
    best = float(made.scale)  # type: ignore[arg-type]
    made.scale = made.scale * 4  # type: ignore[operator]
    optimizer = torch.optim.Adam(made.parameters(), 0.01)
    first, steps = None, []
    for _ in range(150):
        loss = (made(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
        steps.append(float(made.scale))  # type: ignore[arg-type]
    assert loss.item() < first / 4  # type: ignore[operator]
    assert all(abs(after - before) < 0.02 for before, after in pairwise(steps))
    assert steps[-1] == pytest.approx(best, rel=0.25)
    made(x * 100)
    assert float(made.scale) == steps[-1]  # type: ignore[arg-type]


def test_training_and_evaluation_compute_the_same_values() -> None:
    x = torch.randn(4, 16, generator=GENERATOR)
    made = quantizer(config("int8", scheme="per_channel"), x)
    with torch.no_grad():
        expected = made(x)
    assert torch.equal(made(x.clone().requires_grad_()), expected)
    assert not expected.requires_grad


def test_lsq_starts_at_the_least_squared_error() -> None:
    x = torch.randn(1000, generator=GENERATOR)
    made = quantizer(config("int3"), x)
    twin = QTensorConfig(Dtype.int3, observer_cls=PerTensorMSEObserver, qscheme=QSchemeType.per_tensor)
    plain = learning_quantizer((twin.to_stage(),), "w", True)
    calibrate_with(plain, x)
    assert float(made.scale) == float(plain.scale)  # type: ignore[arg-type, union-attr]
    errors = [float((x - (x / s).round().clamp(-4, 3) * s).square().sum()) for s in np.linspace(0.1, 1.5, 300)]
    with torch.no_grad():
        assert float((made(x) - x).square().sum()) <= min(errors) * 1.01


def test_tqt_starts_at_three_deviations_or_least_divergence() -> None:
    x = torch.randn(20000, generator=GENERATOR) * 0.5 + 0.1
    x[0] = 40.0
    made = quantizer(config("int8", TQTObserver), x)
    expected = np.log2(abs(float(x.double().mean())) + 3 * float(x.double().std()))
    assert made.learned.item() == pytest.approx(expected, abs=1e-3)  # type: ignore[arg-type]
    assert float(made.scale) == 2.0 ** np.ceil(expected) / 128  # type: ignore[arg-type]
    spec = TQTSpec(threshold_init_meth=TQTThresholdInitMeth._KL_J)
    other = quantizer(config("int8", TQTObserver, qat_spec=spec), x)
    assert other.learned.item() != made.learned.item()  # type: ignore[arg-type]
    assert 2 ** other.learned.item() < 40  # type: ignore[arg-type]


def test_tqt_never_starts_beyond_the_data() -> None:
    x = torch.tensor([-1.0, 1.0] * 10)
    made = quantizer(config("int8", TQTObserver), x)
    assert made.learned.item() == 0.0  # type: ignore[arg-type]


def quantized(weight: QTensorConfig, inputs: QTensorConfig | None = None) -> nn.Module:
    found = QConfig(QLayerConfig(weight=weight, input_tensors=inputs))
    return ModelQuantizer(found).quantize_model(TwoLayers(), data())


def test_eager_layers_learn_and_are_saved() -> None:
    model = quantized(config(scheme="per_channel"), config("uint4"))
    named = dict(learned_scales(model))
    assert {name.removesuffix(".learned") for name in named} == {
        f"{layer}.{slot}_quantizer" for layer in ("fc1", "fc2") for slot in ("input", "weight")
    }
    before = {name: value.detach().clone() for name, value in named.items()}
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for x in data():
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert all(not torch.equal(before[name], value) for name, value in named.items())
    model.eval()
    expected = model(data()[0])
    other = quantized(config(scheme="per_channel"), config("uint4")).eval()
    other(data()[0])
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(data()[0]), expected)
    assert torch.equal(copy.deepcopy(model)(data()[0]), expected)


def test_a_model_in_eval_follows_a_scale_that_changed() -> None:
    model, x = quantized(config("int8")).eval(), data()[0]
    with torch.no_grad():
        before = model(x)
        dict(learned_scales(model))["fc1.weight_quantizer.learned"].mul_(3)
        after = model(x)
    assert not torch.equal(before, after)


def test_scales_stay_float32_when_the_model_becomes_half() -> None:
    model = quantized(config("int8"), config("int8", TQTObserver)).to(torch.bfloat16)
    assert {value.dtype for _, value in learned_scales(model)} == {torch.float32}
    assert model(data()[0].to(torch.bfloat16)).dtype == torch.bfloat16


def test_freeze_ends_learning_and_keeps_the_values() -> None:
    model, x = quantized(config("int4"), config("uint4")).eval(), data()[0]
    with torch.no_grad():
        expected = model(x)
        frozen = ModelQuantizer.freeze(model)
        assert torch.equal(frozen(x), expected)
    assert not any(value.requires_grad for _, value in learned_scales(frozen))


def test_a_shared_weight_with_two_learned_scales_is_frozen_twice() -> None:
    model = TwoLayers()
    model.fc2 = nn.Linear(32, 32)
    model.fc1 = nn.Linear(32, 32)
    model.fc2.weight = model.fc1.weight
    ModelQuantizer(QConfig(QLayerConfig(weight=config("int4")))).quantize_model(model)
    with torch.no_grad():
        dict(learned_scales(model))["fc2.weight_quantizer.learned"].mul_(2)
    ModelQuantizer.freeze(model)
    assert not torch.equal(model.fc1.weight, model.fc2.weight)


REFUSED = [
    ({"dtype": "int8", "is_dynamic": True}, LSQObserver, "static integers"),
    ({"dtype": "fp8_e4m3"}, LSQObserver, "static integers"),
    ({"dtype": "uint8"}, TQTObserver, "symmetric must be True"),
    ({"dtype": "int8", "scale_type": "pof2"}, LSQObserver, "TQTObserver learns powers of two"),
    ({"dtype": "int8", "qat_spec": TQTSpec()}, LSQObserver, "belongs to TQTObserver"),
    ({"dtype": "int8", "qat_spec": TQTSpec()}, None, "belongs to observers that learn"),
    ({"dtype": "int8", "qat_spec": "TQT"}, TQTObserver, "must be a TQTSpec"),
    ({"dtype": "uint8", "zero_point_type": "float32", "symmetric": False}, LSQObserver, "integer zero point"),
    ({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}, TQTObserver, "per_tensor, not per_channel"),
]


@pytest.mark.parametrize(("fields", "observer", "words"), REFUSED)
def test_what_cannot_be_learned_is_refused(fields: dict[str, Any], observer: type | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        QTensorConfig(**{"qscheme": "per_tensor", **fields}, observer_cls=observer)


def test_two_stages_cannot_learn() -> None:
    with pytest.raises(ConfigError, match="one stage"):
        QLayerConfig(weight=[config("int8"), config("int4")])


def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(ConfigError, match="_3SD"):
        TQTSpec(threshold_init_meth="3SD")  # type: ignore[arg-type]


def test_the_rows_of_the_paper() -> None:
    x = torch.randn(100, generator=GENERATOR)
    assert isinstance(quantizer(config("int8"), x), LearnedStep)
    assert isinstance(quantizer(config("int8", TQTObserver), x), LearnedThreshold)
