"""What stays float in a graph: positions, divisors, masks. Each model is ruined where its rule is left out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.pairs import pairs
from torch import nn

from quark.torch import ModelQuantizer
from quark.torch.graph.calls import operator
from quark.torch.graph.isolated import isolated_nodes
from quark.torch.graph.trace import float_graph
from quark.torch.quantization.config.config import Int8PerChannelSpec, QConfig, QLayerConfig, Uint8PerTensorSpec
from quark.torch.quantization.config.type import QuantizationMode

WIDTH = 8


class Positions(nn.Module):
    """Sines of positions, as the first detection transformers have them: divided by powers of 10,000."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(WIDTH, dtype=torch.float32)
        places = torch.arange(x.shape[1], dtype=torch.float32)[:, None] / 10000 ** (2 * (steps // 2) / WIDTH)
        return self.inner(x + torch.cat([places[:, 0::2].sin(), places[:, 1::2].cos()], dim=-1))


class Buckets(nn.Module):
    """Logarithms of distances, of which the first is -infinity, as T5 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        far = 4 + (torch.log(places.float() / 4) / math.log(2)).to(torch.int64)
        return self.inner(x + self.table(torch.where(places < 4, places, far.clamp(0, 8))))


class Norm(nn.Module):
    """A normalization written out, over rows of which one is padding: zeros, divided by the root of 1e-12."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.tensor([1.0, 0.9, 0.8, 0.9, 1.0, 0.0])[None, :, None]
        return self.inner(x / (x.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt())


class Standardized(nn.Module):
    """A convolution whose weight is standardized at every call, to a variance far from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 6, 3) * torch.logspace(-4, 1, WIDTH)[:, None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.weight.mean((1, 2), keepdim=True)
        spread = (self.weight - mean).pow(2).mean((1, 2), keepdim=True)
        return nn.functional.conv1d(x, (self.weight - mean) / (spread + 1e-12).sqrt())


class ByStatistics(Standardized):
    """The same by a batch norm of the weight, which uses the statistics of its batch in evaluation too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.weight.reshape(1, WIDTH, -1)
        weight = nn.functional.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-12)
        return nn.functional.conv1d(x, weight.reshape_as(self.weight))


class Attention(nn.Module):
    """Attention with a mask that ``put`` puts into the scores."""

    def __init__(self, put: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.put = put
        self.register_buffer("upper", torch.full((6, 6), -3.4e38).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return self.put(scores, self.upper).softmax(-1) @ self.value(x)


class Angles(nn.Module):
    """Sines of what ``angle`` makes of the input's numbers."""

    def __init__(self, angle: Callable[[torch.Tensor, nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.layer, self.angle = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), angle
        self.register_buffer("directions", 10.0 ** -torch.arange(0, 4, 4 / WIDTH)[None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = self.angle(x, self.layer, self.directions)
        return self.inner(torch.cat([angles.sin(), angles.cos()], -1))


class Between(nn.Module):
    """A computation between two layers."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


def odds(x: torch.Tensor) -> torch.Tensor:
    """A detector's way back from a box to a layer's numbers."""
    shares = torch.sigmoid(x * 4)
    return torch.log(shares.clamp(min=1e-6) / (1 - shares).clamp(min=1e-6))


def written_out(x: torch.Tensor) -> torch.Tensor:
    """A Softmax, of large numbers."""
    powers = torch.exp(x * 4)
    return powers / powers.sum(-1, keepdim=True)


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Roots of sums of squares, compressed: the sum stands between float operators."""
    real, imaginary = x.chunk(2, -1)
    found = torch.sqrt(real.pow(2) + imaginary.pow(2) + 1e-12).pow(0.3)
    return torch.cat([found, found], -1)


def normalized(x: torch.Tensor) -> torch.Tensor:
    """Rows of which three are seven times smaller, by the root of their mean square as Gemma writes it."""
    x = x * torch.tensor([0.15, 0.15, 0.15, 1.0, 1.0, 1.0])[None, :, None]
    return x * ((x * x).mean(-1, keepdim=True) + 1e-12).pow(-0.5)


SMALL = {
    "odds": odds,
    "magnitudes": magnitudes,
    "logit": lambda x: torch.logit(torch.sigmoid(x * 4), 1e-6),
    "a Softmax": written_out,
    "a negative power": normalized,
}
ANGLES: dict[str, Callable[[torch.Tensor, nn.Module, torch.Tensor], torch.Tensor]] = {
    "a product": lambda x, layer, rows: (x[..., :1] * 300) @ rows,
    "a factor": lambda x, layer, rows: x[..., :1] * 300 * rows,
    "a layer": lambda x, layer, rows: layer(x) * 2,
    "a layer alone": lambda x, layer, rows: layer(x * 2).transpose(0, 1).transpose(0, 1),
}
MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a buffer": lambda scores, upper: scores + upper,
    "filled": lambda scores, upper: scores.masked_fill(upper != 0, -1e9),
    "filled with infinity": lambda scores, upper: scores.masked_fill(upper != 0, -torch.inf),
    "scaled": lambda scores, upper: scores + (1.0 - (upper == 0).float()) * -10000.0,
    "chosen": lambda scores, upper: torch.where(upper == 0, scores, -1e9),
    "made": lambda scores, upper: scores + torch.full((6, 6), -1e9).triu(1)[None],
    "filled with an integer": lambda scores, upper: scores.masked_fill(upper != 0, -10000),
    "scaled by an integer": lambda scores, upper: scores + (1 - (upper == 0).float()) * -10000,
    "chosen from a number": lambda scores, upper: torch.where(upper == 0, scores, torch.full((), -1e9)),
    "chosen from a constant": lambda scores, upper: torch.where(upper == 0, scores, torch.tensor(-1e9)),
    "chosen from a new tensor": lambda scores, upper: torch.where(upper == 0, scores, scores.new_full((1,), -1e9)),
    "a logarithm": lambda scores, upper: scores + torch.log((upper == 0).float()),
    "bounds": lambda scores, upper: torch.minimum(scores, torch.where(upper == 0, 1e9, -1e9)),
    "with a bias": lambda scores, upper: scores + (upper.clamp(min=-1e4) + torch.linspace(-2, 2, 6)),
    "moved": lambda scores, upper: (scores[:, None] + upper[None, None]).squeeze(1),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "positions": Positions,
    "buckets": Buckets,
    "norm": Norm,
    "standardized": Standardized,
    "standardized by statistics": ByStatistics,
    **{f"small: {name}": (lambda between=between: Between(between)) for name, between in SMALL.items()},
    **{f"angle: {name}": (lambda angle=angle: Angles(angle)) for name, angle in ANGLES.items()},
    **{f"mask: {name}": (lambda put=put: Attention(put)) for name, put in MASKS.items()},
}


@pytest.mark.parametrize(("name", "where"), pairs(MODELS, ["input_tensors", "output_tensors"]))
def test_8_bits_are_near_float(name: str, where: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    samples = [3 * torch.randn(4, 6, WIDTH) for _ in range(4)]
    spec = Uint8PerTensorSpec().to_quantization_spec()
    layer = QLayerConfig(weight=Int8PerChannelSpec(ch_axis=0).to_quantization_spec(), **{where: spec})
    graph = ModelQuantizer(QConfig(layer, quant_mode=QuantizationMode.fx_graph_mode)).quantize_model(model, samples)
    with torch.no_grad():
        wanted, found = model(samples[0]), graph(samples[0])
    loss = 10 * torch.log10(wanted.square().sum() / (wanted - found).square().sum())
    assert loss > 25, f"{loss:.1f} dB"


@pytest.mark.parametrize("kind", [Standardized, ByStatistics])
def test_a_weight_that_is_computed_from_parameters_is_that_of_a_layer(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(2, 6, WIDTH)
    layer = QLayerConfig(weight=Int8PerChannelSpec(ch_axis=0).to_quantization_spec())
    graph = ModelQuantizer(QConfig(layer, quant_mode=QuantizationMode.fx_graph_mode)).quantize_model(model, [x])
    (found,) = (one for one in graph.modules() if isinstance(one, nn.Conv1d))
    assert found.weight.shape == (WIDTH, 6, 3)
    with torch.no_grad():
        assert torch.allclose(graph(x), model(x), atol=0.05 * float(model(x).abs().max()))


def test_an_operator_may_be_called_like_a_method_of_modules() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.to(torch.float32))

    model, samples = Cast().eval(), [torch.arange(2 * WIDTH).reshape(2, WIDTH)]
    layer = QLayerConfig(input_tensors=Uint8PerTensorSpec().to_quantization_spec())
    graph = ModelQuantizer(QConfig(layer, quant_mode=QuantizationMode.fx_graph_mode)).quantize_model(model, samples)
    assert torch.allclose(graph(samples[0]), model(samples[0]), atol=0.1)


class NormHead(nn.Module):
    """A batch norm that stands alone, with channels whose variances are orders apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm.running_var.copy_(torch.logspace(-6, 2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(x[:, 0]))


def test_statistics_of_normalizations_are_not_rounded() -> None:
    torch.manual_seed(0)
    model = NormHead().eval()
    samples = [torch.randn(4, 6, WIDTH) * model.norm.running_var.sqrt().clamp_min(1.0) for _ in range(4)]
    spec = Uint8PerTensorSpec().to_quantization_spec()
    layer = QLayerConfig(input_tensors=spec, weight=Int8PerChannelSpec(ch_axis=0).to_quantization_spec())
    graph = ModelQuantizer(QConfig(layer, quant_mode=QuantizationMode.fx_graph_mode)).quantize_model(model, samples)
    read = {str(node.target): [str(one) for one in node.all_input_nodes] for node in graph.graph.nodes}
    assert not [name for name in read["aten.batch_norm.default"] if "quantizer" in name][1:]


@pytest.mark.parametrize(
    ("between", "left"),
    [
        (lambda x: (x.exp() + 1.0).sqrt(), {"add"}),
        (lambda x: (x.exp() + 1.0).neg().transpose(0, 1).erf(), {"add", "neg", "transpose"}),
        (lambda x: (x + 1.0).sqrt(), set()),  # it reads a layer
        (lambda x: x.exp() + 1.0, set()),  # a layer reads it
        (lambda x: ((x.exp() @ x.exp().transpose(1, 2)) * 0.1).sqrt() @ x, set()),  # a product
    ],
)
def test_cheap_operators_between_float_ones_stay_float(between: Callable[..., torch.Tensor], left: set[str]) -> None:
    graph = float_graph(Between(between).eval(), torch.randn(2, 6, WIDTH))
    assert {operator(node) for node in isolated_nodes(graph, ())} == left
