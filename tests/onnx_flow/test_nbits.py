"""UseMatMulNBits: what the codes mean, on stock ONNX Runtime, at every width that it runs."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.onnx_flow import models

from quark.config.nbits import BITS, NBits
from quark.errors import ConfigError, DataError
from quark.onnx import AdaRoundConfig, AlgoConfig, Config, GPTQConfig, ModelQuantizer, QConfig, get_default_config
from quark.onnx.qdq.nbits_algorithms import ALGORITHMS

GRAPH = """
g (float[N, 96] x, int64[N] i) => (float[N, 24] y, float[N, 24] z, float[N, 64] e) {
    y = MatMul (x, w)
    z = Gemm <transB = 1> (x, v, b)
    e = Gather (table, i)
}
"""
WEIGHTS = {
    "w": models.normal(96, 24),
    "v": models.normal(24, 96, seed=1) + 0.5,
    "b": models.normal(24, seed=2),
    "table": models.normal(11, 64, seed=3),
}


def config(**parameters: object) -> QConfig:
    return QConfig(extra_options={"PrintSummary": False, "UseMatMulNBits": True, "MatMulNBitsParams": parameters})


def restored(weight: np.ndarray, nbits: NBits) -> np.ndarray:
    """The weight [rows, columns] that the blocks stand for."""
    blocks = ALGORITHMS["DEFAULT"].run(weight, nbits)
    half = 1 << (nbits.Bits - 1)
    zero = np.full(blocks.scales.shape, half) if blocks.zero_points is None else blocks.zero_points
    values = (blocks.codes.astype(np.float32) - zero[..., None].astype(np.float32)) * blocks.scales[..., None]
    return values.reshape(len(weight), -1)[:, : weight.shape[1]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_runtime_computes_with_the_codes(bits: int, size: int, symmetric: bool) -> None:
    proto, nbits = models.model(GRAPH, WEIGHTS), NBits(GroupSize=size, Symmetric=symmetric, Bits=bits, AccuracyLevel=1)
    result = ModelQuantizer(config(**asdict(nbits))).run(proto)
    quantized = result.proto
    assert quantized is not None
    assert models.op_types(quantized) == ["MatMulNBits", "MatMulNBits", "Add", "GatherBlockQuantized"]
    inputs = {"x": models.normal(5, 96, seed=7), "i": np.array([0, 10, 4, 4, 1])}
    y, z, e = models.run(quantized, inputs)
    w, v, table = restored(WEIGHTS["w"].T, nbits).T, restored(WEIGHTS["v"], nbits), restored(WEIGHTS["table"], nbits)
    np.testing.assert_allclose(y, inputs["x"] @ w, atol=2e-4)
    np.testing.assert_allclose(z, inputs["x"] @ v.T + WEIGHTS["b"], atol=2e-4)
    np.testing.assert_allclose(e, table[inputs["i"]], atol=1e-6)
    stored = sum(numpy_helper.to_array(t).nbytes for t in quantized.graph.initializer if "_Q" in t.name)
    assert stored == (96 * 24 + 24 * 96 + 11 * 64) * bits // 8
    assert result.plan.tensors["w"].scale.shape == (24, 96 // size)


def test_rows_that_do_not_fill_a_group() -> None:
    proto = models.model("g (float[N, 50] x) => (float[N, 7] y) { y = MatMul (x, w) }", {"w": models.normal(50, 7)})
    for symmetric in (True, False):
        quantized = ModelQuantizer(config(GroupSize=32, Symmetric=symmetric, Bits=8)).quantize_model(proto)
        inputs = {"x": models.normal(3, 50, seed=4)}
        np.testing.assert_allclose(models.run(quantized, inputs)[0], models.run(proto, inputs)[0], atol=0.1)


@pytest.mark.parametrize("symmetric", [True, False])
def test_no_worse_than_onnxruntime(symmetric: bool) -> None:
    quantizer = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    proto = models.model("g (float[N, 96] x) => (float[N, 24] y) { y = MatMul (x, w) }", {"w": WEIGHTS["w"]})
    theirs = onnx.ModelProto()
    theirs.CopyFrom(proto)
    tool = quantizer.MatMulNBitsQuantizer(theirs, block_size=32, is_symmetric=symmetric, bits=4)
    tool.process()
    inputs = {"x": np.eye(96, dtype=np.float32)}
    ours = ModelQuantizer(config(GroupSize=32, Symmetric=symmetric)).quantize_model(proto)
    errors = [np.square(models.run(q, inputs)[0] - WEIGHTS["w"]).sum() for q in (ours, tool.model.model)]
    assert errors[0] <= errors[1] * 1.0001


def test_the_best_of_two_scales() -> None:
    x = np.array([[1.0, -0.2, 0.1, 0.99] * 4], np.float32)  # the largest twice: it must not be clipped
    for bits in BITS:
        blocks = ALGORITHMS["DEFAULT"].run(x, NBits(GroupSize=16, Bits=bits))
        half = 1 << (bits - 1)
        errors = []
        for scale in (-1.0 / half, 1.0 / (half - 1)):
            codes = np.clip(np.rint(x / np.float32(scale)), -half, half - 1)
            errors.append(np.square(codes * np.float32(scale) - x).sum())
        ours = np.square((blocks.codes[0].astype(np.float32) - half) * blocks.scales[0, 0] - x).sum()
        assert ours == pytest.approx(min(errors), rel=1e-5)


@pytest.mark.parametrize("shape", [(32, 32), (24, 40)])
def test_a_weight_that_is_read_both_ways_has_blocks_for_each(shape: tuple[int, int]) -> None:
    """A tied autoencoder: blocks of one way, taken for those of the other, broke off; a square one was wrong."""
    rows, columns = shape
    text = f"g (float[N, {columns}] x) => (float[N, {columns}] y) {{ a = Gemm <transB = 1> (x, w) y = MatMul (a, w) }}"
    weight = models.normal(*shape) * np.geomspace(0.01, 1, rows, dtype=np.float32)[:, None]
    proto, x = models.model(text, {"w": weight}), models.normal(5, columns, seed=1)
    config = get_default_config("MATMUL_NBITS")
    config.extra_options.update(PrintSummary=False, MatMulNBitsParams={"Bits": 8, "GroupSize": 16})
    made = ModelQuantizer(Config(global_quant_config=config)).quantize_model(proto, None, None)
    assert [node.op_type for node in made.graph.node] == ["MatMulNBits"] * 2
    (found,), wanted = models.run(made, {"x": x}), x @ weight.T @ weight
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()


def test_float16_and_what_stays_float() -> None:
    graph = """g (float16[N, 32] x, float16[32, 4] z) => (float16[N, 8] y, float16[N, 4] q) {
        y = MatMul (x, w)
        q = MatMul (x, z)
    }"""
    proto = models.model(graph, {"w": models.normal(32, 8).astype(np.float16)})
    result = ModelQuantizer(config(GroupSize=16)).run(proto)
    assert result.proto is not None and models.op_types(result.proto) == ["MatMulNBits", "MatMul"]
    assert "no constant weight" in result.plan.explain("q")
    models.session(result.proto)


def test_the_preset_and_excluded_nodes() -> None:
    preset = get_default_config("MATMUL_NBITS")
    preset.print_summary, preset.nodes_to_exclude = False, ["y"]
    preset.extra_options["MatMulNBitsParams"]["GroupSize"] = 32
    quantized = ModelQuantizer(Config(global_quant_config=preset)).quantize_model(models.model(GRAPH, WEIGHTS))
    assert quantized is not None
    assert models.op_types(quantized) == ["MatMul", "MatMulNBits", "Add", "GatherBlockQuantized"]
    levels = [a.i for node in quantized.graph.node for a in node.attribute if a.name == "accuracy_level"]
    assert levels == [1]
    assert "GroupSize" not in get_default_config("MATMUL_NBITS").extra_options["MatMulNBitsParams"]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("columns", [4, 36, 100, 228])
def test_embeddings_whose_rows_end_inside_a_group(columns: int, symmetric: bool, bits: int) -> None:
    nbits = NBits(GroupSize=32, Symmetric=symmetric, Bits=bits)
    table, chosen = models.normal(9, columns, seed=columns), np.array([8, 0, 3, 3])
    graph = f"g (int64[N] i) => (float[N, {columns}] e) {{ e = Gather (table, i) }}"
    quantized = ModelQuantizer(config(**asdict(nbits))).quantize_model(models.model(graph, {"table": table}))
    assert quantized is not None and models.op_types(quantized) == ["GatherBlockQuantized"]
    (found,) = models.run(quantized, {"i": chosen})
    np.testing.assert_allclose(found, restored(table, nbits)[chosen], atol=1e-6)
    stored = next(numpy_helper.to_array(t) for t in quantized.graph.initializer if "_Q" in t.name)
    assert stored.nbytes == 9 * columns * bits // 8


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"Bits": 3}, "Bits cannot be 3: .*runs 2, 4, 8 bits"),
        ({"GroupSize": 100}, "GroupSize cannot be 100: .*powers of two from 16"),
        ({"GroupSise": 16}, "'GroupSise'. Did you mean 'GroupSize'"),
        ({"Algorithm": "AWQ"}, "Algorithm cannot be 'AWQ'"),
        ({"AccuracyLevel": 5}, "AccuracyLevel cannot be 5"),
    ],
)
def test_bad_parameters_are_refused_by_name(parameters: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**parameters)


def _linear_net() -> tuple[onnx.ModelProto, list[dict[str, np.ndarray]]]:
    """Two layers, the second with a Gemm whose weight is transposed, on inputs that hang together."""
    graph = """
    net (float[N, 64] x) => (float[N, 8] y) {
        h = MatMul (x, w)
        r = Tanh (h)
        y = Gemm <transB = 1> (r, v, b)
    }"""
    weights = {"w": models.normal(64, 40) * 0.2, "v": models.normal(8, 40), "b": models.normal(8)}
    samples = [
        {"x": models.normal(40, 10, seed=k) @ models.normal(10, 64) + 0.2 * models.normal(40, 64, seed=k)}
        for k in range(4)
    ]
    return models.model(graph, weights), samples


def _loss(algorithm: str, symmetric: bool, algorithms: tuple[GPTQConfig, ...] = (), bits: int = 4) -> float:
    proto, samples = _linear_net()
    parameters = {"Algorithm": algorithm, "GroupSize": 32, "Symmetric": symmetric, "Bits": bits}
    options = {"UseMatMulNBits": True, "MatMulNBitsParams": parameters, "PrintSummary": False}
    made = QConfig(algo_config=list(algorithms), extra_options=options)
    found = ModelQuantizer(made).quantize_model(proto, None, samples)
    assert [node.op_type for node in found.graph.node].count("MatMulNBits") == 2
    runs = [models.session(one) for one in (found, proto)]
    return float(np.mean([np.square(runs[0].run(None, s)[0] - runs[1].run(None, s)[0]).mean() for s in samples]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_beats_rounding_to_nearest_on_its_data(symmetric: bool) -> None:
    plain = _loss("DEFAULT", symmetric)
    assert _loss("GPTQ", symmetric) < 0.7 * plain
    assert _loss("GPTQ", symmetric, (GPTQConfig(perc_damp=1.0),)) != _loss("GPTQ", symmetric)


@pytest.mark.parametrize(
    ("parameters", "algorithm", "words"),
    [
        ({}, GPTQConfig(), "GPTQConfig has no part .* set MatMulNBitsParams={'Algorithm': 'GPTQ'}"),
        ({"Algorithm": "GPTQ", "GroupSize": 32}, GPTQConfig(group_size=16), "field group_size cannot be 16 .*: 32"),
        ({"Algorithm": "GPTQ"}, GPTQConfig(mse=True), "field mse"),
        ({"Algorithm": "GPTQ"}, AdaRoundConfig(), "AdaRoundConfig cannot tune what UseMatMulNBits stores"),
    ],
)
def test_algorithms_without_a_part_are_refused(parameters: dict, algorithm: AlgoConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        proto, samples = _linear_net()
        options = {"UseMatMulNBits": True, "MatMulNBitsParams": parameters, "PrintSummary": False}
        ModelQuantizer(QConfig(algo_config=[algorithm], extra_options=options)).quantize_model(proto, None, samples)


def test_gptq_needs_data() -> None:
    with pytest.raises(DataError, match="calibration data is needed"):
        ModelQuantizer(config(Algorithm="GPTQ")).quantize_model(_linear_net()[0])


@pytest.mark.parametrize("symmetric", [True, False])
def test_hqq_gives_outliers_up_for_the_rest(symmetric: bool) -> None:
    weight = models.normal(16, 64)
    weight[:, 5] *= 6
    nbits = NBits(GroupSize=32, Symmetric=symmetric)
    errors = []
    for blocks in (ALGORITHMS["DEFAULT"].run(weight, nbits), ALGORITHMS["HQQ"].run(weight, nbits)):
        zero = 8 if blocks.zero_points is None else blocks.zero_points[..., None].astype(np.float32)
        values = ((blocks.codes.astype(np.float32) - zero) * blocks.scales[..., None]).reshape(16, -1)
        errors.append((np.abs(values - weight) ** 0.7).sum())
    assert errors[1] < 0.99 * errors[0]
    assert _loss("HQQ", symmetric) > 0


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (1, 2), (4, 4), (8, 8)])
@pytest.mark.parametrize("seed", [3, 40])
def test_few_samples_do_not_make_gptq_worse_than_rounding_to_nearest(rows: int, count: int, seed: int) -> None:
    proto, _ = _linear_net()  # here on inputs that have nothing to do with each other: there is nothing to be learned
    samples = [{"x": models.normal(rows, 64, seed=seed + k)} for k in range(count)]
    unseen = models.normal(400, 64, seed=999)
    expected = models.session(proto).run(None, {"x": unseen})[0].astype(np.float64)
    errors = []
    for algorithm in ("DEFAULT", "GPTQ"):
        found = ModelQuantizer(config(Algorithm=algorithm, GroupSize=32)).quantize_model(proto, None, samples)
        errors.append(float(np.square(models.session(found).run(None, {"x": unseen})[0] - expected).mean()))
    assert errors[1] <= 1.1 * errors[0]


def test_few_samples_that_hang_together_are_used() -> None:
    proto, samples = _linear_net()
    errors = []
    for algorithm in ("DEFAULT", "GPTQ"):
        found = ModelQuantizer(config(Algorithm=algorithm, GroupSize=32)).quantize_model(proto, None, samples[:2])
        pairs = [(models.session(one).run(None, samples[3])[0]).astype(np.float64) for one in (found, proto)]
        errors.append(float(np.square(pairs[0] - pairs[1]).mean()))
    assert errors[1] < 0.7 * errors[0]
