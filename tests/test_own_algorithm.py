"""An algorithm is one function for both flows: the change drill with GPTQ as a textbook has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.onnx_flow import models
from torch import nn

import quark
import quark.onnx as q
from quark.errors import ConfigError
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.quantization.config.config import GPTQConfig, QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype

RNG = np.random.default_rng(5)
MIX = RNG.normal(size=(24, 24))
X = (RNG.normal(size=(64, 24)) @ MIX).astype(np.float32)
W = RNG.normal(size=(24, 12)).astype(np.float32)


def textbook(weight: np.ndarray, hessian: np.ndarray, grid: Any, damp: float = 0.01) -> np.ndarray:
    """Column by column, the error of each spread over the columns that follow (Frantar et al. 2022, algorithm 1)."""
    damped = hessian.astype(np.float64) + damp * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    inverse = np.linalg.cholesky(np.linalg.inv(damped)).T
    rest, made = weight.astype(np.float64), np.zeros_like(weight)
    for i in range(weight.shape[1]):
        made[:, i] = grid.take(np.array([i])).round(rest[:, i : i + 1].astype(np.float32))[:, 0]
        rest[:, i + 1 :] -= np.outer((rest[:, i] - made[:, i]) / inverse[i, i], inverse[i, i + 1 :])
    return made


@pytest.fixture
def registered() -> Iterator[Any]:
    yield quark.register_algorithm("textbook", textbook)
    quark.unregister_algorithm("textbook")


# ---- ONNX ------------------------------------------------------------------------------------------------------------


def onnx_answers(algorithms: list[Any]) -> np.ndarray:
    """What a model with a quantized weight computes."""
    proto = models.model("net (float[N, 24] x) => (float[N, 12] y) { y = MatMul (x, w) }", {"w": W})
    layer = q.QLayerConfig(input_tensors=q.Int16Spec(), weight=q.Int4Spec())
    config = q.QConfig(layer, algo_config=algorithms, extra_options={"PrintSummary": False})
    made = q.ModelQuantizer(config).quantize_model(proto, None, [{"x": X[:32]}, {"x": X[32:]}])
    assert made is not None
    return models.run(made, {"x": X})[0]


def lost(answers: np.ndarray) -> float:
    return float(np.square(answers - X @ W).mean())


def test_onnx_rounds_by_the_function_and_comes_to_what_gptq_comes_to(registered: Any) -> None:
    nearest, own, gptq = (onnx_answers(algos) for algos in ([], [registered.onnx()], [q.GPTQConfig()]))
    assert lost(own) < 0.7 * lost(nearest)
    assert lost(own) == pytest.approx(lost(gptq), rel=0.05)


def test_settings_reach_the_function_and_a_worse_result_is_not_used(registered: Any) -> None:
    seen: list[float] = []

    def spoilt(weight: np.ndarray, hessian: np.ndarray, grid: Any, factor: float = 1.0) -> np.ndarray:
        seen.append(factor)
        return -factor * weight

    worse = quark.register_algorithm("spoilt", spoilt)
    try:
        assert (onnx_answers([worse.onnx({"factor": 2.0})]) == onnx_answers([])).all()
        with pytest.raises(ConfigError, match=r"field of spoilt 'factr'.*Did you mean 'factor'"):
            worse.onnx({"factr": 2.0})
    finally:
        quark.unregister_algorithm("spoilt")
    assert seen == [2.0]


# ---- torch -----------------------------------------------------------------------------------------------------------


def torch_model() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 12))
    return model.eval()


WEIGHT = QTensorConfig(Dtype.int4, qscheme="per_channel", ch_axis=0)


def torch_quantized(algorithms: list[Any]) -> nn.Module:
    config = QConfig(QLayerConfig(weight=WEIGHT), algo_config=algorithms)
    return ModelQuantizer(config).quantize_model(torch_model(), [torch.from_numpy(X[:32]), torch.from_numpy(X[32:])])


def error(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(torch.from_numpy(X)) - torch_model()(torch.from_numpy(X))).square().mean())


def test_torch_rounds_by_the_same_function_exports_and_reloads(registered: Any, tmp_path: Path) -> None:
    nearest, own = torch_quantized([]), torch_quantized([registered.torch()])
    gptq = torch_quantized([GPTQConfig(damp_percent=0.01, desc_act=False, static_groups=True)])
    assert error(own) < 0.7 * error(nearest)
    assert error(own) == pytest.approx(error(gptq), rel=0.05)
    export_safetensors(own, tmp_path / "out")
    again = import_model_from_safetensors(torch_model(), tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(torch.from_numpy(X)), own(torch.from_numpy(X)))


def test_a_name_is_taken_once_and_gone_after(registered: Any) -> None:
    assert AlgoConfig.from_dict({"name": "textbook", "damp": 0.1}).damp == 0.1
    for name in ("textbook", "gptq", "autoround"):
        with pytest.raises(ConfigError, match="exists already"):
            quark.register_algorithm(name, textbook)
    with pytest.raises(ConfigError, match="was not registered"):
        quark.unregister_algorithm("gptq")
    with pytest.raises(ConfigError, match="identifier"):
        quark.register_algorithm("my algorithm", textbook)
    with pytest.raises(ConfigError, match="function"):
        quark.register_algorithm("number", 5)
    with pytest.raises(ConfigError, match="'strength' needs a default"):
        quark.register_algorithm("bare", lambda weight, hessian, grid, strength: weight)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda weight: weight.T, r"must return floats of the shape \(12, 24\), not float32 of \(24, 12\)"),
        (lambda weight: weight.astype(np.int32), "not int32"),
        (lambda weight: weight * np.nan, "not finite"),
    ],
)
def test_what_a_function_returns_wrongly_is_named(returned: Any, words: str) -> None:
    made = quark.register_algorithm("wrong", lambda weight, hessian, grid: returned(weight))
    try:
        with pytest.raises(ConfigError, match=words):
            onnx_answers([made.onnx()])
    finally:
        quark.unregister_algorithm("wrong")
