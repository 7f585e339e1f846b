"""Recurrent layers taken apart: they compute what they did, and their projections are quantized like linear layers."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from quark.errors import ConfigError, ModelError
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
)
from quark.torch.recurrent import Unrolled, unroll_recurrent

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(7, 3, 16, generator=GENERATOR)
CHANNEL = QLayerConfig(weight=Int8PerChannelSpec(0, True).to_quantization_spec())
KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "two ways": (nn.LSTM, {"bidirectional": True, "num_layers": 2, "batch_first": True}),
    "projected": (nn.LSTM, {"proj_size": 4, "num_layers": 2, "bias": False}),
    "gru": (nn.GRU, {"bidirectional": True, "num_layers": 2}),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}),
}


def build(name: str, **more: Any) -> Any:
    cls, fields = KINDS[name]
    torch.manual_seed(0)
    return cls(16, 8, **{**fields, **more}).eval()


def flat(result: Any) -> list[torch.Tensor]:
    output, state = result
    return [getattr(output, "data", output), *(state if isinstance(state, tuple) else (state,))]


def first_state(model: Any, rows: int) -> Any:
    count = model.num_layers * (2 if model.bidirectional else 1)
    hidden = torch.randn(count, rows, model.proj_size or 8, generator=GENERATOR)
    return (hidden, torch.randn(count, rows, 8, generator=GENERATOR)) if isinstance(model, nn.LSTM) else hidden


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_the_steps_are_those_of_torch(name: str) -> None:
    """Batches, one sequence, packed sequences of several lengths in any order, with and without a first state."""
    model = build(name)
    x = X.transpose(0, 1) if model.batch_first else X
    packed = pack_padded_sequence(x, torch.tensor([4, 7, 2]), model.batch_first, enforce_sorted=False)
    state = first_state(model, 3)
    single = tuple(part[:, 0] for part in state) if isinstance(state, tuple) else state[:, 0]
    inputs = [(x,), (x, state), (X[:, 0],), (X[:, 0], single), (packed,), (packed, state)]
    expected, names = [flat(model(*given)) for given in inputs], list(model.state_dict())
    undo = unroll_recurrent(model)
    assert isinstance(model, Unrolled) and not model._parameters
    for given, wanted in zip(inputs, expected, strict=True):
        for one, other in zip(flat(model(*given)), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    undo[model]()
    assert type(model) is KINDS[name][0] and list(model.state_dict()) == names
    assert torch.equal(flat(model(x))[0], expected[0][0])


def rounded(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    return (weight / scale).round().clamp(-128, 127) * scale


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_weights_are_those_of_a_float_layer_that_holds_them(name: str) -> None:
    model = nn.ModuleDict({"rnn": build(name)})
    twin = copy.deepcopy(model)
    for key, value in twin.named_parameters():
        if "weight" in key:
            value.copy_(rounded(value))
    quantized = ModelQuantizer(QConfig(QLayerConfig(), layer_quant_config={"rnn.*": CHANNEL})).quantize_model(model)
    for one, other in zip(flat(quantized["rnn"](X)), flat(twin["rnn"](X)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    frozen = ModelQuantizer.freeze(quantized)
    torch.testing.assert_close(frozen["rnn"].ih_l0.weight, twin["rnn"].weight_ih_l0)


def test_static_and_dynamic_inputs_of_both_projections() -> None:
    """The state is one row a token: static ranges cover all steps, scales per token follow each row."""
    static, token = Int8PerTensorSpec().to_quantization_spec(), Int8PerChannelSpec(1, True, is_dynamic=True)
    model = nn.ModuleDict({"rnn": build("lstm")})
    with torch.no_grad():
        output, _ = model["rnn"](X)
        states = torch.cat([torch.zeros(1, 3, 8), output[:-1]])
    for spec in (static, token.to_quantization_spec()):
        config = QConfig(QLayerConfig(spec, None, CHANNEL.weight), layer_type_quant_config={nn.LSTM: CHANNEL})
        layer = QLayerConfig(spec, None, CHANNEL.weight)
        config = QConfig(QLayerConfig(), layer_type_quant_config={nn.LSTM: layer})
        assert QConfig.from_dict(config.to_dict()) == QConfig(
            QLayerConfig(), layer_type_quant_config=config_types(config), version=config.version
        )
        twin = ModelQuantizer(config).quantize_model(Wrapped(copy.deepcopy(model["rnn"])), [X]).rnn
        if spec is static:
            assert float(twin.ih_l0.input_quantizer.scale) == pytest.approx(float(X.abs().max()) / 127.5)
            assert float(twin.hh_l0.input_quantizer.scale) == pytest.approx(float(states.abs().max()) / 127.5)
        with torch.no_grad():
            error = (twin(X)[0] - output).norm() / output.norm()
        assert 0 < error < 0.02


def config_types(config: QConfig) -> dict[Any, QLayerConfig]:
    """As a file names them."""
    from quark.torch.layers import RECURRENT

    return {RECURRENT[key]: value for key, value in config.layer_type_quant_config.items()}  # type: ignore[index]


class Wrapped(nn.Module):
    """A recurrent layer and a linear one."""

    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


def test_recurrent_layers_stay_float_until_they_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Wrapped(build("lstm"))
    names = [name for name, _ in model.named_parameters()]
    ModelQuantizer(QConfig(CHANNEL)).quantize_model(model)
    assert type(model.rnn) is nn.LSTM and [name for name, _ in model.named_parameters()] == names
    assert "rnn (LSTM)" in caplog.text
    with pytest.raises(ModelError, match="only where layer_quant_config or a type names it"):
        ModelQuantizer(QConfig(CHANNEL)).quantize_model(nn.ModuleDict({"rnn": build("lstm")}))


def test_errors_put_them_back() -> None:
    model = Wrapped(build("rnn"))
    before = model(X)
    with pytest.raises(ConfigError, match=r"rnn\.ih_l0"):
        ModelQuantizer(QConfig(QLayerConfig(), layer_quant_config={"rnn.h_l0": CHANNEL})).quantize_model(model)
    assert type(model.rnn) is nn.RNN and torch.equal(model(X), before)


def test_training_moving_and_saving() -> None:
    block = QLayerConfig(OCP_MXFP4Spec(-1).to_quantization_spec(), None, OCP_MXFP4Spec(-1).to_quantization_spec())
    model = Wrapped(build("two ways", batch_first=False, dropout=0.5))
    model.head = nn.Linear(16, 4)
    ModelQuantizer(QConfig(CHANNEL, layer_type_quant_config={nn.LSTM: block})).quantize_model(model)
    model.train()
    model(X).square().mean().backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in model.rnn.parameters())
    model.eval()
    expected, stream = model(X), io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(X), expected)
    assert torch.equal(copy.deepcopy(model)(X), expected)
    assert model.half()(X.half()).dtype == torch.float16


def test_types_by_name() -> None:
    spec = QTensorConfig.from_dict(CHANNEL.weight.to_dict())  # type: ignore[union-attr]
    for key in ("LSTM", "LSTMProjection", nn.LSTM):
        config = QConfig(QLayerConfig(), layer_type_quant_config={key: QLayerConfig(weight=spec)})  # type: ignore[dict-item]
        model = ModelQuantizer(config).quantize_model(Wrapped(build("lstm")))
        assert model.rnn.hh_l0.weight_quantizer is not None
