"""Graph mode: what is exported, where quantizers stand, and that the numbers are those of torch and ONNX Runtime."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from quark.errors import ConfigError, DataError, ModelError
from quark.torch import ModelQuantizer, export_onnx, fold_batch_norm, learned_scales
from quark.torch.fake_quantize import FakeQuantize
from quark.torch.graph.bias import BiasQuantizer
from quark.torch.graph.point import points
from quark.torch.graph.trace import float_graph
from quark.torch.quantization.config.config import (
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    Uint8PerTensorSpec,
)
from quark.torch.quantization.config.type import Dtype, QSchemeType, QuantizationMode, ScaleType
from quark.torch.quantization.observer import LSQObserver, PerTensorPowOf2MinMSEObserver, TQTObserver

INT8 = Int8PerTensorSpec().to_quantization_spec()
UINT8 = Uint8PerTensorSpec().to_quantization_spec()
ROWS = Int8PerChannelSpec(ch_axis=0, symmetric=True).to_quantization_spec()
INT32 = QTensorConfig(Dtype.int32, qscheme=QSchemeType.per_tensor)
FX = QuantizationMode.fx_graph_mode
READ = QLayerConfig(input_tensors=UINT8, weight=ROWS, bias=INT32)
WRITTEN = QLayerConfig(input_tensors=INT8, output_tensors=INT8, weight=INT8)


class Shortcut(nn.Module):
    """conv, norm, ReLU, conv, norm, addition, ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += x
        return self.act(y)


class Net(nn.Module):
    """A stem, a residual block, a concatenation, pools, dropout, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 3, padding=1), Shortcut(8)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 3, padding=1)
        self.pool, self.drop, self.fc = nn.MaxPool2d(2, ceil_mode=True), nn.Dropout(0.5), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.stem(x))
        x = torch.cat([self.left(x).relu(), self.right(x).relu()], 1)
        x = self.pool(x).mean((2, 3))
        return self.fc(self.drop(x))  # type: ignore[no-any-return]


class Inverted(nn.Module):
    """MobileNet's block: expansion, depthwise, squeeze and excitation, hard swish, projection, shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Sequential(nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12), nn.Hardswish())
        self.deep = nn.Sequential(
            nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(12), nn.ReLU6()
        )
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.shrink = nn.Sequential(nn.Conv2d(12, 6, 1, bias=False), nn.BatchNorm2d(6))
        self.up = nn.Sequential(nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2), nn.BatchNorm2d(4), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.deep(self.grow(x))
        gate = self.excite(self.squeeze(nn.functional.adaptive_avg_pool2d(y, 1)).relu())
        y = self.shrink(y * nn.functional.hardsigmoid(gate)) + x
        y = self.up(y)
        return y * torch.sigmoid(y)


def lively(model: nn.Module) -> nn.Module:
    """Statistics and affine numbers of batch norms that are not those of an untrained model."""
    generator = torch.Generator().manual_seed(11)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value, low, high in ((module.running_mean, -0.5, 0.5), (module.running_var, 0.3, 2.0)):
                value.copy_(torch.rand(len(value), generator=generator) * (high - low) + low)  # type: ignore[union-attr, arg-type]
            with torch.no_grad():
                module.weight.copy_(torch.rand(len(module.weight), generator=generator) + 0.5)
                module.bias.copy_(torch.randn(len(module.bias), generator=generator) / 4)
    return model.eval()


def net(cls: type[nn.Module] = Net) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return lively(cls())


def images(channels: int = 3, count: int = 3, size: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(size, channels, 8, 8, generator=generator) for _ in range(count)]


@cache
def exported() -> Any:
    """``Net`` as a graph of torch, which quantizing does not change."""
    batch: Any = torch.export.Dim.AUTO
    return torch.export.export(net(), (images()[0],), dynamic_shapes=({0: batch},)).module()


def graph_of(model: nn.Module, layer: QLayerConfig, samples: Any = None, **more: Any) -> Any:
    samples = images() if samples is None else samples
    return ModelQuantizer(QConfig(layer, quant_mode=FX, **more)).quantize_model(model, samples)


def calls(graph: Any) -> list[str]:
    """Modules and operators in order."""
    kept = (node for node in graph.graph.nodes if node.op in ("call_module", "call_function"))
    return [str(node.target).removeprefix("aten.") for node in kept]


