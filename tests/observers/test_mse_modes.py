"""MinMSEModePof2Scale and MinMSEModeFloatScale: the ways to a least squared error that a user may ask for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.observers.test_golden import GOLDEN, NAMES, TYPES, grid, stored
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.numerics.affine import Grid
from quark.numerics.formats import get_format
from quark.observers import SEARCHES, mse_modes
from quark.observers.mse_modes import Votes, rows_by_histogram, rows_by_percentile
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, XInt8Spec

INT8 = get_format("int8")
POW2 = Grid(INT8, scale_rule="power_of_two")
golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden vectors beside the repository")


def scale(span: tuple[float, float]) -> float:
    return float(POW2.parameters(*span)[0])


@golden
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "zeros"])
def test_votes_are_those_of_the_reference(name: str, kind: str) -> None:
    target = grid(kind, "power_of_two")
    settings = {"grid": target}
    votes = SEARCHES["mse_most_common"].observe(settings)
    for batch in stored()[1][name]:
        votes.update(batch)
    found = target.parameters(*SEARCHES["mse_most_common"].find(votes, target, settings))
    oracle = stored()[0][name]["pow2 MinMSE MostCommon"][kind]["x"]
    assert found == (oracle["scale"], oracle["zero_point"])


def test_voters_may_have_zero_points_of_their_own() -> None:
    target = grid("uint8_asym", "power_of_two")
    found = {}
    for symmetric in (True, False):
        settings = {"grid": target, "symmetric": symmetric}
        votes = SEARCHES["mse_most_common"].observe(settings)
        for low in (0.0, 0.0, -1.0):
            votes.update(np.linspace(low, 3.9, 999, dtype=np.float32))
        again = Votes.from_state(votes.state())
        found[symmetric] = target.parameters(*SEARCHES["mse_most_common"].find(again, target, settings))
    assert found == {True: (2**-5, 128), False: (2**-6, 0)}  # codes -4 ... 4 against 0 ... 4


def test_equally_frequent_votes_take_the_smallest_and_survive_a_restart() -> None:
    votes = Votes(POW2)
    for factor in (1.0, 8.0):
        votes.update(np.linspace(-1, 1, 999, dtype=np.float32) * np.float32(factor))
    again = Votes.from_state(votes.state())
    again.update(np.full(5, 0.25, np.float32))
    again.update(np.full(5, 0.25, np.float32))
    assert scale(SEARCHES["mse_most_common"].find(votes, POW2, {})) == 2**-7
    assert scale(SEARCHES["mse_most_common"].find(again, POW2, {})) < 2**-7
    votes.merge(again)
    assert sum(votes.ranges.values()) == 6


def test_votes_need_scales_that_can_agree() -> None:
    votes = Votes(Grid(INT8))
    votes.update(np.ones(4, np.float32))
    with pytest.raises(ConfigError, match="MostCommon needs power-of-two scales"):
        SEARCHES["mse_most_common"].find(votes, Grid(INT8), {})


def test_what_lies_outside_the_percentile_has_no_say() -> None:
    values = np.concatenate([np.linspace(-1, 1, 100), [90.0]]).astype(np.float32)
    spans = {}
    for method, settings in (("mse", {}), ("mse_percentile", {"percentile": 99.0})):
        statistic = SEARCHES[method].observe(settings)
        statistic.update(values)
        spans[method] = scale(SEARCHES[method].find(statistic, POW2, settings))
    assert spans["mse_percentile"] == 2**-7 < spans["mse"] / 30


@golden
@pytest.mark.parametrize("kind", ["int8_sym"])  # the reference leaves out a code of asymmetric weights
@pytest.mark.parametrize("label", ["MinMSE Percentile", "MinMSE Percentile per channel"])
@pytest.mark.parametrize("name", NAMES)
def test_percentile_scales_of_weights_are_those_of_the_reference(name: str, label: str, kind: str) -> None:
    oracle = json.loads((GOLDEN / "calibration.json").read_text())["weights"][name][label][kind]["w"]
    weight = stored()[1][name][0].reshape(8, 4, 8, 8)
    if name == "growing":
        weight = weight * np.exp2(np.arange(-3.0, 5.0)).reshape(8, 1, 1, 1)
    rows = weight.reshape(8, -1) if "channel" in label else weight.reshape(1, -1)
    target = Grid(INT8, kind.endswith("_sym"))
    ours = target.parameters(*rows_by_percentile(rows.astype(np.float32), target))[0]
    np.testing.assert_allclose(ours, np.atleast_1d(oracle["scale"]), rtol=1e-6)


def test_a_histogram_judges_nearly_as_well_as_the_values() -> None:
    rows = models.normal(4, 4096, seed=3)
    by_histogram = rows_by_histogram(rows, Grid(INT8))
    np.testing.assert_allclose(by_histogram[1], np.abs(rows).max(1), rtol=0.3)


WEIGHT = models.normal(16, 16, seed=1)
WEIGHT[0, 0] = 40.0


def quantized(spec: type, **options: object) -> dict[str, float]:
    proto = models.model("g (float[4,16] x) => (float[4,16] y) { y = MatMul(x, w) }", {"w": WEIGHT})
    layer = QLayerConfig(input_tensors=spec(), weight=spec(calibration_method=CalibMethod.MinMSE))
    config = QConfig(layer, extra_options={"PrintSummary": False, **options})
    samples = [{"x": np.full((4, 16), value, np.float32)} for value in (0.1, 0.1, 60.0)]
    plan = ModelQuantizer(config).run(proto, None, samples).plan
    return {name: float(np.asarray(tensor.scale)) for name, tensor in plan.tensors.items()}


def test_the_options_choose_the_search() -> None:
    modes = {mode: quantized(XInt8Spec, MinMSEModePof2Scale=mode)["x"] for mode in ("All", "MostCommon", "Percentile")}
    assert modes["MostCommon"] < modes["All"] / 100  # two of three samples are small
    found = {mode: quantized(Int8Spec, MinMSEModeFloatScale=mode)["w"] for mode in ("All", "HistCenter", "Percentile")}
    assert found["Percentile"] == pytest.approx(np.percentile(WEIGHT, 99.95) / 127, rel=0.2)
    assert found["All"] != found["Percentile"]


@pytest.mark.parametrize("seed", range(20))
def test_the_chosen_range_has_the_scale_and_the_zero_point_of_most_samples(seed: int) -> None:
    """Of scales with as many votes the smallest, of ranges with as many the one that ends lowest."""
    rng, target = np.random.default_rng(seed), grid("uint8_asym", "power_of_two")
    votes = Votes(target, False)
    ends = np.exp2(rng.integers(-3, 3, (8, 2))) * rng.choice([0.5, 0.99], (8, 2))
    votes.ranges.update(
        {(-float(low), float(high)): int(count) for (low, high), count in zip(ends, rng.integers(1, 4, 8), strict=True)}
    )
    scale_of = {span: float(target.parameters(*span)[0]) for span in votes.ranges}
    total = {one: sum(n for span, n in votes.ranges.items() if scale_of[span] == one) for one in scale_of.values()}
    best = sorted(total, key=lambda one: (-total[one], one))[0]
    spans = sorted((span for span in votes.ranges if scale_of[span] == best), key=lambda span: span[1])
    most = max(votes.ranges[span] for span in spans)
    found = mse_modes.most_common(votes, target)
    assert found[1] == next(span[1] for span in spans if votes.ranges[span] == most) and votes.ranges[found] == most


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_votes_are_kept_with_their_grid(symmetric: bool, narrow: bool) -> None:
    votes = Votes(Grid(INT8, symmetric, narrow, "power_of_two"), not symmetric)
    votes.update(np.linspace(-1, 2, 99, dtype=np.float32))
    again = Votes.from_state(votes.state())
    assert (again.grid, again.symmetric, again.ranges) == (votes.grid, not symmetric, votes.ranges)
    assert (again.lo, again.hi, again.count) == (votes.lo, votes.hi, 99)
