"""AWQ in a graph: scales go where they are free and keep the function, and four bits lose less."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow import test_linear_algorithms as linear

from quark.algorithms import awq as mathematics
from quark.files.journal import Journal
from quark.onnx import AWQConfig, GPTQConfig, Int4Spec, ModelQuantizer, QConfig, QLayerConfig, QuantGranularity
from quark.onnx.algorithms import awq
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.divide import NORMS
from quark.onnx.graph.model import load, to_proto
from quark.onnx.scratch import Scratch

WIDTH = 32
GROUP = Int4Spec(quant_granularity=QuantGranularity.Group, group_size=16)


def scaled(proto: onnx.ModelProto, feeds: list[dict[str, np.ndarray]]) -> onnx.ModelProto:
    model, job = load(proto), QConfig(QLayerConfig(weight=GROUP), extra_options={"WeightsOnly": True}).compile()
    with Scratch(job.options) as scratch:
        awq.run(model, AWQConfig(), JobContext(job, feeds, scratch, Journal(), lambda *_: None))
    return to_proto(model)


def behind(norm: tuple[str, str]) -> onnx.ModelProto:
    """Two MatMul behind a norm, in the domain where the norm is."""
    domain, kind = norm
    call = f"{domain}.{kind}" if domain else kind
    others = {1: "x", 2: "x, x", 3: "x, x"}
    constants = ["g", "c"][: len(NORMS[norm])]
    inputs = ", ".join([others[NORMS[norm][0]], *constants])
    opsets = '"": 23, "com.microsoft": 1'
    text = f"""<ir_version: 10, opset_import: [{opsets}]>
    net (float[N, {WIDTH}] x) => (float[N, 7] y, float[N, 7] z) {{
        n = {call} ({inputs})
        y = MatMul (n, wv)
        z = MatMul (n, wo)
    }}"""
    proto = onnx.parser.parse_model(text)
    gain = np.abs(models.normal(WIDTH)) * np.geomspace(0.05, 20, WIDTH).astype(np.float32)
    values = {
        "g": gain,
        "c": models.normal(WIDTH, seed=4),
        "wv": models.normal(WIDTH, 7),
        "wo": models.normal(WIDTH, 7),
    }
    for name in (*constants, "wv", "wo"):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values[name].astype(np.float32), name))
    return proto


def answers(proto: onnx.ModelProto, feeds: list[dict[str, np.ndarray]]) -> np.ndarray:
    session = models.session(proto)
    return np.concatenate([np.concatenate(session.run(None, feed), 1) for feed in feeds])


@pytest.mark.parametrize("norm", sorted(NORMS), ids=" ".join)
def test_every_norm_takes_the_scales_and_the_function_stays(
    norm: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mathematics, "CLIPS", 1)  # clips change the function, scales do not
    feeds = [{"x": models.normal(16, WIDTH, seed=seed)} for seed in range(4)]
    proto = behind(norm)
    made = scaled(proto, feeds)
    assert models.op_types(made) == models.op_types(proto)
    before, after = ({t.name: onnx.numpy_helper.to_array(t) for t in one.graph.initializer} for one in (proto, made))
    ratio = before["g"] / after["g"]
    assert ratio.std() > 0.1  # something was scaled
    np.testing.assert_allclose(after["wv"], before["wv"] * ratio[:, None], rtol=1e-4)
    wanted = answers(proto, feeds)
    np.testing.assert_allclose(answers(made, feeds), wanted, atol=1e-4 * np.abs(wanted).max())


def test_four_bits_lose_less_on_samples_that_decided_nothing() -> None:
    """The network of outliers, int4 in groups; with clips, which change single weights, too."""

    def loss(algorithms: list[object]) -> float:
        config = QConfig(
            QLayerConfig(weight=GROUP),
            algo_config=algorithms,
            extra_options={"WeightsOnly": True, "PrintSummary": False},
        )
        made = ModelQuantizer(config).quantize_model(linear.NET, None, linear.SAMPLES[:4])
        held = linear.SAMPLES[4:]
        run = [np.concatenate([models.session(p).run(None, f)[0] for f in held]) for p in (linear.NET, made)]
        return float(np.square(run[1] - run[0]).mean())

    plain, better, both = (loss(one) for one in ([], [AWQConfig()], [AWQConfig(), GPTQConfig(bits=4, group_size=16)]))
    assert better < 0.7 * plain and both < better


@pytest.mark.parametrize("symmetric", [True, False])
def test_it_serves_what_matmulnbits_stores(symmetric: bool) -> None:
    parameters = {"GroupSize": 16, "Symmetric": symmetric}
    options = {"UseMatMulNBits": True, "MatMulNBitsParams": parameters, "PrintSummary": False}

    def loss(algorithms: list[object]) -> float:
        config = QConfig(algo_config=algorithms, extra_options=options)
        made = ModelQuantizer(config).quantize_model(linear.NET, None, linear.SAMPLES)
        return float(np.square(linear.outputs(made) - linear.outputs(linear.NET)).mean())

    assert loss([AWQConfig()]) < 0.8 * loss([])