# ---- the float graph ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "channels"), [(Net, 3), (Inverted, 6)])
def test_the_float_graph_computes_what_the_model_computes(cls: type[nn.Module], channels: int) -> None:
    model, (x, *_) = net(cls), images(channels)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    graph = float_graph(model, x)
    names = calls(graph)
    assert not any("batch_norm" in name or "dropout" in name or name.endswith("_.default") for name in names)
    assert not any("norm" in name for name in graph.state_dict())
    for batch in (x, x[:1], torch.cat([x, x, x])):
        torch.testing.assert_close(graph(batch), model(batch), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not {id(value) for value in graph.parameters()} & {id(value) for value in model.parameters()}


def test_a_batch_of_one_is_no_constant() -> None:
    model, (x, *_) = net(), images(size=1)
    graph = float_graph(model, x)
    wide = torch.cat([x, -x, 2 * x])
    torch.testing.assert_close(graph(wide), model(wide), rtol=1e-4, atol=1e-5)


class Fixed(nn.Module):
    """A model for one size of batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x.reshape(2, 12))  # type: ignore[no-any-return]


def test_a_model_that_fixes_its_batch_keeps_it() -> None:
    model, x = Fixed(), torch.randn(2, 3, 4)
    torch.testing.assert_close(float_graph(model, x)(x), model(x))


def test_a_graph_of_the_user_is_taken_as_it_is() -> None:
    model, (x, *_) = net(), images()
    given: Any = torch.export.export(model, (x,)).module()
    before = str(given.graph)
    graph = graph_of(given, READ)
    assert isinstance(graph, GraphModule) and graph is not given
    assert str(given.graph) == before
    assert torch.equal(graph(x), graph_of(model, READ)(x))


def test_models_that_cannot_be_graphs_are_refused() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) if x.sum() > 0 else x  # type: ignore[no-any-return]

    with pytest.raises(ModelError, match="eager_mode needs none"):
        graph_of(Branching(), READ)
    training: Any = torch.export.export(net().train(), (images()[0],)).module()
    with pytest.raises(ModelError, match=r"export model\.eval\(\)"):
        graph_of(training, READ)


# ---- batch norms of eager models ------------------------------------------------------------------------------------


def test_batch_norms_are_folded_into_the_layers_of_a_model() -> None:
    for cls, channels, folded in (
        (Net, 3, ["block.conv1", "block.conv2"]),
        (Inverted, 6, ["grow.0", "deep.0", "shrink.0", "up.0"]),
    ):
        model, (x, *_) = net(cls), images(channels)
        expected = model(x)
        assert fold_batch_norm(model, x) == folded
        assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_norm_that_does_not_follow_its_layer_alone_stays() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return self.norm(y) + y  # type: ignore[no-any-return]

    model = lively(Twice())
    assert fold_batch_norm(model, images()[0]) == []
    quantized = ModelQuantizer(QConfig(QLayerConfig(weight=INT8))).quantize_model(model)
    with pytest.raises(ModelError, match="quantized already"):
        fold_batch_norm(quantized, images()[0])


# ---- placement ------------------------------------------------------------------------------------------------------


def test_quantizers_stand_behind_patterns() -> None:
    """One quantizer behind conv-norm-ReLU and add-ReLU; one scale for what is joined; none of their own for pools."""
    graph = graph_of(exported(), WRITTEN)
    joined = "quantizers.relu"
    assert calls(graph) == [
        *("quantizers.x", "stem", "quantizers.stem"),
        *("block.conv1", "relu.default", "quantizers.block_act_relu", "block.conv2", "quantizers.block_conv2"),
        *("add.Tensor", "relu.default", "quantizers.block_act_relu_2"),
        *("left", "relu.default", joined, "right", "relu.default", joined, "cat.default", joined),
        *("max_pool2d.default", "mean.dim", "quantizers.mean", "fc", "quantizers.fc"),
    ]
    assert {type(graph.get_submodule(name)).__name__ for name in ("stem", "block.conv1")} == {"QuantConv2d"}


def test_what_only_inputs_are_quantized_leaves_the_result_float() -> None:
    graph = graph_of(exported(), READ)
    assert calls(graph)[-1] == "fc"
    assert next(name for name in calls(graph) if name.startswith("quantizers.")) == "quantizers.x"


def test_excluded_layers_and_operators_stay_float_and_read_float() -> None:
    layer = QLayerConfig(input_tensors=UINT8, weight=ROWS)
    graph = graph_of(exported(), layer, exclude=["right", "block.add"])
    assert type(graph.right) is nn.Conv2d
    reader = next(node for node in graph.graph.nodes if str(node.target) == "right")
    assert "quantizers" not in str(reader.args[0].target)
    other = next(node for node in graph.graph.nodes if str(node.target) == "left")
    assert "quantizers" in str(other.args[0].target)
    addition = next(node for node in graph.graph.nodes if "add" in str(node.target))
    assert "quantizers.block_conv2" not in [str(node.target) for node in addition.args]


def test_layers_have_configurations_of_their_own() -> None:
    int4 = QTensorConfig(Dtype.int4, qscheme=QSchemeType.per_channel, ch_axis=0)
    graph = graph_of(
        exported(),
        QLayerConfig(input_tensors=UINT8, weight=ROWS),
        layer_quant_config={"block.*": QLayerConfig(input_tensors=INT8, weight=int4)},
        layer_type_quant_config={nn.Linear: QLayerConfig(weight=INT8)},
    )
    assert graph.block.conv1.weight_quantizer.stage.spec.format == "int4"
    assert graph.quantizers.stem.quantizer.stage.spec.format == "int8"
    assert graph.fc.weight_quantizer.stage.spec.format == "int8"
    assert "quantizers.mean" not in calls(graph)


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    for more in ({"exclude": ["rigth"]}, {"layer_quant_config": {"rigth": READ}}):
        with pytest.raises(ConfigError, match="Did you mean 'right'"):
            graph_of(exported(), READ, **more)


def test_the_scale_of_an_input_is_that_of_the_data() -> None:
    samples = images()
    graph = graph_of(exported(), WRITTEN, samples)
    amax = float(torch.cat(samples).abs().max())
    assert graph.quantizers.x.quantizer.scale.item() == pytest.approx(amax / 127.5, rel=1e-6)
    joined = graph.quantizers.relu.quantizer
    model = net()
    tensors = []
    for layer in (model.left, model.right):
        layer.register_forward_hook(lambda _, __, y: tensors.append(y.relu()))
    with torch.no_grad():
        for x in samples:
            model(x)
    assert joined.scale.item() == pytest.approx(max(float(y.max()) for y in tensors) / 127.5, rel=1e-4)


def test_numbers_are_those_of_the_formula() -> None:
    """Two convolutions by hand: round, clip, multiply."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 1, bias=False)).eval()
    samples = images()
    graph = graph_of(model, QLayerConfig(input_tensors=INT8, weight=INT8), samples)

    def rounded(x: torch.Tensor, amax: float) -> torch.Tensor:
        scale = torch.tensor(amax / 127.5)
        return (x / scale).round().clamp(-128, 127) * scale

    first, second = model[0].weight.detach(), model[2].weight.detach()
    middle = max(float(model[1](model[0](x)).detach().abs().max()) for x in samples)
    x = rounded(samples[0], float(torch.cat(samples).abs().max()))
    y = nn.functional.conv2d(x, rounded(first, float(first.abs().max()))).relu()
    expected = nn.functional.conv2d(rounded(y, middle), rounded(second, float(second.abs().max())))
    torch.testing.assert_close(graph(samples[0]), expected, rtol=1e-5, atol=1e-6)


def test_power_of_two_scales() -> None:
    found = QTensorConfig(Dtype.int8, qscheme=QSchemeType.per_tensor, scale_type=ScaleType.pof2)
    searched = QTensorConfig(Dtype.int8, qscheme=QSchemeType.per_tensor, observer_cls=PerTensorPowOf2MinMSEObserver)
    for spec in (found, searched):
        graph = graph_of(exported(), QLayerConfig(input_tensors=spec, output_tensors=spec, weight=spec, bias=spec))
        scales = [module.scale for module in graph.modules() if isinstance(module, FakeQuantize)]
        assert scales and all(float(scale.log2()) % 1 == 0 for scale in scales if scale is not None)


def test_int32_biases_have_the_scale_of_what_they_are_added_to() -> None:
    graph = graph_of(exported(), READ)
    bias = graph.right.bias_quantizer
    assert isinstance(bias, BiasQuantizer)
    source = graph.quantizers.block_act_relu_2.quantizer
    assert torch.equal(bias.scale, source.scale * graph.right.weight_quantizer.scale)
    assert bias.scale.shape == (4,)


@pytest.mark.parametrize(("shrunk", "aligned"), [(1.0, True), (1e-4, True), (1e-9, False)])
def test_an_int32_bias_that_the_scale_of_the_products_cannot_hold_keeps_its_own(shrunk: float, aligned: bool) -> None:
    """A channel that a batch norm let die; a bias that is cut off would move its whole channel."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(2, 4, 1).eval(), torch.randn(2, 2, 4, 4)
    with torch.no_grad():
        layer.weight[0] *= shrunk
    graph = graph_of(layer, READ, [x])
    found = [part for part in graph.modules() if isinstance(part, BiasQuantizer)]
    assert bool(found) is aligned
    assert (graph(x) - layer(x)).norm() < 0.02 * layer(x).norm()


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_samples_are_needed_where_scales_are_static() -> None:
    given = exported()
    with pytest.raises(DataError, match="first sample"):
        ModelQuantizer(QConfig(READ, quant_mode=FX)).quantize_model(net())
    with pytest.raises(DataError, match="static activations need samples"):
        ModelQuantizer(QConfig(READ, quant_mode=FX)).quantize_model(given)
    with pytest.raises(DataError, match="there is none"):
        graph_of(net(), READ, [])
    only_weights = ModelQuantizer(QConfig(QLayerConfig(weight=ROWS), quant_mode=FX)).quantize_model(given)
    assert not list(points(only_weights))


def test_nan_in_the_data_names_the_tensor() -> None:
    with pytest.raises(DataError, match=r"tensor 'x'.*NaN"):
        graph_of(exported(), READ, [images()[0] * torch.nan])


def test_a_quantized_graph_is_not_quantized_again() -> None:
    with pytest.raises(ModelError, match="quantized already"):
        graph_of(graph_of(exported(), READ), READ)


def test_fields_of_eager_mode_are_refused() -> None:
    cache = QLayerConfig(output_tensors=INT8)
    with pytest.raises(ConfigError, match="kv_cache_quant_config belongs to eager_mode"):
        graph_of(exported(), READ, kv_cache_quant_config={"fc": cache})


def test_a_generator_of_samples_is_used_whole() -> None:
    listed, generated = graph_of(exported(), READ), graph_of(exported(), READ, iter(images()))
    x = images()[0]
    assert torch.equal(listed(x), generated(x))


# ---- ONNX -----------------------------------------------------------------------------------------------------------


def copied(graph: Any) -> Any:
    """A copy; torch warns of what it does there itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return copy.deepcopy(graph)


def session_of(folder: Path, optimize: bool) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(folder / "quark_model.onnx"), options, ["CPUExecutionProvider"])


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("cls", "channels", "layer"),
    [(Net, 3, READ), (Inverted, 6, WRITTEN), pytest.param(Inverted, 6, READ, marks=SLOW)],
)
def test_the_onnx_file_computes_what_torch_computes(
    cls: type[nn.Module], channels: int, layer: QLayerConfig, tmp_path: Path
) -> None:
    import onnx

    samples = images(channels)
    graph = graph_of(net(cls), layer, samples)
    x = torch.cat(samples)
    with torch.no_grad():
        expected = ModelQuantizer.freeze(copied(graph))(x).numpy()
    export_onnx(graph, tmp_path, (samples[0],), dynamic_shapes=({0: "batch"},))
    proto = onnx.load(tmp_path / "quark_model.onnx")
    onnx.checker.check_model(proto, full_check=True)
    big = {tensor.data_type for tensor in proto.graph.initializer if len(tensor.dims) > 1}
    assert big == {onnx.TensorProto.INT8}
    for optimize in (False, True):
        session = session_of(tmp_path, optimize)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        off = np.abs(found - expected).max() / np.abs(expected).max()
        assert off < (1e-5 if not optimize else 0.02)


