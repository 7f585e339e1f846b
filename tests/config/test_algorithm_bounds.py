"""What both dialects call alike may be the same in both, and no more than the arithmetic bears."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from quark.algorithms.adaround import Codes, Rounding
from quark.algorithms.names import ROWS
from quark.errors import ConfigError
from quark.onnx.quantization.config.algorithm import ALGO_NAME_TO_CLASS
from quark.torch.config import algorithms as dialect
from quark.torch.config.algorithms import AlgoConfig

BOTH = [
    pytest.param(ALGO_NAME_TO_CLASS[row.onnx], AlgoConfig.registry[row.torch], id=row.torch)
    for row in ROWS
    if row.onnx and row.torch
]
#: Of the ONNX flow alone: -1, until nothing changes.
OTHERS = {"cle_steps"}


@pytest.mark.parametrize(("onnx", "torch"), BOTH)
def test_a_setting_that_both_dialects_have_has_one_bound(onnx: Any, torch: Any) -> None:
    alike = {one.name for one in fields(onnx)} & {one.name for one in fields(torch)} - OTHERS
    assert {name: onnx.BOUNDS.get(name) for name in alike} == {name: torch.BOUNDS.get(name) for name in alike}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [("AdaQuantConfig", "fixed_seed", -1), ("SVDQuantConfig", "min_layer_size", -1)]
    + [("AdaRoundConfig", "beta_range", pair) for pair in ([20, 1], (0.5, 2), [3], [4, 3, 2])],
)
def test_what_no_algorithm_can_use_is_refused_in_both(kind: str, field: str, value: Any) -> None:
    for one in (next(one for one in ALGO_NAME_TO_CLASS.values() if one.__name__ == kind), getattr(dialect, kind)):
        with pytest.raises(ConfigError, match=f"{kind}: {field}="):
            one(**{field: value})


def test_the_pull_on_the_very_middle_is_a_number_above_1_only() -> None:
    weight = torch.tensor([[0.5, -1.5]]).numpy()
    rounding = Rounding(torch, weight, Codes(torch.tensor(1.0).numpy(), torch.tensor(0.0).numpy(), -8, 7), "cpu")
    rounding.soft()
    finite = [bool(rounding.gradient(torch.ones(1, 2), beta, 0.01).isfinite().all()) for beta in (0.5, 1.0, 1.01)]
    assert finite == [False, False, True]
