"""SmoothQuant, QuaRot and GPTQ in a graph: the float function stays, outliers do less harm, every field acts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.files.journal import Journal
from quark.onnx import (
    AlgoConfig,
    AWQConfig,
    CalibMethod,
    Config,
    GPTAQConfig,
    GPTQConfig,
    Int4Spec,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QronosConfig,
    QuantGranularity,
    QuarotConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
    get_default_config,
)
from quark.onnx.algorithms import quarot, smoothquant
from quark.onnx.algorithms.context import JobContext
from quark.onnx.graph.model import load, to_proto
from quark.onnx.scratch import Scratch

INT8 = Int8Spec(calibration_method=CalibMethod.MinMax)
INT4 = Int4Spec(calibration_method=CalibMethod.MinMax)
WIDTH = 64


def net() -> onnx.ModelProto:
    """LayerNormalization with outlier channels, two MatMul that read it, Gemm into the residual stream, MatMul."""
    graph = f"""
    net (float[N, 5, {WIDTH}] x) => (float[N, 5, 7] y) {{
        n = LayerNormalization <axis = -1> (x, g, c)
        q = MatMul (n, wq)
        k = MatMul (n, wk)
        m = Sub (q, k)
        r = Tanh (m)
        h = MatMul (r, wo)
        s = Add (x, h)
        y = MatMul (s, wy)
    }}"""
    outliers = np.ones(WIDTH, np.float32)
    outliers[3] = 50
    weights = {
        "g": np.abs(models.normal(WIDTH)) * outliers, "c": models.normal(WIDTH) * 0.1 * outliers,
        "wq": models.normal(WIDTH, 20) * 0.1, "wk": models.normal(WIDTH, 20, seed=1) * 0.1,
        "wo": models.normal(20, WIDTH, seed=2), "wy": models.normal(WIDTH, 7, seed=3),
    }  # fmt: skip
    for name in ("wq", "wk"):
        weights[name][3] /= 20
    return models.model(graph, weights, opset=17)


NET = net()
#: Channels that hang together, as those of real activations do.
SAMPLES = [
    {"x": models.normal(4, 5, 12, seed=seed) @ models.normal(12, WIDTH) + 0.3 * models.normal(4, 5, WIDTH, seed=seed)}
    for seed in range(8)
]


def outputs(proto: onnx.ModelProto) -> np.ndarray:
    session = models.session(proto)
    return np.concatenate([session.run(None, feed)[0] for feed in SAMPLES])


def transformed(config: AlgoConfig, proto: onnx.ModelProto = NET) -> onnx.ModelProto:
    model, job = load(proto), QConfig(QLayerConfig(INT8, weight=INT8)).compile()
    run = {"smooth_quant": smoothquant.run, "quarot": quarot.run}[config.name]
    with Scratch(job.options) as scratch:
        run(model, config, JobContext(job, SAMPLES, scratch, Journal(), lambda *_: None))
    return to_proto(model)


def loss(algorithms: list[AlgoConfig], inputs: Int8Spec = INT8, weight: Int8Spec = INT8, **options: object) -> float:
    layer = QLayerConfig(inputs, weight=weight)
    config = QConfig(layer, algo_config=algorithms, extra_options={"PrintSummary": False, **options})
    proto = ModelQuantizer(config).quantize_model(NET, None, SAMPLES)
    onnx.checker.check_model(proto, full_check=True)
    return float(np.square(outputs(proto) - outputs(NET)).mean())


PLAIN = loss([])


@pytest.mark.parametrize(
    "config", [SmoothQuantConfig(), SmoothQuantConfig(alpha=0.9), QuarotConfig(), QuarotConfig(use_random_had=True)]
)
def test_a_float_model_keeps_its_function(config: AlgoConfig) -> None:
    proto = transformed(config)
    expected = outputs(NET)
    np.testing.assert_allclose(outputs(proto), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_smooth_quant_goes_into_the_norm_and_elsewhere_stands_in_front() -> None:
    proto = transformed(SmoothQuantConfig(keep_worse=True))
    added = [node.input[0] for node in proto.graph.node if node.op_type == "Mul" and node.input[1].endswith("_scale")]
    assert added == ["r", "s"]  # the norm takes the scales of the two layers that read it


def test_outliers_do_less_harm() -> None:
    wide = Int16Spec(calibration_method=CalibMethod.MinMax)
    plain, smooth, turned = (loss(one, weight=wide) for one in ([], [SmoothQuantConfig()], [QuarotConfig()]))
    assert smooth < plain / 3 and turned < plain / 3


@pytest.mark.parametrize("algorithm", [SmoothQuantConfig(), QuarotConfig(), AWQConfig(), SVDQuantConfig(svd_rank=4)])
def test_under_blocks_rows_are_judged_along_their_channels(algorithm: AlgoConfig) -> None:
    """Activations of three axes: the axis of the blocks was looked for in the rows, which have two."""
    config = get_default_config("MX6")
    config.extra_options.update(PrintSummary=False)
    losses = []
    for config.algorithms in ([], [algorithm]):
        made = ModelQuantizer(Config(global_quant_config=config)).quantize_model(NET, None, SAMPLES)
        losses.append(float(np.square(outputs(made) - outputs(NET)).mean()))
    assert losses[1] < 1.2 * losses[0]


def test_alpha_acts() -> None:
    assert (
        outputs(transformed(SmoothQuantConfig(alpha=0.5))).tobytes()
        != outputs(transformed(SmoothQuantConfig(alpha=0.7))).tobytes()
    )


def test_the_matmul_that_turns_stays_float_and_blocks_follow_the_largest_size() -> None:
    config = QConfig(QLayerConfig(INT8, weight=INT8), algo_config=[QuarotConfig(r_matrix_dim=8, keep_worse=True)])
    result = ModelQuantizer(config).run(NET, None, SAMPLES)
    turned = [node for node in result.plan.nodes.values() if node.name.endswith("_rotate")]
    assert len(turned) == 3 and not any(node.quantized for node in turned)
    matrices = [onnx.numpy_helper.to_array(t) for t in result.proto.graph.initializer if t.name.endswith("_rotation")]
    for matrix in matrices:
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-6)
        assert not matrix[:4, -4:].any()  # blocks of 8 (of 4 for 20 channels)


@pytest.mark.parametrize(
    ("size", "largest", "orders"),
    [(1216, 4096, (16, 76)), (1216, 100, (4, 19)), (1024, 4096, (16, 64)), (1152, 4096, (32, 36))],
)
@pytest.mark.parametrize("signs", [False, True])
def test_a_large_tensor_is_turned_in_factors(size: int, largest: int, orders: tuple[int, int], signs: bool) -> None:
    """The function stays, and the file holds two small matrices instead of one of size x size."""
    proto = models.model(
        f"net (float[N, 3, {size}] x) => (float[N, 3, 2] y) {{ y = MatMul (x, w) }}",
        {"w": models.normal(size, 2)},
        opset=17,
    )
    config = QuarotConfig(r_matrix_dim=largest, use_random_had=signs, keep_worse=True)
    turned = transformed(config, proto)
    onnx.checker.check_model(turned, full_check=True)
    x = models.normal(2, 3, size)
    np.testing.assert_allclose(models.session(turned).run(None, {"x": x})[0], x @ weights(proto)["w"], atol=1e-3)
    held = [matrix for name, matrix in weights(turned).items() if "_rotation" in name]
    assert sum(matrix.size for matrix in held) < 100**2
    for matrix in held:
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-6)
    assert not np.allclose(weights(turned)["w"], weights(proto)["w"])


def weights(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def test_a_file_of_pairs_turns_the_stream_in_the_weights(tmp_path: Path) -> None:
    graph = """
    net (int64[N] t) => (float[N, 6] y) {
        e = Gather (table, t)
        sq = Mul (e, e)
        ms = ReduceMean <axes = [-1], keepdims = 1> (sq)
        rt = Sqrt (ms)
        nn = Div (e, rt)
        n = Mul (nn, g)
        y = MatMul (n, w)
    }"""
    weights = {"table": models.normal(9, 12), "g": np.abs(models.normal(12)) + 0.5, "w": models.normal(12, 6)}
    proto = models.model(graph, weights, opset=13)
    for number, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type}_{number}"
    path = tmp_path / "pairs.json"
    pair = {"prev_nodes": ["Gather_0"], "next_nodes": ["MatMul_6"], "norm_node": "Mul_5"}
    path.write_text(json.dumps({"R1_pairs": [pair]}))
    turned = transformed(QuarotConfig(r_config_path=str(path)), proto)
    assert [node.op_type for node in turned.graph.node] == [node.op_type for node in proto.graph.node]
    feed = {"t": np.arange(9)}
    expected, found = (models.session(one).run(None, feed)[0] for one in (proto, turned))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    kept = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in turned.graph.initializer}
    assert not np.allclose(kept["table"], weights["table"]) and (kept["g"] == 1).all()
    path.write_text(json.dumps({"R1_pairs": [{**pair, "next_nodes": ["MatMul_7"]}]}))
    with pytest.raises(ConfigError, match=r"MatMul_7.*MatMul_6"):
        transformed(QuarotConfig(r_config_path=str(path)), proto)


def test_gptq_beats_rounding_to_nearest_in_four_bits() -> None:
    smooth = SmoothQuantConfig()
    plain, better = (loss(one, weight=INT4, WeightsOnly=True) for one in ([smooth], [smooth, GPTQConfig()]))
    assert better < 0.5 * plain


def test_fields_of_gptq_make_the_weight_spec() -> None:
    def weight(**fields: object) -> object:
        return (
            QConfig(QLayerConfig(INT8, weight=INT8), algo_config=[GPTQConfig(**fields)]).compile().rules.default.weight
        )

    assert weight() == QConfig(QLayerConfig(INT8, weight=INT8)).compile().rules.default.weight
    made = weight(bits=4, group_size=8, mse=True, weight_symmetric=False)
    assert (made.format, made.symmetric, made.granularity.size, made.method) == ("uint4", False, 8, "mse")
    assert weight(bits=4).format == "int4" and weight(per_channel=True).granularity.axis == -1


@pytest.mark.parametrize("changed", [{"act_order": True}, {"perc_damp": 1.0}, {"group_size": 8}, {"per_channel": True}])
def test_fields_of_gptq_change_the_weights(changed: dict[str, object]) -> None:
    one, other = (loss([GPTQConfig(bits=4, **fields)], WeightsOnly=True) for fields in ({}, changed))
    assert one != other


def test_algorithms_combine() -> None:
    channel = Int8Spec(calibration_method=CalibMethod.MinMax, quant_granularity=QuantGranularity.Channel)
    plain = loss([], weight=channel)
    assert loss([SmoothQuantConfig(), GPTQConfig()], weight=channel) < plain


def test_gptq_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = str(tmp_path / "state.json")
    first, again = loss([GPTQConfig()], SaveAndRestore=path), loss([GPTQConfig()], SaveAndRestore=path)
    assert first == again == loss([GPTQConfig()])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (GPTQConfig, {"bits": 5}), (GPTQConfig, {"group_size": 0}), (GPTQConfig, {"perc_damp": -1}),
        (GPTQConfig, {"layers": "k"}), (GPTQConfig, {"layers": ["k"], "bits": 4}),
        (GPTAQConfig, {"alpha": 1.5}), (GPTAQConfig, {"damp_percent": -1}), (GPTAQConfig, {"static_groups": False}),
        (GPTAQConfig, {"layers": "k"}), (QronosConfig, {"alpha": 0}), (QronosConfig, {"beta": -1}),
        (QronosConfig, {"block_size": 0}), (QronosConfig, {"desc_act": 1}), (QronosConfig, {"static_groups": False}),
        (GPTQConfig, {"act_order": 1}), (SmoothQuantConfig, {"alpha": 2}), (QuarotConfig, {"r_matrix_dim": 0}),
        (QuarotConfig, {"r_config_path": 3}),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_by_name(kind: type[AlgoConfig], fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}: {next(iter(fields))}=.* must be"):
        kind(**fields)


def test_the_same_job_writes_the_same_bytes() -> None:
    """The reasons of tensors that stay float were in the order of a set of objects: that of their addresses."""
    weights = {f"w{k}": np.random.default_rng(k).normal(size=(8, 8)).astype(np.float32) for k in range(6)}
    steps = " ".join(f"m{k} = MatMul(r{k}, w{k}) r{k + 1} = Relu(m{k})" for k in range(5))
    proto = models.model(f"g (float[n,8] r0) => (float[n,8] y) {{ {steps} y = MatMul(r5, w5) }}", weights)
    samples = [{"r0": np.random.default_rng(9).normal(size=(16, 8)).astype(np.float32)}]
    config = QConfig(
        QLayerConfig(INT8, INT4),
        algo_config=[QuarotConfig(keep_worse=True)],
        extra_options={"PrintSummary": False},
    )
    made = {ModelQuantizer(config).run(proto, None, samples).proto.SerializeToString() for _ in range(4)}
    assert len(made) == 1
