"""Algorithms of the torch flow on models whose structure is in no table."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from tests.pairs import pairs
from torch import nn

from quark.algorithms import rounders
from quark.errors import ConfigError, DataError
from quark.measure.gain import certain
from quark.measure.guard import best_change, best_of
from quark.onnx.quantization.config import algorithm as of_onnx
from quark.torch import ModelQuantizer
from quark.torch.algorithms.answers import answers, walk_of
from quark.torch.algorithms.blocks import find_blocks
from quark.torch.algorithms.channels import by_channels
from quark.torch.algorithms.context import ModelContext, Undo
from quark.torch.algorithms.guard import output_distance
from quark.torch.algorithms.judge import ScaleJudge
from quark.torch.algorithms.registry import ALGORITHMS
from quark.torch.algorithms.scaling import Place
from quark.torch.algorithms.trial import quantizing
from quark.torch.algorithms.tune import float_copy
from quark.torch.config.algorithms import AlgoConfig
from quark.torch.matching import match
from quark.torch.quantization.config.config import (
    AutoRoundConfig,
    GPTQConfig,
    HQQConfig,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    Uint4PerGroupSpec,
)

WIDTH, DEEP = 32, 2
INT4 = QLayerConfig(weight=Int4PerGroupSpec(ch_axis=-1, group_size=16).to_quantization_spec())
UINT4 = QLayerConfig(weight=Uint4PerGroupSpec(ch_axis=-1, group_size=16).to_quantization_spec())
CHANNEL = QLayerConfig(weight=Int4PerChannelSpec(ch_axis=0).to_quantization_spec())
MXFP4 = QLayerConfig(weight=OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False).to_quantization_spec())
W4A8 = QLayerConfig(input_tensors=Int8PerTensorSpec().to_quantization_spec(), weight=INT4.weight)
LAYERS = {"int4": INT4, "uint4": UINT4, "channel": CHANNEL, "mxfp4": MXFP4, "w4a8": W4A8}


CONVOLUTIONAL = "channel_equalization"  # refuses models with decoder blocks
#: Tests of their own: one changes the whole model, one looks at weights only, one is for convolutional networks.
ELSEWHERE = ("rotation", "hqq", CONVOLUTIONAL)
SETTINGS: dict[str, dict[str, Any]] = {
    "autoround": {"iters": 8, "lr": 0.06, "minmax_lr": 0.01, "batch_size": 2},
    "adaround": {"num_iterations": 60},
    "adaquant": {"num_iterations": 30},
    "svdquant": {"min_layer_size": 32, "svd_rank": 2, "alpha_candidates": [0.5]},
}
UNHARMFUL = [row.config(**SETTINGS.get(row.config.name, {})) for row in ALGORITHMS if row.config.name not in ELSEWHERE]


class Norm(nn.Module):
    """Root mean square, with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """Attention of one head and a gated feed-forward part, by names of no architecture."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = Norm(), Norm()
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.e, self.f = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.g = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.n1(x)
        scores = self.a(h) @ self.b(h).mT * WIDTH**-0.5 + mask
        x = x + self.d(scores.softmax(-1) @ self.c(h))
        h = self.n2(x)
        return x + self.g(nn.functional.silu(self.e(h)) * self.f(h))


class Decoder(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.parts = nn.ModuleList([Block() for _ in range(DEEP)])
        self.last, self.head = Norm(), nn.Linear(WIDTH, 50, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.full((ids.shape[1], ids.shape[1]), -1e4), 1)
        x = self.words(ids)
        for part in self.parts:
            x = part(x, mask=mask)
        return self.head(self.last(x))


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


def samples(count: int = 6, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (2, 24), generator=generator) for _ in range(count)]


def quantize(layer: QLayerConfig, algorithms: list[AlgoConfig] | None, model: nn.Module | None = None) -> Any:
    config = QConfig(layer, exclude=["head"] if model is None else [], algo_config=algorithms)
    return ModelQuantizer(config).quantize_model(decoder() if model is None else model, samples())


def error(model: nn.Module, seed: int = 1) -> float:
    """Distance of the logits to the float model's, on calibration data (seed 1) or others."""
    with torch.no_grad():
        return sum(float((model(ids) - decoder()(ids)).square().mean()) for ids in samples(seed=seed))


