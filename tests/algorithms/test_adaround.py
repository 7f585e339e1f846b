"""AdaRound and AdaQuant on one layer: against brute force, and the promises of the paper."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest

from quark.algorithms.adaquant import adaquant
from quark.algorithms.adaround import Codes, Rounding, adaround, annealed
from quark.algorithms.reconstruction import Data, Settings, Stopper, TrainedLayer
from quark.errors import ConfigError

torch = pytest.importorskip("torch")
SETTINGS = Settings(iterations=300, learning_rate=0.05)


def problem(rows: int = 3, seed: int = 0) -> tuple[TrainedLayer, Codes, Data]:
    """One neuron per row whose inputs are strongly correlated, so that rounding to nearest is not best."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal((16, 8, 1))
    x = (common + 0.2 * rng.standard_normal((16, 8, 6))).astype(np.float32)
    weight = rng.uniform(-3, 3, (6, rows)).astype(np.float32)
    layer = TrainedLayer("layer", lambda a, w, b: a @ w if b is None else a @ w + b, weight, channel_axis=-1)
    samples = list(x)
    return layer, Codes(np.float32(1.0), np.int32(0), -8, 7), Data(samples, samples, [a @ weight for a in samples])


def error_of(data: Data, weight: np.ndarray) -> float:
    return float(
        np.mean([np.square(x @ weight - y).sum(-1).mean() for x, y in zip(data.inputs, data.targets, strict=True)])
    )


def test_it_comes_near_the_best_of_all_roundings() -> None:
    layer, codes, data = problem()
    found = adaround(layer, codes, data, SETTINGS)
    best = sum(
        min(
            error_of(replace_targets(data, row), np.array(choice)[:, None])
            for choice in itertools.product(*[(np.floor(w), np.floor(w) + 1) for w in layer.weight[:, row]])
        )
        for row in range(3)
    )
    nearest = error_of(data, np.round(layer.weight))
    np.testing.assert_allclose(found.before, nearest, rtol=1e-4)
    np.testing.assert_allclose(found.after, error_of(data, found.weight), rtol=1e-4)
    assert best <= found.after * 1.0001 < 1.5 * best < 0.5 * nearest


def replace_targets(data: Data, row: int) -> Data:
    return replace(data, targets=[y[:, row : row + 1] for y in data.targets])


def test_every_weight_is_one_of_its_two_neighbours_within_the_codes() -> None:
    layer, _, data = problem()
    codes = Codes(np.array([[0.4, 0.5, 0.6]], np.float32), np.array([[0, 1, 0]]), -5, 5)
    found = adaround(layer, codes, data, SETTINGS)
    steps = found.weight / codes.scale
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-5)
    assert (np.round(steps) + codes.zero_point >= -5).all() and (np.round(steps) + codes.zero_point <= 5).all()
    inside = np.abs(layer.weight / codes.scale) < 3.9
    assert (np.abs(steps - layer.weight / codes.scale)[inside] < 1).all()


def test_a_layer_that_gets_worse_is_put_back() -> None:
    layer, codes, data = problem()
    found = adaround(layer, codes, data, replace(SETTINGS, reg_param=0.0, iterations=3, learning_rate=50.0))
    assert not found.kept and found.after == found.before
    np.testing.assert_array_equal(found.weight, layer.weight)


def test_the_start_is_the_float_weight() -> None:
    layer, codes, _ = problem()
    rounding = Rounding(torch, layer.weight, codes, "cpu")
    np.testing.assert_allclose(rounding.soft().numpy(), layer.weight, atol=1e-5)
    np.testing.assert_array_equal(rounding.decided().numpy(), np.round(layer.weight))


def test_the_gradient_is_that_of_the_formula() -> None:
    layer, codes, _ = problem()
    rounding = Rounding(torch, layer.weight, codes, "cpu")
    rounding.v += torch.linspace(-3, 3, rounding.v.numel()).reshape(rounding.v.shape)
    rounding.soft()
    upstream, beta, reg = torch.randn(rounding.v.shape), 5.0, 0.3
    v = rounding.v.double().requires_grad_()
    h = (torch.sigmoid(v) * 1.2 - 0.1).clamp(0, 1)
    weight = torch.clamp(torch.floor(torch.tensor(layer.weight, dtype=torch.float64)) + h, codes.low, codes.high)
    loss = (weight * upstream).sum() + reg * (1 - (2 * h - 1).abs() ** beta).sum()
    (expected,) = torch.autograd.grad(loss, v)
    found = rounding.gradient(upstream.clone(), beta, reg)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-5)


def test_beta_falls_along_a_cosine() -> None:
    settings = Settings(iterations=110, beta_range=(20.0, 2.0))
    values = [annealed(step, 10, settings) for step in (10, 60, 110)]
    np.testing.assert_allclose(values, [20, 11, 2])


def test_early_stopping_watches_stretches() -> None:
    stop = Stopper(Settings(early_stop=True, stretch=2, iterations=100))
    losses = [5.0, 4.0, 3.0, 3.0, 2.0, 5.0]
    assert [stop.ends(torch.tensor(loss)) for loss in losses] == [False] * 5 + [True]
    layer, codes, data = problem()
    fast = replace(SETTINGS, learning_rate=0.2, reg_param=1.0)
    whole, ended = (adaround(layer, codes, data, replace(fast, early_stop=on)) for on in (False, True))
    assert ended.steps < whole.steps == fast.iterations
    np.testing.assert_array_equal(ended.weight, whole.weight)
    quick = replace(SETTINGS, early_stop=True, stretch=3, learning_rate=1e-2)
    assert adaquant(layer, lambda w: (w / 0.25).round() * 0.25, None, data, quick).steps < quick.iterations


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"batch_size": 4}, {"learning_rate": 0.4}, {"iterations": 9}, {"drop_ratio": 0.0}]
)
def test_every_setting_changes_the_result(change: dict[str, float]) -> None:
    layer, _, data = problem()
    data = replace(data, inputs=[x + 0.3 * np.sin(7 * x) for x in data.inputs])
    few = replace(SETTINGS, iterations=30, learning_rate=0.02)
    plain, other = (adaquant(layer, torch.round, None, data, settings) for settings in (few, replace(few, **change)))
    assert not np.array_equal(plain.weight, other.weight)


def test_adjusting_the_rate_depends_on_the_error() -> None:
    layer, codes, data = problem()
    runs = [
        adaround(layer, codes, data, replace(SETTINGS, iterations=50, learning_rate=1e-6, lr_adjust=adjust)).weight
        for adjust in (None, (1e9, 1.0), (1e-9, 1.0))
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_adaquant_trains_through_any_rounding_and_the_bias_when_asked() -> None:
    layer, _, data = problem()
    layer = replace(layer, bias=np.full(3, 0.7, np.float32))
    settings = Settings(iterations=300, learning_rate=0.02)
    fixed = adaquant(layer, torch.round, torch.round, data, settings)
    freed = adaquant(layer, torch.round, torch.round, data, replace(settings, update_bias=True))
    assert fixed.after < 0.8 * fixed.before and freed.after < fixed.after
    np.testing.assert_array_equal(fixed.bias, layer.bias)
    assert freed.bias is not None and not np.array_equal(freed.bias, layer.bias)


def test_the_result_repeats() -> None:
    first, second = (adaround(*problem(), SETTINGS).weight for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="pip install torch"):
        adaround(*problem(), SETTINGS)


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"optim_device.*'xpu:7'"):
        adaround(*problem(), replace(SETTINGS, device="xpu:7"))