# ---- training -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_with_quantizers_wins_back_what_few_bits_lost() -> None:
    """A small network on real digits with 2 bits: after calibration against after training, on images not seen."""
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = datasets.load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    train, test = slice(0, 1200), slice(1200, None)

    def fit(model: nn.Module, epochs: int, rate: float) -> None:
        optimizer = torch.optim.Adam(model.parameters(), rate)
        model.train()
        for _ in range(epochs):
            for part in torch.randperm(1200).split(60):
                loss = nn.functional.cross_entropy(model(x[train][part]), y[train][part])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        model.eval()

    @torch.no_grad()
    def right(model: nn.Module) -> float:
        return float((model(x[test]).argmax(1) == y[test]).double().mean())

    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2))
        more = (nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        model = nn.Sequential(*layers, *more, nn.Flatten(), nn.Linear(96, 10))
        fit(model, 6, 5e-3)
        whole = right(model)
        weight = QTensorConfig(Dtype.int2, observer_cls=LSQObserver, qscheme=QSchemeType.per_channel, ch_axis=0)
        inputs = QTensorConfig(Dtype.uint2, observer_cls=LSQObserver, qscheme=QSchemeType.per_tensor)
        graph = graph_of(model, QLayerConfig(input_tensors=inputs, weight=weight), x[train].split(300))
        before, scales = right(graph), [scale.detach().clone() for _, scale in learned_scales(graph)]
        fit(graph, 5, 2e-3)
    after = right(graph)
    assert whole > 0.93
    assert after > before + 0.03
    assert after > whole - 0.1
    assert len(scales) == 7
    assert all(not torch.equal(old, new) for old, (_, new) in zip(scales, learned_scales(graph), strict=True))
    frozen = ModelQuantizer.freeze(copied(graph))
    assert right(frozen) == after


def test_thresholds_learn_in_a_graph_and_scales_stay_powers_of_two() -> None:
    spec = QTensorConfig(Dtype.int4, observer_cls=TQTObserver, qscheme=QSchemeType.per_tensor)
    model, samples = net(), images()
    graph = graph_of(model, QLayerConfig(input_tensors=spec, output_tensors=spec, weight=spec), samples)
    x = torch.cat(samples)
    with torch.no_grad():
        wanted = model(x)
        for _, threshold in learned_scales(graph):
            threshold.add_(2)
    optimizer = torch.optim.Adam(graph.parameters(), 0.03)
    graph.train()
    losses = []
    for _ in range(40):
        loss = (graph(x) - wanted).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert min(losses[-10:]) < losses[0] / 2
    parts = [module for module in graph.modules() if isinstance(module, FakeQuantize)]
    assert all(float(part.scale.log2()) % 1 == 0 for part in parts)  # type: ignore[union-attr]


def test_a_trained_graph_is_saved_and_loaded(tmp_path: Path) -> None:
    spec = QTensorConfig(Dtype.int4, observer_cls=LSQObserver, qscheme=QSchemeType.per_tensor)
    layer = QLayerConfig(input_tensors=spec, weight=spec)
    graph, x = graph_of(exported(), layer), images()[0]
    with torch.no_grad():
        for _, scale in learned_scales(graph):
            scale.mul_(1.3)
    torch.save(graph.state_dict(), tmp_path / "graph.pt")
    other = graph_of(exported(), layer)
    other.load_state_dict(torch.load(tmp_path / "graph.pt"))
    assert torch.equal(other.eval()(x), graph.eval()(x))


# ---- real models ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_squeezenet_is_quantized_and_agrees_with_onnx_runtime(tmp_path: Path, examples: ModuleType) -> None:
    model = examples.torch_flowers5()
    feeds = examples.calib_flowers5(6)
    samples = [torch.from_numpy(feed["data"]) for feed in feeds]
    graph = graph_of(model, READ, samples[:4])
    assert len([module for module in graph.modules() if type(module).__name__ == "QuantConv2d"]) == 26
    joins = [node for node in graph.graph.nodes if "cat" in str(node.target) and node.op == "call_function"]
    assert len(joins) == 8
    for node in joins:
        assert len({argument.target for argument in node.args[0]}) == 1
    x = torch.cat(samples)
    with torch.no_grad():
        expected, whole = graph(x), model(x)
    assert torch.equal(expected.argmax(1), whole.argmax(1))
    assert float((expected - whole).norm() / whole.norm()) < 0.1
    export_onnx(ModelQuantizer.freeze(graph), tmp_path, (x[:2],), dynamic_shapes=({0: "batch"},))
    session = session_of(tmp_path, True)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.abs(found - expected.numpy()).max() < 0.05 * np.abs(expected.numpy()).max()
    assert (tmp_path / "quark_model.onnx").stat().st_size < 1.3 * sum(p.numel() for p in model.parameters())
