"""SVDQuant on a graph: against full decompositions by NumPy, in every mode; what it leaves alone and refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.test_linear_algorithms import INT4, INT8, NET, SAMPLES, outputs

import quark.onnx as q
from quark.errors import ConfigError, DataError
from quark.files.journal import Journal
from quark.onnx.algorithms import svdquant
from quark.onnx.algorithms.context import JobContext
from quark.onnx.graph.model import load, to_proto
from quark.onnx.scratch import Scratch

SMALL: dict[str, Any] = {"svd_rank": 4, "min_layer_size": 16}
NBITS = {"UseMatMulNBits": True, "MatMulNBitsParams": {"GroupSize": 16, "Bits": 4, "Symmetric": True}}
MODES: dict[str, tuple[Any, Any, dict[str, Any], bool]] = {
    "W4A4": (INT4, INT4, {}, False),
    "W4": (INT8, INT4, {"WeightsOnly": True}, False),
    "nbits": (INT8, INT8, NBITS, False),
    "dynamic": (None, INT8, {}, True),
}


def made(mode: str, *algorithms: q.AlgoConfig, proto: onnx.ModelProto = NET, data: Any = SAMPLES) -> onnx.ModelProto:
    inputs, weight, options, dynamic = MODES[mode]
    layer = q.QLayerConfig(weight=weight) if inputs is None else q.QLayerConfig(inputs, weight=weight)
    options = {"PrintSummary": False, **options}
    config = q.QConfig(layer, algo_config=list(algorithms), extra_options=options, use_dynamic_quant=dynamic)
    found = q.ModelQuantizer(config).quantize_model(proto, None, data)
    onnx.checker.check_model(found, full_check=True)
    return found


def transformed(proto: onnx.ModelProto = NET, **fields: Any) -> onnx.ModelProto:
    """The float model with its branches."""
    model, job = load(proto), q.QConfig(q.QLayerConfig(INT4, weight=INT4)).compile()
    with Scratch(job.options) as scratch:
        config = q.SVDQuantConfig(**{**SMALL, **fields})
        svdquant.run(model, config, JobContext(job, SAMPLES, scratch, Journal(), lambda *_: None))
    return to_proto(model)


def constants(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {one.name: onnx.numpy_helper.to_array(one) for one in proto.graph.initializer}


def branches(proto: onnx.ModelProto) -> int:
    return sum("_down_weight" in name for name in constants(proto))


def error(proto: onnx.ModelProto) -> float:
    return float(np.square(outputs(proto) - outputs(NET)).mean())


def test_the_float_model_keeps_its_function_and_the_names_of_its_outputs() -> None:
    proto, expected = transformed(), outputs(NET)
    assert branches(proto) == 3
    assert [value.name for value in proto.graph.output] == ["y"]
    np.testing.assert_allclose(outputs(proto), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_the_branch_is_the_best_of_its_rank_and_the_layer_keeps_the_rest() -> None:
    """s by the paper's formula, the rest by a full decomposition."""
    proto = transformed(search_alpha=False, smooth_alpha=0.3)
    found, before = constants(proto), constants(NET)
    seen = np.concatenate([models.run(with_output(NET, "r"), feed)[-1].reshape(-1, 20) for feed in SAMPLES])
    s = np.abs(seen).max(0) ** 0.3 / np.abs(before["wo"]).max(1) ** 0.7
    u, sizes, vt = np.linalg.svd(before["wo"] * s[:, None])
    rest = (u[:, 4:20] * sizes[4:]) @ vt[4:20]
    assert np.linalg.norm(rest) <= np.linalg.norm(found["wo"]) <= 1.02 * np.linalg.norm(rest)
    low = next(name for name in found if name.endswith("down_weight") and found[name].shape == (20, 4))
    up = low.replace("_down_", "_up_")
    np.testing.assert_allclose(found[low] @ found[up] + found["wo"], before["wo"] * s[:, None], rtol=1e-4, atol=1e-4)


