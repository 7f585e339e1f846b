"""Graph mode: what a model writes in place or maps over, and what it makes of numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import ModelError
from quark.torch import ModelQuantizer
from quark.torch.graph.calls import operator
from quark.torch.graph.fixed import FixedTensors
from quark.torch.graph.trace import float_graph
from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig, QLayerConfig
from quark.torch.quantization.config.type import QuantizationMode


def after_a_write(y: torch.Tensor) -> torch.Tensor:
    other = y
    y.relu_()
    return y + other * 2


def a_view_after_a_write(y: torch.Tensor) -> torch.Tensor:
    other = y.view(-1)
    y.relu_()
    return y + other.view_as(y) * 2


def a_write_through_a_view(y: torch.Tensor) -> torch.Tensor:
    y.view(-1).mul_(2)
    return y


def a_part_written(y: torch.Tensor) -> torch.Tensor:
    y[:, 1:] += y[:, :-1] * 2
    y[:, 0] = 3.0
    return y


def rows_in_a_loop(y: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(y)
    for row in range(1, 4):
        made[:, row] = made[:, row - 1] + y[:, row].clone()
    return made


def written_by_index(y: torch.Tensor) -> torch.Tensor:
    other = y.t()
    y[torch.tensor([0, 2])] = 1.0
    return y + other.t()


def mapped_over(y: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(4)
    seen = torch.vmap(lambda row: torch.vmap(lambda column: row >= column)(numbers))(numbers)
    return torch.where(seen, y[:, None, :] * torch.ones(4, 1), float("-inf")).softmax(-1)


class Computing(nn.Module):
    """Two layers, and a computation between."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.last, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.fc(x)))  # type: ignore[no-any-return]


TORCH_REWRITES = (a_view_after_a_write, a_write_through_a_view, a_part_written, rows_in_a_loop, written_by_index)


@pytest.mark.parametrize("between", [after_a_write, *TORCH_REWRITES, mapped_over])
def test_what_is_written_in_place_or_mapped_is_computed_as_the_model_does(between: Any) -> None:
    model, x = Computing(between), torch.randn(5, 4)
    graph = float_graph(model, x[:3])
    torch.testing.assert_close(graph(x), model(x))  # of any batch, if torch rewrites it too
    written = [node for node in graph.graph.nodes if operator(node).endswith("_")]
    fixed_strides = [node for node in graph.graph.nodes if operator(node) == "view"]  # kernels may choose others
    assert not written and not fixed_strides


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
@pytest.mark.parametrize("between", [a_view_after_a_write, rows_in_a_loop, mapped_over])
def test_a_graph_that_is_given_is_refused_where_the_same_without_it_is_taken(between: Any) -> None:
    model, x = Computing(between), torch.randn(3, 4)
    program = torch.export.export(model, (x,))
    without: Any = program.run_decompositions({}).module()
    with pytest.raises(ModelError, match=r"run_decompositions\(\{\}\)\.module\(\)"):
        float_graph(program.module())
    torch.testing.assert_close(float_graph(without)(x), model(x))


class Positions(nn.Module):
    """A layer that reads numbers alone, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.places = nn.Linear(4, 4), nn.Embedding(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.arange(3)).to(x.dtype) * 2
        return torch.where(x > 0, self.fc(x + places), places)


def test_what_a_layer_makes_of_numbers_alone_is_not_fixed() -> None:
    model, x = Positions(), torch.randn(3, 4)
    graph = float_graph(model, x)
    assert not [node for node in FixedTensors.of(graph, graph.graph).computed if operator(node) in ("to", "mul")]
    layer = QLayerConfig(weight=Int8PerTensorSpec().to_quantization_spec())
    made = ModelQuantizer(QConfig(layer, quant_mode=QuantizationMode.fx_graph_mode)).quantize_model(model, [x])
    torch.testing.assert_close(made(x), model(x), rtol=0.05, atol=0.05)
