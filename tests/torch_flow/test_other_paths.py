"""Samples that take other paths through a model: experts that get other tokens once it is quantized, layers that the
first sample does not reach, answers that blocks in the middle have a part in. Every algorithm runs, and on data that
decided nothing loses no more than rounding; blocks are skipped only where nothing else reads them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.torch_flow.test_registry_contract import CONFIGS, LAYERS
from torch import nn
from torch.nn import functional

from quark.torch import ModelQuantizer
from quark.torch.algorithms.answers import BlockWalk, answers, walk_of
from quark.torch.algorithms.blocks import Blocks, Stream, equal_arguments, find_blocks, record
from quark.torch.algorithms.context import ModelContext, Undo
from quark.torch.algorithms.equalization import run_equalization  # of convolutions; a decoder is refused
from quark.torch.algorithms.inputs import are_alike
from quark.torch.algorithms.registry import ALGORITHMS
from quark.torch.matching import match
from quark.torch.quantization.config.config import QConfig, RotationConfig
from quark.torch.sensitivity import sensitivity

WIDTH, EXPERTS, WORDS = 64, 4, 50
Sample = dict[str, torch.Tensor]
ROWS = [row.config for row in ALGORITHMS if row.run is not run_equalization]


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = Norm(), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.picture = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, picture: torch.Tensor | None) -> torch.Tensor:
        x = self.norm(hidden)
        chosen, out = self.router(x).argmax(-1), torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            if (here := chosen == number).any():
                out[here] = expert(x[here])
        return hidden + out if picture is None else hidden + out + self.picture(x) * picture


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, picture: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden, picture)
        return self.head(self.norm(hidden))


def network() -> Network:
    torch.manual_seed(0)
    model = Network()
    with torch.no_grad():
        model.words.weight.mul_(torch.logspace(-1, 1, WIDTH))
    return model.eval()


def drawn(count: int, seed: int, length: int, picture: bool) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    more = {"picture": torch.tensor(3.0)} if picture else {}
    return [{"ids": torch.randint(0, WORDS, (1, length), generator=generator), **more} for _ in range(count)]


@cache
def case(name: str) -> tuple[list[Sample], list[Sample]]:
    """Samples, and others that decide nothing."""
    if name == "experts":  # one word, which one expert gets; then single words, whose calls are all of one shape
        return [{"ids": torch.full((1, 12), 5)}, *drawn(12, 1, 12, False), *drawn(12, 2, 1, False)], drawn(
            20, 9, 12, False
        )
    return [*drawn(1, 1, 12, False), *drawn(7, 2, 12, True)], drawn(20, 9, 12, True)


@torch.no_grad()
def loss(name: str, config: Any, scheme: str) -> float:
    """Relative error of the answers."""
    samples, held = case(name)
    algorithms = [] if config is None else [config]
    quantized = ModelQuantizer(QConfig(LAYERS[scheme][32], exclude=["head"], algo_config=algorithms))
    model = quantized.quantize_model(network(), samples)
    found, wanted = (torch.cat([one(**sample) for sample in held]) for one in (model, network()))
    return float((found - wanted).norm() / wanted.norm())


@cache
def nearest(name: str, scheme: str) -> float:
    return loss(name, None, scheme)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("experts", "int4"), pytest.param("experts", "w4a4", marks=pytest.mark.slow), ("pictures", "int4")],
)
@pytest.mark.parametrize("kind", ROWS, ids=lambda kind: kind.name)
def test_paths_that_samples_do_not_share(kind: Any, name: str, scheme: str) -> None:
    config = replace(CONFIGS[kind], r2=False) if kind is RotationConfig else CONFIGS[kind]
    assert loss(name, config, scheme) < nearest(name, scheme) * 1.1


def test_other_tokens_of_the_same_number_are_no_pair() -> None:
    rows = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))
    assert are_alike(rows[0] + rows[1] / 4, rows[0])
    assert not are_alike(rows[1], rows[0])
    assert not are_alike(rows[0, :5], rows[0])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden + self.down(functional.relu(self.up(hidden)))
        return hidden if more is None else hidden + more


class Reading(nn.Module):
    """Blocks that something besides the next one reads: all of them, or the first where there is a picture."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.words, self.head = what, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, ids: torch.Tensor, picture: torch.Tensor | None = None) -> torch.Tensor:
        states = [self.words(ids)]
        for number, layer in enumerate(self.layers):
            early = number == 2 and self.what == "a later block" and picture is not None
            states.append(layer(states[-1], states[1] if early else None))
        if self.what == "all":
            return self.head(sum(states))
        late = self.what == "the end" and picture is not None
        return self.head(states[-1] + 4 * states[1] * picture if late else states[-1])


def reading(what: str) -> Reading:
    torch.manual_seed(0)
    return Reading(what).eval()


@pytest.mark.parametrize("what", ["all", "the end", "a later block", "nothing"])
def test_layers_have_the_losses_of_whole_runs(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = case("pictures")[0][:4]
    found = sensitivity(reading(what), samples, ["int4_wo_32"], metric="mse")
    monkeypatch.setattr("quark.torch.layer_runs.find_chain", lambda runs: None)
    whole = sensitivity(reading(what), samples, ["int4_wo_32"], metric="mse")
    assert [one.loss for one in found.trials] == pytest.approx([one.loss for one in whole.trials], rel=1e-4)


@pytest.mark.parametrize("what", ["all", "the end", "a later block", "nothing"])
def test_blocks_are_given_what_the_whole_model_gives_them(what: str) -> None:
    model, samples = reading(what), case("pictures")[0][:4]
    _, stream = record(model, find_blocks(model), samples)
    seen: list[Any] = []
    with model.layers[2].register_forward_pre_hook(lambda module, args: seen.append(args[1])):
        for sample in samples:
            model(**sample)
    given = [call[0][1] if call[0][1:] else None for call in stream.calls["layers.2"]]
    assert equal_arguments(given, seen)


@pytest.mark.parametrize("what", ["all", "the end", "a later block", "nothing"])
def test_answers_of_walks_are_those_of_the_model(what: str) -> None:
    model, samples = reading(what), case("pictures")[0][:4]
    quantizer = ModelQuantizer(QConfig(LAYERS["int4"][32], exclude=["head"]))
    context = ModelContext(model, samples, match(model, quantizer.config), Undo())
    found = answers(walk_of(context, ""), [0, 3])
    expected = [answers(BlockWalk(context, Blocks("", {"": model}), Stream(samples)), [k])[0] for k in (0, 3)]
    assert equal_arguments(found, expected)
