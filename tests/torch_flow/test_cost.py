"""Searches work on what was collected once: neither the model nor a full decomposition is run again per candidate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.torch_flow.test_algorithms import LAYERS, decoder, quantize, samples
from torch import nn

from quark.algorithms import awq as mathematics
from quark.algorithms.svdquant import EXTRA
from quark.torch import ModelQuantizer
from quark.torch.algorithms import awq, channels
from quark.torch.algorithms.column_steps import ScaledColumns, columns_alone
from quark.torch.algorithms.judge import ScaleJudge
from quark.torch.algorithms.rows import RowsByExtremes
from quark.torch.algorithms.scaling import Place
from quark.torch.matching import match
from quark.torch.observer import PerGroupMinMaxObserver, UniformScalingObserver
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


def improved(kind: str, layer: nn.Module, shared: bool) -> torch.Tensor | None:
    """The scales of the inputs of a layer, improved channel by channel."""
    (item,) = match(nn.Sequential(layer), QConfig(replace(LAYERS[kind], input_tensors=None))).quantized
    width = layer.weight.shape[1]
    x = torch.randn(256, width) * torch.logspace(-1, 1, width)
    twice = torch.arange(width // 2).repeat(2) if shared else None
    return channels.by_channel(Place("source", ("0",), channels=twice), ScaleJudge([item], x), torch.ones(width))


@pytest.mark.parametrize(
    ("kind", "width", "shared"),
    [("int4", 128, False), ("uint4", 128, True), ("mxfp4", 80, False)],
    ids=["symmetric", "with a zero point, rows shared", "powers of two, a short last group"],
)
def test_a_step_that_rounds_one_column_chooses_what_rounding_all_chooses(
    kind: str, width: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scales of the definition, from less than half of the roundings, in groups as small as 16 columns."""
    quantized, sizes, found = channels.quantized_matrix, [0], []

    def counted(item: Any, weight: torch.Tensor) -> torch.Tensor:
        sizes[-1] += weight.numel()
        return quantized(item, weight)

    monkeypatch.setattr(channels, "quantized_matrix", counted)
    for every in (False, True):
        torch.manual_seed(0)
        if every:
            sizes.append(0)
            monkeypatch.setattr(channels.ChannelSearch, "columns", lambda _: None)
        found.append(improved(kind, nn.Linear(width, 96, bias=False), shared))
    few, all_ = found
    assert few is not None and all_ is not None and torch.equal(few, all_) and bool((few != 1).any())
    assert 2 * sizes[0] < sizes[1]


class MeanObserver(UniformScalingObserver):
    """Ranges as wide as the values of a group are on average."""

    def observe(self, x: torch.Tensor) -> None:
        self.max_val = 2 * self.spec.granularity.tile(x).abs().mean(-1)
        self.min_val = -self.max_val


def test_scales_that_depend_on_more_than_extremes_round_everything() -> None:
    """A rounding by the mean of a row fails the trial, so its steps are not taken column by column."""
    for observer, by_columns in ((PerGroupMinMaxObserver, True), (MeanObserver, False)):
        config = replace(LAYERS["int4"], weight=replace(LAYERS["int4"].weight, observer_cls=observer))
        (item,) = match(nn.Sequential(nn.Linear(64, 48, bias=False)), QConfig(config)).quantized
        search = channels.search_of(Place("source", ("0",)), ScaleJudge([item], torch.randn(128, 64)), torch.ones(64))
        assert search is not None and (search.columns() is not None) == by_columns
    weight = torch.randn(16, 16)
    scale = torch.ones(2, 16)
    for rounded, alone in (
        (lambda w: (w / w.abs().amax(1, keepdim=True)).mul(7).round() / 7 * w.abs().amax(1, keepdim=True), True),
        (lambda w: (w / w.abs().mean(1, keepdim=True)).round() * w.abs().mean(1, keepdim=True), False),
    ):
        error = rounded(weight) - weight
        columns = ScaledColumns(RowsByExtremes(rounded), weight, weight, error, torch.eye(16).expand(2, 16, 16), [8, 8])
        assert columns_alone(columns, scale) == alone