def with_output(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    copy.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return copy


@pytest.mark.parametrize("mode", MODES)
def test_it_helps_and_its_branches_stay_float_in_every_mode(mode: str) -> None:
    found = made(mode, q.SVDQuantConfig(**SMALL))
    assert branches(found) == 3
    assert error(found) < 0.5 * error(made(mode))
    floats = {name for name, array in constants(found).items() if array.dtype == np.float32}
    read = {name for node in found.graph.node if node.op_type == "MatMul" for name in node.input}
    assert sum(name.endswith(("_down_weight", "_up_weight")) for name in floats & read) == 6


@pytest.mark.parametrize("mode", ["nbits", "dynamic"])
def test_rotations_stay_float_in_every_mode(mode: str) -> None:
    found = made(mode, q.QuarotConfig(keep_worse=True))
    assert sum("_rotation" in name for node in found.graph.node if node.op_type == "MatMul" for name in node.input) == 3


@pytest.mark.parametrize(
    ("fields", "count"),
    [({"min_layer_size": 21}, 0), ({"min_layer_size": 7}, 4), ({"exclude_patterns": ["q"]}, 2), ({"svd_rank": 99}, 3)],
)
def test_sizes_and_names_choose_the_layers(fields: dict[str, Any], count: int) -> None:
    named = onnx.ModelProto()
    named.CopyFrom(NET)
    for node in named.graph.node:
        node.name = f"block/{node.output[0]}"
    proto = transformed(named, **fields)
    assert branches(proto) == count
    np.testing.assert_allclose(outputs(proto), outputs(NET), rtol=1e-3, atol=1e-4 * np.abs(outputs(NET)).max())


def test_layers_that_stay_float_get_no_branch() -> None:
    inputs, weight, options, _ = MODES["W4A4"]
    named = onnx.ModelProto()
    named.CopyFrom(NET)
    for node in named.graph.node:
        node.name = f"block/{node.output[0]}"
    config = q.QConfig(
        q.QLayerConfig(inputs, weight=weight), exclude=["block/q"], algo_config=[q.SVDQuantConfig(**SMALL)],
        extra_options={"PrintSummary": False, **options},
    )  # fmt: skip
    assert branches(q.ModelQuantizer(config).quantize_model(named, None, SAMPLES)) == 2


def test_a_gemm_keeps_its_bias_and_a_shared_weight_its_other_reader() -> None:
    graph = (
        "net (float[N, 64] x) => (float[N, 20] y, float[N, 20] z) { y = Gemm (x, w, b) t = Tanh (x) z = MatMul (t, w) }"
    )
    proto = models.model(graph, {"w": models.normal(64, 20), "b": models.normal(20, seed=1)}, opset=17)
    feeds = [{"x": models.normal(9, 64, seed=seed)} for seed in range(3)]
    model, job = load(proto), q.QConfig(q.QLayerConfig(INT4, weight=INT4)).compile()
    with Scratch(job.options) as scratch:
        context = JobContext(job, feeds, scratch, Journal(), lambda *_: None)
        report = svdquant.run(model, q.SVDQuantConfig(**SMALL), context)
    assert report.fired == 2
    for before, after in zip(models.run(proto, feeds[0]), models.run(to_proto(model), feeds[0]), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("svd_rank", 0), ("svd_rank", 2.0), ("smooth_alpha", 2), ("search_alpha", 1), ("alpha_candidates", [])),
        *(("alpha_candidates", [0.5, 2]), ("exclude_patterns", "conv"), ("min_layer_size", -1), ("keep_worse", None)),
    ],
)
def test_what_a_field_cannot_be_is_said(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"SVDQuantConfig: {field}=.* must be"):
        q.SVDQuantConfig(**{field: value})


def test_an_npu_and_missing_data_are_refused() -> None:
    config = q.QConfig(q.QLayerConfig(q.XInt8Spec(), q.XInt8Spec()), algo_config=[q.SVDQuantConfig(**SMALL)])
    with pytest.raises(ConfigError, match="SVDQuantConfig adds branches that are computed in float"):
        q.ModelQuantizer(config).quantize_model(NET, None, SAMPLES)
    with pytest.raises(DataError):
        made("W4", q.SVDQuantConfig(**SMALL), data=[])
