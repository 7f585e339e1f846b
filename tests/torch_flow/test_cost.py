"""Searches work on what was collected once: neither the model nor a full decomposition is run again per candidate."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.torch_flow.test_algorithms import LAYERS, decoder, quantize, samples
from torch import nn

from quark.algorithms import awq as mathematics
from quark.algorithms.svdquant import EXTRA
from quark.errors import DataError
from quark.torch import ModelQuantizer
from quark.torch.algorithms import awq, channels, judge, scaling
from quark.torch.algorithms.channels import columns_of
from quark.torch.algorithms.column_steps import ScaledColumns, columns_alone
from quark.torch.algorithms.judge import ScaleJudge
from quark.torch.algorithms.rows import RowsByExtremes
from quark.torch.algorithms.scaling import Place, PlaceInputs, ReadPlace, together
from quark.torch.algorithms.trial import quantized_matrix
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


def test_float_answers_are_not_computed_again_behind_a_walk_over_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last block hands on is known from the search; the answers are those of the model."""
    seen, measured = list[Any](), scaling.output_distance

    def watched(walk: Any, handed_on: Any = ()) -> Any:
        found = measured(walk, handed_on)
        seen.append((found.wanted, measured(walk).wanted))
        return found

    before, _ = forwards(AWQConfig(), "int4")
    monkeypatch.setattr(scaling, "output_distance", lambda walk, _: measured(walk))
    assert forwards(AWQConfig(), "int4")[0] - before >= len(decoder().parts) * len(samples())
    monkeypatch.setattr(scaling, "output_distance", watched)
    forwards(AWQConfig(), "int4")
    ((shared, alone),) = seen
    assert all(torch.equal(*pair) for each in zip(shared, alone, strict=True) for pair in zip(*each, strict=True))


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


def place_of(kind: str, width: int, rows: int, shared: bool = False) -> tuple[Place, ScaleJudge, torch.Tensor]:
    """A layer that reads one tensor, inputs of it, and scales to improve channel by channel."""
    layer = nn.Linear(width, rows, bias=False)
    (item,) = match(nn.Sequential(layer), QConfig(replace(LAYERS[kind], input_tensors=None))).quantized
    x = torch.randn(256, width) * torch.logspace(-1, 1, width)
    twice = torch.arange(width // 2).repeat(2) if shared else None
    return Place("source", ("0",), channels=twice), ScaleJudge([item], x), torch.ones(width)


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
        found += channels.by_channels([place_of(kind, width, 96, shared)])
    few, all_ = found
    assert few is not None and all_ is not None and torch.equal(few, all_) and bool((few != 1).any())
    assert 2 * sizes[0] < sizes[1]


def test_places_are_searched_together_as_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other widths and rows, rounded in other ways, with shared rows and groups of another size: in fewer steps."""
    torch.manual_seed(0)
    kinds = [("int4", 64, 48), ("int4", 96, 32), ("uint4", 64, 32, True), ("mxfp4", 80, 16), ("int4", 64, 16, True)]
    places, steps, improved = [place_of(*kind) for kind in kinds], [], channels.improved
    monkeypatch.setattr(channels, "improved", lambda *each: (steps.append(len(each[0])), improved(*each))[1])
    found = channels.by_channels(places)
    few = len(steps)
    for joined, place in zip(found, places, strict=True):
        (alone,) = channels.by_channels([place])
        assert joined is not None and alone is not None
        assert torch.equal(joined, alone) and bool((joined != 1).any())
    assert few == len({columns_of(place[1].items[0]) for place in places}) < len(steps) - few == len(places)


def test_places_wait_for_those_that_change_their_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = OrderedDict((name, nn.Linear(16, 16)) for name in "abcd")
    items = {item.layer.name: item for item in match(nn.Sequential(layers), QConfig(LAYERS["int4"])).quantized}
    seen = PlaceInputs(torch.zeros(16), torch.zeros(16))
    chain = [("norm", "a"), ("a", "b"), ("c", "d"), ("b", "c")]  # c is divided before it is read, b after
    asked = [ReadPlace(Place(source, (reader,)), [items[reader]], seen) for source, reader in chain]
    assert [[one.place.source for one in some] for some in together(asked)] == [["norm", "a", "c"], ["b"]]
    monkeypatch.setattr(scaling, "TOGETHER", 256)
    assert [len(some) for some in together(asked)] == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["int4", "uint4", "w4a8", "mxfp4"])
def test_many_scales_are_judged_as_one_by_one_and_layers_together_as_each_by_itself(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, rows, bias=False) for rows in (32, 16, 48))).eval()
    items, x = match(model, QConfig(LAYERS[kind])).quantized, torch.randn(64, 64)
    scales = list(torch.rand(40, 64) + 0.5)
    found = ScaleJudge(items, x).errors(scales)
    assert found == pytest.approx([ScaleJudge(items, x).error(s) for s in scales], rel=1e-6)
    each = [ScaleJudge([item], x).errors(scales) for item in items]
    assert found == pytest.approx([sum(parts) for parts in zip(*each, strict=True)], rel=1e-5)
    assert len(set(found)) > 30
    if kind in ("int4", "uint4"):  # by its definition
        weights = [item.layer.module.weight.detach() for item in items]
        lost = (quantized_matrix(item, w * scales[0]) / scales[0] - w for item, w in zip(items, weights, strict=True))
        assert found[0] == pytest.approx(sum(float((x @ e.T).square().mean()) for e in lost), rel=1e-5)


@pytest.mark.parametrize("rank", [16, 5])
def test_roots_of_squares_stand_for_the_rows(rank: int) -> None:
    """Where channels follow from others, too: there is no triangular root."""
    torch.manual_seed(0)
    x = torch.randn(64, rank) @ torch.randn(rank, 16)
    inputs = PlaceInputs(torch.zeros(16), torch.zeros(16))
    inputs.add(x, 64, squares=True)
    torch.testing.assert_close(inputs.root.T @ inputs.root, x.T @ x, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["int4", "uint4", "mxfp4"])
def test_roots_judge_as_the_rows_whose_squares_they_are(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps without the zeros of a triangle, the last of which is short; weights lie in memory as they like."""
    torch.manual_seed(0)
    monkeypatch.setattr(judge, "STEP", 24)
    layers = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(64, 64, bias=False))
    layers[1].weight = nn.Parameter(torch.randn(64, 64).T)
    items, x = match(layers, QConfig(replace(LAYERS[kind], input_tensors=None))).quantized, torch.randn(64, 64)
    root = torch.linalg.cholesky((x.T @ x).double(), upper=True).float()
    scales = list(torch.rand(5, 64) + 0.5)
    small = ScaleJudge(items, root)
    assert [first for first, _ in small.steps] == [0, 24, 48] and len(ScaleJudge(items, x).steps) == 1
    for some in (items, items[1:]):
        assert ScaleJudge(some, root).errors(scales) == pytest.approx(ScaleJudge(some, x).errors(scales), rel=1e-4)
    with torch.no_grad():
        layers[0].weight[3, 5] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        small.errors(scales[:1])


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