def same_state(model: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@cache
def error_of_rounding(layer: str) -> float:
    return error(quantize(LAYERS[layer], None))


@pytest.mark.usefixtures("few_candidates")
@pytest.mark.parametrize(
    ("config", "layer"),
    [
        *pairs(UNHARMFUL, ["int4", "w4a8"]),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in product(UNHARMFUL, ["uint4", "channel", "mxfp4"])),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_never_worse_than_rounding(config: AlgoConfig, layer: str) -> None:
    """Contract of the registry, on the data of the calibration (blocks are judged one by one, so that their sum may be
    off by a little); frozen weights give the same answers. Whatever draws numbers, or makes a layer that initializes
    itself, does so with a generator of its own: the caller's random state stays."""
    decoder()
    state = torch.get_rng_state()
    model = quantize(LAYERS[layer], [config])
    assert torch.equal(torch.get_rng_state(), state)
    assert error(model) <= 1.05 * error_of_rounding(layer)
    before = model(samples()[0])
    assert torch.equal(ModelQuantizer.freeze(model)(samples()[0]), before)


@pytest.mark.parametrize("layer", LAYERS)
def test_gptq_beats_rounding_on_other_data(layer: str) -> None:
    assert error(quantize(LAYERS[layer], [GPTQConfig()]), 5) < 0.8 * error(quantize(LAYERS[layer], None), 5)


def test_hqq_moves_scales_or_real_zero_points() -> None:
    real = QLayerConfig(
        weight=replace(Uint4PerGroupSpec(ch_axis=-1, group_size=16).to_quantization_spec(), zero_point_type="float32")
    )
    for layer in (INT4, real):
        errors = [
            float(sum((p - q).abs().pow(0.7).sum() for p, q in zip(weights(m), weights(decoder()), strict=True)))
            for m in (ModelQuantizer.freeze(quantize(layer, algorithms)) for algorithms in (None, [HQQConfig()]))
        ]
        assert errors[1] < 0.97 * errors[0]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach() for name, value in model.named_parameters() if name.startswith("parts") and value.dim() == 2]


@pytest.mark.parametrize("config", [GPTQConfig(desc_act=False, static_groups=False), GPTQConfig(block_size=7)])
def test_gptq_settings(config: GPTQConfig) -> None:
    nearest = error(quantize(UINT4, None))
    assert error(quantize(UINT4, [config])) < 0.8 * nearest


def test_gptq_damping_moves_towards_rounding() -> None:
    errors = [error(quantize(INT4, [GPTQConfig(damp_percent=damping)])) for damping in (0.01, 100.0)]
    assert errors[0] < errors[1]


def test_gptq_tunes_only_the_layers_that_are_named() -> None:
    model = quantize(INT4, [GPTQConfig(inside_layer_modules=["f", "a"], model_decoder_layers="parts")])
    start = decoder().state_dict()
    tuned = {
        name for name, value in model.state_dict().items() if name in start and not torch.equal(value, start[name])
    }
    assert tuned == {f"parts.{k}.{name}.weight" for k in range(DEEP) for name in "fa"}


@pytest.mark.parametrize("config", [GPTQConfig, partial(AutoRoundConfig, iters=8)])
def test_layers_that_are_not_tuned_are_still_quantized(config: Any) -> None:
    """Nothing keeps the float weights that it saw while quantizers were off."""
    model = quantize(W4A8, [config(inside_layer_modules=["f"])])
    before = model(samples()[0])
    assert torch.equal(ModelQuantizer.freeze(copy.deepcopy(model))(samples()[0]), before)


def test_the_twin_of_a_block_quantizes_nothing() -> None:
    model = quantize(W4A8, None)
    x, mask = torch.randn(1, 4, WIDTH), torch.zeros(4, 4)
    assert not torch.equal(model.parts[0](x, mask=mask), decoder().parts[0](x, mask=mask))
    assert torch.equal(float_copy(model.parts[0])(x, mask=mask), decoder().parts[0](x, mask=mask))


def test_a_model_without_blocks_is_tuned_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    data = [torch.randn(64, 16) @ torch.randn(16, 16) for _ in range(3)]
    reference = copy.deepcopy(model)

    def loss(algorithms: list[AlgoConfig]) -> float:
        config = QConfig(CHANNEL, algo_config=algorithms)
        found = ModelQuantizer(config).quantize_model(copy.deepcopy(reference), data)
        with torch.no_grad():
            return sum(float((found(x) - reference(x)).square().sum()) for x in data)

    assert loss([GPTQConfig()]) < 0.7 * loss([])


@pytest.mark.parametrize("config", [GPTQConfig(), AutoRoundConfig(iters=1)])
def test_quantized_layers_that_are_not_tuned_are_named(config: AlgoConfig, caplog: pytest.LogCaptureFixture) -> None:
    quantize(INT4, [config])
    assert "rounded to nearest" not in caplog.text  # the head is excluded
    quantize(INT4, [config], decoder())
    assert "1 others are rounded to nearest: head" in caplog.text


@pytest.mark.parametrize("row", [row for row in ALGORITHMS if row.config.name in ("rotation", "hqq")])
def test_the_random_state_of_the_caller_stays(row: Any) -> None:
    """Those that ``test_never_worse_than_rounding`` does not run."""
    model = decoder()
    before = torch.get_rng_state()
    ModelQuantizer(QConfig(W4A8, exclude=["head"], algo_config=[row.config()])).quantize_model(model, samples(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_learning_leaves_no_gradients_in_the_model() -> None:
    model = decoder()
    quantize(LAYERS["int4"], [AutoRoundConfig(iters=2, batch_size=2)], model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_blocks_are_found_from_the_modules() -> None:
    assert list(find_blocks(decoder()).modules) == [f"parts.{k}" for k in range(DEEP)]
    assert find_blocks(nn.Linear(3, 3)).path == ""
    with pytest.raises(ConfigError, match=r"model_decoder_layers.*'parts'"):
        find_blocks(decoder(), "part")


def test_the_caller_keeps_mode_data_and_configuration() -> None:
    model, config = decoder().train(), QConfig(INT4, algo_config=[GPTQConfig()])
    before = copy.deepcopy(config)
    ModelQuantizer(config).quantize_model(model, iter(samples()))
    assert model.training and config == before


@pytest.mark.parametrize(
    ("algorithms", "data", "message"),
    [
        ([GPTQConfig()], None, "need samples"),
        ([GPTQConfig(inside_layer_modules=["q_proj"])], samples(), "inside_layer_modules"),
        ([GPTQConfig(model_decoder_layers="layers")], samples(), "model_decoder_layers"),
    ],
)
def test_what_cannot_work_leaves_the_model_as_it_was(algorithms: Any, data: Any, message: str) -> None:
    model = decoder()
    with pytest.raises((ConfigError, DataError), match=message):
        ModelQuantizer(QConfig(INT4, algo_config=algorithms)).quantize_model(model, data)
    assert same_state(model, decoder())
    assert not any(type(module).__name__.startswith("Quant") for module in model.modules())


def test_a_failure_half_way_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*arguments: Any, **settings: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 9:
            raise RuntimeError("power cut")
        return round_columns(*arguments, **settings)

    round_columns = rounders.round_columns
    monkeypatch.setattr(rounders, "round_columns", fail)
    model = decoder()
    with pytest.raises(RuntimeError, match="power cut"):
        ModelQuantizer(QConfig(INT4, algo_config=[GPTQConfig()])).quantize_model(model, samples())
    assert same_state(model, decoder())
    assert set(model.state_dict()) == set(decoder().state_dict())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "block_size"),
        ({"damp_percent": -1.0}, "damp_percent"),
        ({"static_groups": False}, "static_groups"),
        ({"name": "gtpq"}, "name"),
    ],
)
def test_bad_settings_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTQConfig(**fields)


def test_algorithms_in_files() -> None:
    config = QConfig(INT4, algo_config=[GPTQConfig(block_size=64)])
    assert QConfig.from_dict(config.to_dict()) == config
    assert QConfig(INT4, algo_config=(GPTQConfig(block_size=64),)) == config  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean 'gptq'"):
        AlgoConfig.from_dict({"name": "gtpq"})
    with pytest.raises(ConfigError, match="Did you mean 'block_size'"):
        AlgoConfig.from_dict({"name": "gptq", "blocksize": 3})
    for entry, words in (
        ("gptq", "unknown algorithm 'gptq'"),
        (GPTQConfig, r"GPTQConfig is a class: write GPTQConfig\(\)"),
        (of_onnx.GPTQConfig(), "this GPTQConfig is of quark.onnx"),
    ):
        with pytest.raises(TypeError, match=f"algo_config must be a list of algorithms: {words}"):
            QConfig(INT4, algo_config=[entry])  # type: ignore[list-item]
    for entry in (GPTQConfig, GPTQConfig()):
        with pytest.raises(ConfigError, match=r"this GPTQConfig is of quark\.torch; the other flow has"):
            of_onnx.checked([entry])


def test_a_change_is_taken_where_it_surely_gains() -> None:
    """Gains of all samples are taken, the luck of half of them is not; few samples must gain 2 %."""
    before = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    better = [0.995 * x for x in before]
    assert best_of([better], before) == 0 and best_of([before, better], before) == 1
    assert best_of([before], before) is None and best_of([], before) is None
    assert best_of([[1.01 * x for x in before]], before) is None
    even = [x - 1 if k % 2 == 0 else x + 0.9 for k, x in enumerate(before)]  # -0.1 a pair, that one half alone has
    odd = [x - 1 if k % 2 else x + 0.9 for k, x in enumerate(before)]
    assert sum(even) < sum(before) and best_of([even, odd], before) is None
    assert best_of([[0.99, 1.99]], [1.0, 2.0]) is None and best_of([[0.9, 1.9]], [1.0, 2.0]) == 0


def test_no_other_change_is_tried_where_the_first_leaves_no_doubt() -> None:
    """Half of the error, by as much in every sample or by very unlike parts; few samples leave doubt."""
    before = [1.0, 2.0, 3.0, 4.0]
    assert certain([0.5 * x for x in before], before) and not certain([0.1, 2.0, 2.8, 0.1], before)
    assert not certain([0.5, 1.0, 1.5], before[:3])


@pytest.mark.parametrize(("value", "kept"), [(0.0, True), (4.0, False)])
def test_a_change_that_helps_is_kept_and_one_that_harms_is_not(value: float, kept: bool) -> None:
    """A column that only meets zeros widens the range of its group: the float answers are the same without it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    layer = model[0]
    with torch.no_grad():
        layer.weight[:, 3] = 1.0
    samples = [torch.randn(8, 32) * (torch.arange(32) != 3) for _ in range(8)]
    found = match(model, QConfig(INT4))
    walk = walk_of(ModelContext(model, samples, found, Undo()), "")
    before = layer.weight.detach().clone()

    def change(context: ModelContext, part: str) -> None:
        weight = before.clone()
        weight[:, 3] = value
        context.undo.set_parameter(layer, "weight", weight)

    assert (best_change([change], output_distance(walk).errors) is change) == kept
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("layer", ["int4", "w4a8"])
def test_scales_are_improved_channel_by_channel(layer: str) -> None:
    """On inputs that chose nothing the weights lose less under the scales than by rounding alone."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False)
    size = torch.logspace(-1, 1, 64)[torch.randperm(64)]
    (item,) = match(nn.Sequential(linear), QConfig(LAYERS[layer])).quantized
    judge = ScaleJudge([item], torch.randn(256, 64) * size)
    (s,) = by_channels([(Place("norm", ("0",)), judge, torch.ones(64))])
    fresh = ScaleJudge([item], torch.randn(256, 64) * size)
    assert s is not None and fresh.error(s) < 0.9 * fresh.error()


def test_channels_that_share_a_row_keep_a_common_scale() -> None:
    """Two heads of queries read one of values; a group that reads two rows in another order has no scales."""
    torch.manual_seed(0)
    (item,) = match(nn.Sequential(nn.Linear(32, 8, bias=False)), QConfig(INT4)).quantized
    judge, once = ScaleJudge([item], torch.randn(64, 32)), torch.arange(16)
    places = [Place("v", ("0",), channels=torch.cat([once, other])) for other in (once, once.flip(0))]
    s, none = by_channels([(place, judge, torch.ones(32)) for place in places])
    assert s is not None and torch.equal(s[:16], s[16:]) and not torch.equal(s, torch.ones(32))
    assert none is None


@pytest.mark.parametrize("quantized", [False, True])
def test_blocks_in_turn_answer_as_the_model_does(quantized: bool) -> None:
    """One block at a time, with the model's own beginning and end, and with a change that is taken back."""
    model = decoder()
    found = match(model, QConfig(INT4, exclude=["head"]))
    walk = walk_of(ModelContext(model, samples(), found, Undo()), "")
    assert walk.blocks.path == "parts"
    items = found.quantized if quantized else []
    with quantizing(list(items)), torch.no_grad():
        wanted = [model(x).reshape(-1, 50) for x in samples()]
    assert all(torch.equal(x, wanted[k]) for k, (x,) in zip((0, 2), answers(walk, [0, 2], quantized), strict=True))

    def double(context: ModelContext, part: str) -> None:
        if part == "parts.1":
            context.undo.set_parameter(model.parts[1].n1, "weight", 2 * model.parts[1].n1.weight)

    assert not torch.equal(answers(walk, [0], quantized, double)[0][0], wanted[0])
    assert torch.equal(answers(walk, [0], quantized)[0][0], wanted[0])
