"""Distances of outputs: the same of NumPy's arrays and of torch's, in pieces and at once, against torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quark.measure import distance, outputs
from quark.measure.outputs import Outputs


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    y = x + 0.1 * torch.randn_like(x)
    x[..., 3] = y[..., 3] = -torch.inf  # a word that is masked
    return x, y


@pytest.mark.parametrize("piece", [1 << 23, 48])
def test_measures_are_those_of_torch(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "PIECE", piece)
    monkeypatch.setattr(outputs, "PIECE", piece)
    (x, y), ids, found = pair(), torch.arange(4, 14).reshape(2, 5), []
    for arrays in ((x, y), (x.numpy(), y.numpy())):
        made = Outputs()
        made.update({"y": arrays[0]}, {"y": arrays[1]}, True)
        made.follow(arrays[1], ids)
        assert made.distances["y"].samples == 1
        found.append(made.metrics())
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    p, q = x.double().log_softmax(-1), y.double().log_softmax(-1)
    known = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).nan_to_num().sum(-1).mean()
    surprise = torch.nn.functional.cross_entropy(y[:, :-1].double().flatten(0, 1), ids[:, 1:].flatten())
    kept = torch.isfinite(x)
    noise = ((x - y)[kept].double() ** 2).sum() / (x[kept].double() ** 2).sum()
    wanted = {"kl": known, "perplexity": surprise.exp(), "sqnr": -10 * torch.log10(noise)}
    assert {name: found[0][name] for name in wanted} == pytest.approx({k: float(v) for k, v in wanted.items()})


def test_what_only_the_other_model_rules_out_loses_everything() -> None:
    x, y = pair()
    y[0, 0, 5] = -torch.inf
    assert float(outputs.divergence(x, y).max()) == np.inf
