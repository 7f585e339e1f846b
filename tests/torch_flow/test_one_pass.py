"""Layers by one backward pass: the losses that trials measure, in size and in order; the model is left as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from quark.files.journal import Journal
from quark.search.refine import FEWER
from quark.search.trials import study
from quark.torch.layer_runs import lay_out
from quark.torch.one_pass import runs
from quark.torch.sensitivity import TRIED, Source, trials_of

CANDIDATES = ("int4_wo_32", "int8_wo_per_channel")


class Network(nn.Module):
    """Residual layers whose weights differ in how much they matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.head = nn.Linear(32, 12)
        for place, layer in enumerate(self.layers):
            layer.weight.data *= 0.3 * 2.0 ** ((place * 5) % 8 - 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 5, 12] of [batch, 5, 32]."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


@pytest.mark.parametrize("metric", ["kl", "sqnr"])
def test_losses_are_those_of_trials(tmp_path: Path, metric: str) -> None:
    torch.manual_seed(0)
    model = Network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    common = lay_out(model, [torch.randn(4, 5, 32) for _ in range(6)], tmp_path)
    base = {"scheme": CANDIDATES[0], "exclude": []}
    made = trials_of(Source(model), model, common, base, CANDIDATES)
    trials, passes = (
        made.estimated(metric)[0] if estimate else study(made, metric, Journal()) for estimate in (False, True)
    )
    for name in CANDIDATES:
        one, other = (np.array([t.loss for t in found.trials if t.candidate == name]) for found in (trials, passes))
        ranks = np.corrcoef(one.argsort().argsort(), other.argsort().argsort())[0, 1]
        assert ranks > 0.85 and 0.6 < np.median(other / one) < 1.6, (ranks, other / one)
    assert [one.costs for one in trials.trials] == [one.costs for one in passes.trials]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is None and one.requires_grad for one in model.parameters())


def test_what_a_plan_rests_on_is_tried_on_few_samples_within_the_runs_that_are_allowed(tmp_path: Path) -> None:
    """A trial on two samples is one of a study on these; estimates and trials take ``FEWER`` times fewer runs."""
    torch.manual_seed(0)
    model, count = Network(), 64
    samples = [torch.randn(4, 5, 32) for _ in range(count)]
    for name in ("all", "few"):
        (tmp_path / name).mkdir()
    base = {"scheme": CANDIDATES[0], "exclude": []}
    many, two = (
        trials_of(Source(model), model, lay_out(model, part, tmp_path / name), base, CANDIDATES)
        for name, part in (("all", samples), ("few", samples[:TRIED]))
    )
    (estimates, alone), tried = many.estimated("kl"), study(two, "kl", Journal())
    pairs = [(one.layer, one.candidate) for one in tried.trials][:5]
    assert alone.losses(pairs) == pytest.approx([one.loss for one in tried.trials[:5]], rel=1e-6)
    all_runs, spent = count * len(estimates.trials), runs(count, len(CANDIDATES))
    assert spent + alone.left(0) * TRIED <= all_runs / FEWER < spent + (alone.left(0) + 1) * TRIED
    assert alone.left(3) == alone.left(0) - 3
