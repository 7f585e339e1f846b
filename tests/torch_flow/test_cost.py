"""Searches work on what was collected once: neither the model nor a full decomposition is run again per candidate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.torch_flow.test_algorithms import LAYERS, decoder, quantize, samples
from torch import nn

from quark.algorithms import awq as mathematics
from quark.algorithms.svdquant import EXTRA
from quark.torch import ModelQuantizer
from quark.torch.algorithms import awq
from quark.torch.quantization.config.config import AWQConfig, QConfig, SVDQuantConfig


def forwards(algorithm: Any, layer: str) -> tuple[int, int]:
    """Times that blocks and the head of the small decoder are run while it is quantized."""
    model: Any = decoder()
    counts = [0, 0]
    for block in model.parts:
        block.register_forward_hook(lambda *_: counts.__setitem__(0, counts[0] + 1))
    model.head.register_forward_hook(lambda *_: counts.__setitem__(1, counts[1] + 1))
    quantize(LAYERS[layer], [algorithm], model)
    return counts[0], counts[1]


def test_awq_runs_the_model_as_often_for_one_candidate_as_for_thirty(monkeypatch: pytest.MonkeyPatch) -> None:
    many = forwards(AWQConfig(), "w4a8")
    monkeypatch.setattr(awq, "GRID", ((0.5,), (0.0,)))
    monkeypatch.setattr(mathematics, "CLIPS", 1)
    assert many == forwards(AWQConfig(), "w4a8")


def test_svdquant_runs_the_model_once_per_sample() -> None:
    one, many = (
        forwards(SVDQuantConfig(svd_rank=2, min_layer_size=16, alpha_candidates=alphas), "int4")
        for alphas in ([0.5], [k / 20 for k in range(1, 20)])
    )
    assert one == many
    assert one[1] == len(samples())


def test_svdquant_decomposes_only_small_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, svd = [], torch.linalg.svd

    def watched(matrix: torch.Tensor, **settings: Any) -> Any:
        sizes.append(min(matrix.shape))
        return svd(matrix, **settings)

    monkeypatch.setattr(torch.linalg, "svd", watched)
    model = nn.Sequential(nn.Linear(96, 80, bias=False)).eval()
    inputs = [torch.randn(32, 96) * torch.logspace(-1, 1, 96)]
    config = QConfig(LAYERS["int4"], algo_config=[SVDQuantConfig(svd_rank=4, min_layer_size=16)])
    ModelQuantizer(config).quantize_model(model, inputs)
    assert sizes and max(sizes) <= 4 + EXTRA
