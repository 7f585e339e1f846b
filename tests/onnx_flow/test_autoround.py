"""AutoRound on a graph: towards the best of all roundings up or down, which the test counts out; kinds of formats."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.test_finetune import FAST, INT8, NET, SAMPLES, config, loss, quantized

import quark.onnx as q
from quark.errors import ConfigError

pytest.importorskip("torch")
RNG = np.random.default_rng(3)
X = (RNG.normal(size=(64, 8)) @ RNG.normal(size=(8, 8))).astype(np.float32)
W = RNG.normal(size=(8, 6)).astype(np.float32)


def product_weight(algorithms: list[Any]) -> np.ndarray:
    """The values [in, out] of an int4 weight per tensor; activations stay float."""
    proto = models.model("net (float[N, 8] x) => (float[N, 6] y) { y = MatMul (x, w) }", {"w": W})
    layer = q.QLayerConfig(input_tensors=q.Int16Spec(), weight=q.Int4Spec(calibration_method=q.CalibMethod.MinMax))
    options = {"PrintSummary": False, "WeightsOnly": True}
    made = q.ModelQuantizer(q.QConfig(layer, algo_config=algorithms, extra_options=options))
    found = made.quantize_model(proto, None, [{"x": X[:32]}, {"x": X[32:]}])
    assert found is not None
    return models.run(found, {"x": np.eye(8, dtype=np.float32)})[0]


def best(column: np.ndarray, step: float) -> float:
    """The least squared error of one output over all ways of rounding its weights up or down."""
    low = np.floor(column / step)
    tries = np.clip(low + np.array(list(product((0, 1), repeat=len(column)))), -7, 7) * step
    return float(np.square(X @ (tries - column).T).sum(0).min())


def test_it_goes_towards_the_best_roundings_and_moves_no_weight_by_more_than_a_code() -> None:
    step = np.abs(W).max() / 7
    nearest = product_weight([])
    np.testing.assert_allclose(nearest, np.clip(np.rint(W / step), -7, 7) * step, rtol=1e-5)
    learned = product_weight([q.AutoRoundConfig(log_period=0, shrinkage=False)])
    np.testing.assert_allclose(learned / step, np.rint(learned / step), atol=1e-4)
    assert np.abs(learned / step - W / step).max() <= 1 + 1e-4
    before, after = (float(np.square(X @ (found - W)).sum()) for found in (nearest, learned))
    least = sum(best(W[:, k], float(step)) for k in range(6))
    assert least <= after * (1 + 1e-5)
    assert before - after > 0.3 * (before - least)


@pytest.mark.parametrize(
    ("spec", "weight"),
    [
        (INT8, q.Int8Spec(quant_granularity=q.QuantGranularity.Channel)),
        (INT8, q.Int4Spec(quant_granularity=q.QuantGranularity.Channel)),
        (q.XInt8Spec(), q.XInt8Spec()),
        (q.BFP16Spec(), q.BFP16Spec()),
        (q.MXFP4E2M1Spec(), q.MXFP4E2M1Spec()),
    ],
    ids=["channel", "int4", "xint8", "bfp16", "mxfp4"],
)
def test_it_is_better_than_rounding_to_nearest(spec: Any, weight: Any) -> None:
    plain = loss(quantized(config(spec, [], weight)))
    tuned = quantized(config(spec, [q.AutoRoundConfig(learning_rate=0.02, **FAST)], weight))
    onnx.checker.check_model(tuned, full_check=True)
    assert loss(tuned) < plain


def test_scales_and_biases_stay() -> None:
    plain, tuned = (quantized(config(INT8, algos)) for algos in ([], [q.AutoRoundConfig(learning_rate=0.02, **FAST)]))
    stored = [{t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer} for proto in (plain, tuned)]
    weights = {name for name in stored[0] if name.startswith(("w", "v")) and name.endswith("_quantized")}
    assert len(weights) == 5
    moved = {name for name, array in stored[0].items() if (array != stored[1][name]).any()}
    assert moved <= weights and len(moved) > 2


def test_what_it_has_no_use_for_is_refused() -> None:
    for field, value in (("reg_param", 0.5), ("beta_range", (10, 2)), ("warm_start", 0.1), ("update_bias", True)):
        with pytest.raises(ConfigError, match=f"AutoRoundConfig: {field}=.* must be"):
            q.AutoRoundConfig(**{field: value})
    with pytest.raises(ConfigError, match="AutoRoundConfig cannot tune what UseMatMulNBits stores"):
        nbits = {"UseMatMulNBits": True, "MatMulNBitsParams": {"Algorithm": "GPTQ"}, "PrintSummary": False}
        made = q.QConfig(q.QLayerConfig(INT8, INT8), algo_config=[q.AutoRoundConfig()], extra_options=nbits)
        q.ModelQuantizer(made).quantize_model(NET, None, SAMPLES)
