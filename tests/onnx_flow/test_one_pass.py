"""Layers by a few passes: what they lose is what trials say, with fewer runs; sizes are exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file

from quark.cli.search_tables import layer_table
from quark.demo import data
from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.ir.surgery import apart
from quark.onnx import layer_runs
from quark.onnx.config_file import config_of
from quark.onnx.coverage import coverage
from quark.onnx.graph.run import Runner
from quark.onnx.injected import crossing_of, cut, open_to_noise
from quark.onnx.layer_runs import OnnxLayerRuns, opened
from quark.onnx.one_pass import PLANNING, RANKING, Effort, Passes
from quark.onnx.quantization.config.config import Config
from quark.onnx.search import search
from quark.search.target import SearchGoal
from quark.search.trials import study
from quark.search.values import Study

NAMES = ("uint8/int4", "uint8/int8@channel", "float")


def samples(count: int) -> list[dict[str, np.ndarray]]:
    return [{"image": image[None]} for image in data.split()[0][0][:count]]


@contextmanager
def runs_of(preset: str, count: int, names: Sequence[str]) -> Iterator[OnnxLayerRuns]:
    job = Config(config_of({"preset": preset})).compile()
    with layer_runs.open_runs(data.model_path(), job, names, samples(count)) as made:
        yield made


def both(preset: str, count: int) -> tuple[Study, Study, Passes]:
    """By trials, by passes, and the passes."""
    names = NAMES if preset != "XINT8" else ("XINT8", "float")
    with runs_of(preset, count, names) as made:
        passes = Passes.over(made, "sqnr")
        return study(made, "sqnr", Journal()), passes.study(), passes


@pytest.mark.parametrize("preset", ["A8W8_CPU", "XINT8"])
def test_with_one_sample_the_followed_candidate_loses_exactly_what_its_trial_says(preset: str) -> None:
    trials, passes, _ = both(preset, 1)
    assert [(one.layer, one.candidate) for one in trials.trials] == [(o.layer, o.candidate) for o in passes.trials]
    name = "XINT8" if preset == "XINT8" else "uint8/int8@channel"
    for layer in trials.layers:
        one, other = trials.of(layer, name), passes.of(layer, name)
        assert one is not None and other is not None
        assert other.loss == pytest.approx(one.loss, rel=0.02, abs=1e-9)
    for one, other in zip(trials.trials, passes.trials, strict=True):
        assert one.costs == pytest.approx(other.costs) and (one.candidate != "float" or other.loss == 0)


def test_ranks_are_those_of_trials_at_fewer_runs() -> None:
    trials, passes, made = both("A8W8_CPU", 8)
    for name in NAMES[:2]:
        one, other = (np.array([t.loss for t in found.trials if t.candidate == name]) for found in (trials, passes))
        ranks = np.corrcoef(one.argsort().argsort(), other.argsort().argsort())[0, 1]
        assert ranks > 0.8, (name, ranks)
    assert made.runs() * 5 < made.all_runs() == 8 * 2 * len(trials.layers)


def test_noise_reaches_every_reader_of_a_tensor_and_the_outputs() -> None:
    model = apart(opened(str(data.model_path())))
    name = str(model.graph.outputs[0].name)
    node = next(node for node in model.graph if node.op_type == "Conv")
    inner = str(node.outputs[0].name)
    plain = Runner(model, [name]).run(samples(1)[0]).values[name]
    noisy = open_to_noise(model, [inner, name])
    runner, zero, three = Runner(noisy, [name]), np.zeros((), np.float32), np.full((), 3, np.float32)
    feed = {**samples(1)[0], f"{inner}__noise": zero, f"{name}__noise": zero}
    assert np.allclose(runner.run(feed).values[name], plain, atol=1e-5)
    assert np.allclose(runner.run({**feed, f"{name}__noise": three}).values[name], plain + 3, atol=1e-5)
    assert not np.allclose(runner.run({**feed, f"{inner}__noise": three}).values[name], plain, atol=1e-2)


def test_what_lies_behind_a_cut_computes_as_in_the_whole_model() -> None:
    """At every place of the graph; the model in front of it is not run, whose input may be anything then."""
    with runs_of("A8W8_CPU", 1, NAMES) as made:
        model, feed, names = opened(str(made.common.model)), made.common.feed(0), made.common.outputs
        plain = made.common.reference(0)
        for start in range(1, len(model.graph)):
            crossing = crossing_of(list(model.graph)[:start])
            assert crossing
            floats = Runner(model, crossing).run(feed).values
            other = apart(model)
            found = (
                Runner(cut(other, list(other.graph)[:start]), names).run({"image": 0 * feed["image"], **floats}).values
            )
            assert all(np.allclose(found[name], plain[name], atol=1e-5) for name in names), start


def test_sizes_cross_a_cut_of_a_model_with_free_ones() -> None:
    """A Resize behind the cut reads sizes that are made in front of it: their number has to be known there."""
    text = """<ir_version: 8, opset_import: ["": 17]> free (float[1, 3, h, w] x) => (float[1, 3, h, w] y)
        <int64[1] two = {2}, int64[1] four = {4}, int64[2] first = {1, 3}> {
        shape = Shape(x)
        size = Slice(shape, two, four)
        sizes = Concat <axis: int = 0> (first, size)
        p = MaxPool <kernel_shape: ints = [2, 2], strides: ints = [2, 2]> (x)
        y = Resize <mode: string = "linear"> (p, , , sizes)
    }"""
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), data_prop=True))
    for side in (8, 12):
        feed = {"x": np.random.default_rng(0).normal(size=(1, 3, side, side)).astype(np.float32)}
        plain = Runner(model, ["y"]).run(feed).values["y"]
        for start in range(1, len(model.graph)):
            floats = Runner(model, crossing_of(list(model.graph)[:start]) or ()).run(feed).values
            other = apart(model)
            found = Runner(cut(other, list(other.graph)[:start]), ["y"]).run({**feed, **floats}).values["y"]
            assert np.allclose(found, plain, atol=1e-5), (side, start)


def test_only_what_a_file_can_hold_crosses_a_cut(tmp_path: Path) -> None:
    """Every data type, against writing a tensor of it; and what is no tensor."""
    crossed = set[str]()
    for kind in ir.DataType:
        made = ir.Node("", "Identity", [None])
        made.outputs[0].name, made.outputs[0].type = "x", ir.TensorType(kind)
        ir.Node("", "Identity", [made.outputs[0]])
        if crossing_of([made]) is not None:
            crossed.add(kind.name)
            save_file({"x": np.zeros(2, kind.numpy())}, tmp_path / "x.safetensors")
            assert np.array_equal(load_file(tmp_path / "x.safetensors")["x"], np.zeros(2, kind.numpy()))
    assert {"FLOAT", "FLOAT16", "DOUBLE", "INT64", "INT32", "UINT8", "INT8", "BOOL"} <= crossed
    made.outputs[0].type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
    assert crossing_of([made]) is None


@pytest.mark.parametrize("effort", [RANKING, PLANNING])
@pytest.mark.parametrize("count", [4, 8, 16])
def test_estimates_and_what_plans_rest_on_take_few_runs_together(count: int, effort: Effort) -> None:
    """``fewer`` times fewer runs than trials, unless one candidate of each layer on one sample takes more alone."""
    with runs_of("A8W8_CPU", count, NAMES) as made:
        passes = Passes.over(made, "sqnr", effort)
        pairs = [(one.layer, one.candidate) for one in passes.study().trials if one.candidate != "float"]
        first, done = passes.runs(), 0
        for pair in pairs:
            if passes.left(done) > 0:
                passes.losses([pair])
                done += 1
    few = passes.runs() <= passes.all_runs() / effort.fewer
    enough = first + len(passes.chosen) <= passes.all_runs() / effort.fewer
    assert few if enough else done == passes.pairs // effort.fewer
    assert few or count < 16


def test_a_search_by_passes_meets_its_target() -> None:
    found = search(data.model_path(), "A8W8_CPU", samples(8), NAMES[:2], SearchGoal("sqnr>=15", estimate=True))
    for name, _, *cells in layer_table(found.study).rows:  # of what is only estimated, too
        losses = [found.study.of(name, kind).loss for kind in found.study.candidates]
        assert cells == [f"{-10 * np.log10(loss):.1f} dB" for loss in losses]
    assert found.met and found.value >= 15 and found.study.samples == 4


def test_a_table_of_energies_is_a_budget(tmp_path: Path) -> None:
    path, names = tmp_path / "npu.yaml", ("uint8/int8@channel", "uint16/int8@channel", "float")
    path.write_text("uint8/int8: 1\nuint16/int8: 3\nfloat/float: 20\n")
    found = search(data.model_path(), "A8W8", samples(8), names, SearchGoal("sqnr>=10", str(path), estimate=True))
    macs = coverage(data.model_path()).macs
    assert found.costs["energy"] == pytest.approx(macs) and set(found.layers.values()) == {names[0]}  # all the cheapest
    dear = search(
        data.model_path(), "A8W8", samples(8), names, SearchGoal(budget=str(path), limit=3 * macs, estimate=True)
    )
    assert macs < dear.costs["energy"] <= 3 * macs and dear.value > found.value
    wrong = {"uint8/int8: 1\n": "no line 'uint16/int8'", "uint8/int8: -1\n": "0 or more", "3\n": "lines"}
    for text, message in wrong.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            search(data.model_path(), "A8W8", samples(4), names, SearchGoal("sqnr>=10", str(path), estimate=True))
