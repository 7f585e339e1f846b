"""Shrinkage against its equation, and what it is for: samples that are fewer than the inputs of a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quark.algorithms.adaquant import adaquant
from quark.algorithms.adaround import Codes, adaround
from quark.algorithms.reconstruction import Data, Settings, TrainedLayer
from quark.algorithms.shrinkage import pull_of

torch = pytest.importorskip("torch")
STEPS = Settings(iterations=300, learning_rate=0.05)
INPUTS, OUTPUTS, CODE = 32, 16, 0.04


def product(x, weight, bias):
    return x @ weight if bias is None else x @ weight + bias


def round_it(weight):
    return CODE * torch.round(weight / CODE)


def problem(rows: int, seed: int) -> tuple[TrainedLayer, Data, Data]:
    """A layer whose inputs do not depend on each other, its samples, and as many as needed that it has not seen."""
    rng = np.random.default_rng(seed)
    weight = rng.uniform(-0.3, 0.3, (INPUTS, OUTPUTS)).astype(np.float32)
    layer = TrainedLayer("layer", product, weight, channel_axis=-1, linear=product)
    parts = []
    for count in (rows, 2000):
        x = rng.standard_normal((count, 1, INPUTS)).astype(np.float32) * np.linspace(0.2, 2, INPUTS, dtype=np.float32)
        rounded = np.round(x * 4) / 4  # what the quantized model feeds the layer
        parts.append(Data(list(rounded), list(x), [one @ weight for one in x]))
    return layer, *parts


def error_of(data: Data, weight: np.ndarray) -> float:
    return float(np.mean([np.square(x @ weight - y).sum() for x, y in zip(data.inputs, data.targets, strict=True)]))


def test_the_energy_of_a_product_and_the_gradient_are_those_of_the_equation() -> None:
    layer, data, _ = problem(20, 0)
    pull = pull_of(torch, layer, data, "cpu")
    share = INPUTS**2 / (20**2 + INPUTS**2)
    assert pull is not None and pull.share == pytest.approx(share)
    energy = np.mean([np.square(x[0]) for x in data.inputs], 0)[:, None]
    at, first = (np.random.default_rng(k).standard_normal(layer.weight.shape).astype(np.float32) for k in (1, 2))
    expected = (1 - share) * first + share * 2 * energy * (at - layer.weight)
    found = pull.mixed(torch.from_numpy(first.copy()), torch.from_numpy(at))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_energy_of_a_convolution_counts_every_position(groups: int) -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((8, 8 // groups, 3, 3)).astype(np.float32)

    def conv(x, w, b):
        return torch.nn.functional.conv2d(x, w, b, padding=1, groups=groups)

    shapes = [(1, 8, 2, 2), (1, 8, 3, 2), (1, 8, 2, 2)]  # of different sizes
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    targets = [conv(torch.from_numpy(x), torch.from_numpy(weight), None).numpy() for x in inputs]
    layer = TrainedLayer("conv", lambda x, w, b: conv(x, w, b).relu(), weight, channel_axis=1, linear=conv)
    pull = pull_of(torch, layer, Data(inputs, inputs, targets), "cpu")
    positions, fan_in = 4 + 6 + 4, 8 // groups * 9
    share = fan_in**2 / (positions**2 + fan_in**2)
    assert pull is not None and pull.share == pytest.approx(share)
    columns = [torch.nn.functional.unfold(torch.from_numpy(x), 3, padding=1).numpy()[0] for x in inputs]
    squares = sum(np.square(column).sum(1) for column in columns).reshape(8, 3, 3) / positions
    own = squares.reshape(groups, 8 // groups, 3, 3).repeat(8 // groups, axis=0)  # every output reads its own group
    np.testing.assert_allclose(np.broadcast_to(pull.force.numpy(), own.shape), 2 * share * own, rtol=1e-4)
    np.testing.assert_allclose(pull.rest.numpy(), 2 * share * own * weight, rtol=1e-4, atol=1e-6)


def test_many_samples_decide_alone_unless_a_floor_is_set_and_norms_always_do() -> None:
    layer, data, _ = problem(32 * 8, 0)
    assert pull_of(torch, layer, data, "cpu") is None
    pull = pull_of(torch, layer, data, "cpu", floor=0.1)
    assert pull is not None and pull.share == 0.1
    layer, data, _ = problem(4, 0)
    assert pull_of(torch, replace(layer, linear=None), data, "cpu") is None


@pytest.mark.parametrize("kind", ["adaround", "adaquant"])
def test_few_samples_do_no_harm_on_others(kind: str) -> None:
    """Inputs that do not depend on each other: rounding to nearest is best, and eight samples cannot know better."""
    harm: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(5):
        layer, data, others = problem(8, seed)
        codes = Codes(np.float32(CODE), np.int32(0), -8, 7)
        nearest = error_of(others, CODE * np.round(layer.weight / CODE))
        for on, errors in harm.items():
            settings = replace(STEPS, shrinkage=on)
            if kind == "adaround":
                found = adaround(layer, codes, data, settings).weight
            else:
                found = adaquant(layer, round_it, None, data, replace(settings, learning_rate=1e-3)).weight
            errors.append(error_of(others, CODE * np.round(found / CODE)) / nearest)
    assert np.mean(harm[False]) > 1.2
    assert np.mean(harm[True]) < 1.05 and np.max(harm[True]) < 1.1
