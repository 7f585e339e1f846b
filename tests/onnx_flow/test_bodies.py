"""Layers in bodies of If and Loop are tried, searched, named, planned and diagnosed like any other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.test_subgraphs import QUIET, bodies, branch_feeds, kinds

from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.onnx import Config, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, get_default_config
from quark.onnx.compare import compare
from quark.onnx.config_file import load_config
from quark.onnx.evaluation import advice
from quark.onnx.forecast import forecast
from quark.onnx.quantization.config.spec import CalibMethod
from quark.onnx.search import save_plan, search
from quark.onnx.sensitivity import sensitivity
from quark.search.target import SearchGoal


def nested(wide: float = 1.0) -> onnx.ModelProto:
    """A layer in the main graph, one in an If that the next is inside of, three iterations of two in a Loop."""
    graph = """
    nested (float[2, 4] x, bool flag) => (float[2, 4] y, float[2, 4] z) {
        first = MatMul (x, w)
        y = If (flag) <
            then_branch = then () => (float[2, 4] t) {
                k = MatMul (first, v)
                big = Constant <value = bool {1}> ()
                t = If (big) <
                    then_branch = inner () => (float[2, 4] u) { u = MatMul (k, w) },
                    else_branch = never () => (float[2, 4] q) { q = MatMul (k, v) }
                >
            },
            else_branch = other () => (float[2, 4] o) { o = Neg (first) }
        >
        z = Loop (count, go, first) <
            body = step (int64 i, bool c, float[2, 4] s) => (bool again, float[2, 4] h) {
                again = Identity (c)
                m = MatMul (s, p)
                h = Tanh (m)
            }
        >
    }"""
    weights = {name: models.normal(4, 4, seed=k) for k, name in enumerate("wvp")}
    weights["p"][:, 0] *= wide
    proto = models.model(graph, {**weights, "count": np.array(3), "go": np.array(True)})
    for node in proto.graph.node:
        node.name = f"n_{node.output[0]}"
    return proto


LAYERS = ["n_first", "n_y/then_branch/k", "n_y/then_branch/t/then_branch/u", "n_z/body/m", "n_z/body/h"]
FLAGS = [True, False, True]


def made(exclude: tuple[str, ...] = (), plan: Plan | None = None, wide: float = 1.0) -> tuple[onnx.ModelProto, Plan]:
    config = get_default_config("A8W8")
    config.extra_options.update(PrintSummary=False)
    config.nodes_to_exclude = list(exclude)
    result = ModelQuantizer(Config(config)).run(nested(wide), None, branch_feeds(FLAGS), plan=plan)
    assert result.proto is not None
    return result.proto, result.plan


def noise(found: onnx.ModelProto) -> float:
    """What the outputs lose, by hand: energies of the errors over those of the values, added up over outputs."""
    pairs = [(models.run(nested(), feed), models.run(found, feed)) for feed in branch_feeds(FLAGS)]
    return sum(
        sum(float(((x[k] - y[k]) ** 2).sum()) for x, y in pairs) / sum(float((x[k] ** 2).sum()) for x, _ in pairs)
        for k in range(2)
    )


def test_layers_in_bodies_are_tried_one_by_one() -> None:
    """Each alone loses what the model loses in which nothing else is quantized; no sample enters the other branch."""
    found = sensitivity(nested(), "A8W8", branch_feeds(FLAGS))
    losses = {trial.layer: trial.loss for trial in found.trials}
    assert list(losses) == LAYERS
    for layer in (LAYERS[2], LAYERS[4]):  # what the others make is read by a layer that quantizes it too
        alone, _ = made(tuple(name for name in LAYERS if name != layer))
        assert losses[layer] == pytest.approx(noise(alone), rel=0.02) and losses[layer] > 0
    assert all(losses[layer] > 0 for layer in LAYERS)


@pytest.mark.parametrize(("name", "expected"), [("y/then_branch/t", [False, True]), ("y/else_branch/p", [True, False])])
def test_a_name_with_its_place_means_that_body(name: str, expected: list[bool]) -> None:
    proto = models.branching()
    for node in proto.graph.node:
        node.name = node.output[0]
    then, other = bodies(proto)
    next(node for node in then.node if node.op_type == "MatMul").name = "t"
    next(node for node in other.node if node.op_type == "MatMul").name = "p"
    spec = Int8Spec(calibration_method=CalibMethod.MinMax)
    config = QConfig(QLayerConfig(input_tensors=spec, weight=spec), exclude=[name], extra_options=QUIET)
    result = ModelQuantizer(config).quantize_model(proto, None, branch_feeds([True, False]))
    assert result is not None
    assert [any(one.name.endswith("_quantized") for one in body.initializer) for body in bodies(result)] == expected


@pytest.mark.parametrize("size", [4, 16, 64])  # weights inside a file, beside it, and shared with the runtime
def test_layers_in_bodies_are_tried_whatever_their_weights_take(size: int) -> None:
    text = f"""
    wide (float[2, {size}] x, bool flag) => (float[2, {size}] y) {{
        first = MatMul (x, w)
        y = If (flag) <
            then_branch = then () => (float[2, {size}] t) {{ t = MatMul (first, v) }},
            else_branch = other () => (float[2, {size}] o) {{ o = Neg (first) }}
        >
    }}"""
    proto = models.model(text, {name: models.normal(size, size, seed=k) for k, name in enumerate("wv")})
    for node in proto.graph.node:
        node.name = f"n_{node.output[0]}"
    branch = next(one.g for one in proto.graph.node[1].attribute if one.name == "then_branch")
    branch.initializer.append(proto.graph.initializer.pop())  # the body has its weight itself
    feeds = [{"x": models.normal(2, size, seed=k), "flag": np.array(k != 1)} for k in range(4)]
    found = sensitivity(proto, "A8W8", feeds, ["uint8/int4"])
    assert found.layers == ["n_first", "n_y/then_branch/t"] and all(one.loss > 0 for one in found.trials)


@pytest.mark.parametrize("estimate", [False, True])
def test_a_search_enters_bodies_and_its_file_makes_what_was_measured(tmp_path: Path, estimate: bool) -> None:
    """Some layers in bodies get another candidate, and what the file makes has the SQNR that was measured."""
    proto, feeds = nested(), branch_feeds([True, False, True, True])
    kinds = ["uint8/int4", "A8W8", "float"]
    found = search(proto, "A8W8", feeds, kinds, SearchGoal("sqnr>=38", "bits", evaluation=feeds, estimate=estimate))
    assert set(found.layers) == set(LAYERS) and found.met and set(found.layers.values()) > {"A8W8"}
    save_plan(tmp_path / "plan.yaml", "A8W8", found, "sqnr>=38", "bits")
    config = load_config(tmp_path / "plan.yaml")
    config.extra_options.update(PrintSummary=False)
    result = ModelQuantizer(Config(config)).quantize_model(proto, None, feeds)
    assert result is not None
    distances = compare(proto, result, feeds[::2]).outputs
    assert min(one.sqnr for one in distances.values()) == pytest.approx(found.value, abs=0.01)


@pytest.mark.parametrize("budget", ["latency", "energy"])
def test_budgets_by_layer_that_know_no_bodies_say_so(tmp_path: Path, budget: str) -> None:
    table = tmp_path / "energy.yaml"
    table.write_text("int8/int8: 1.0\nfloat/float: 8.0\n")
    words = "latency" if budget == "latency" else str(table)
    with pytest.raises(ConfigError, match=r"use --budget size or --budget bits .*n_y/then_branch/k"):
        search(nested(), "A8W8", branch_feeds(FLAGS), ["A8W8", "float"], SearchGoal("sqnr>=30", words))


def test_a_plan_with_bodies_is_carried_out() -> None:
    """Unedited it makes the same bytes; what is deleted stays float, in that body alone."""
    before, plan = made()
    again = Plan.from_json(plan.to_json())
    assert made(plan=again)[0].SerializeToString() == before.SerializeToString()
    for name in [name for name in again.tensors if name.startswith("n_z/body/")]:
        del again.tensors[name]
    again.put(
        dataclasses.replace(again.tensors["n_y/then_branch/t/then_branch/k"], given=(np.float32(0.125), np.int32(0)))
    )
    edited, told = made(plan=again)
    then, inner, *_, step = bodies(edited)
    assert "QuantizeLinear" in kinds(then) and "QuantizeLinear" not in kinds(step)
    scales = [onnx.numpy_helper.to_array(one) for one in inner.initializer if one.name.endswith("k_scale")]
    assert scales == [0.125] and not any(name.startswith("n_z/body/") for name in told.tensors)


def test_a_plan_without_data_has_the_bodies_too() -> None:
    config = get_default_config("A8W8")
    foreseen = forecast(Config(config).compile(), nested()).plan
    before, plan = made()
    assert set(plan.tensors) < set(foreseen.tensors)  # the branch that no sample takes is decided without data
    assert made(plan=foreseen)[0].SerializeToString() == before.SerializeToString()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("n_z/body/nothing", "unknown tensor of the plan 'nothing'.*\\(in n_z/body/\\)"),
        ("n_z/nothing/w", "unknown tensor of the plan 'n_z/nothing/w'"),
    ],
)
def test_a_line_that_no_body_can_have_is_one_sentence(name: str, sentence: str) -> None:
    _, plan = made()
    plan.put(dataclasses.replace(plan.tensors["n_z/body/p"], name=name, group=name))
    with pytest.raises(ConfigError, match=sentence):
        made(plan=plan)


def test_a_tensor_that_only_a_body_reads_as_codes_is_compared_as_it_is() -> None:
    quantized, _ = made(("n_first",))
    found = compare(nested(), quantized, branch_feeds(FLAGS))
    (first,) = [layer for layer in found.layers if layer.name == "n_first"]
    assert first.sqnr == np.inf and min(one.sqnr for one in found.outputs.values()) < 50


def test_weak_weights_in_bodies_are_found_with_their_place() -> None:
    """One column of the Loop's weight is fifty times as wide, so that the others keep hardly any of eight bits."""
    quantized, _ = made(wide=50.0)
    found = compare(nested(50.0), quantized, branch_feeds(FLAGS))
    assert [one.node for one in found.weak] == ["n_z/body/m"]
    (loop,) = [layer for layer in found.layers if layer.op_type == "Loop"]
    said = advice(loop, found)
    assert "n_z/body/m: " in said and "`quark onnx sensitivity` tries the layers inside" in said
