"""Page 001: what quantization is, what stands in the files, which layers and observers there are, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.seeds.awkward import decibels, eight, network, quantized

import quark.onnx
from quark.numerics.affine import Coding, Grid
from quark.numerics.formats import FORMATS, get_format
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx import CalibMethod, Int8Spec, QLayerConfig, QuantGranularity

ROW = np.random.default_rng(0).uniform(-2, 5, (7, 24)).astype(np.float32)


def parameters(symmetric: bool, values: np.ndarray = ROW) -> tuple[np.ndarray, np.ndarray]:
    return Grid(get_format("int8"), symmetric).parameters(values.min(), values.max())


def test_fewer_bits_may_lose_nothing_or_something() -> None:
    """1024 fits into 16 bits; 1024.23 does not fit into whole numbers; 255 x 2 does not fit into 8 bits."""
    one, zero = np.float32(1), np.int32(0)
    sixteen, eight_bits = get_format("int16"), get_format("uint8")
    assert float(Coding(sixteen).fake_quantize(np.float32([1024]), one, zero)[0]) == 1024
    assert float(Coding(sixteen).fake_quantize(np.float32([1024.23]), one, zero)[0]) == 1024
    assert float(Coding(sixteen).fake_quantize(np.float32([1024.23]), np.float32(0.5), zero)[0]) in (1024.0, 1024.5)
    assert float(Coding(eight_bits).fake_quantize(np.float32([255 * 2]), one, zero)[0]) == 255
    assert {"int16", "int8", "int4", "float16", "bfloat16", "fp8_e4m3", "mxfp4", "mx4"} <= set(FORMATS)


@pytest.mark.parametrize("symmetric", [True, False])
def test_formulas(symmetric: bool) -> None:
    """q = round(r / s + z) and r = (q - z) s; where z is whole, rounding before adding it is the same but for ties."""
    scale, zero = parameters(symmetric)
    codes = np.asarray(Coding(get_format("int8")).quantize(ROW, scale, zero)).astype(np.float64)
    exact = ROW.astype(np.float64) / float(scale) + float(zero)
    inside = (np.abs(exact - np.rint(exact)) < 0.499) & (np.abs(exact) < 127)
    np.testing.assert_array_equal(codes[inside], np.rint(exact[inside]))
    back = np.asarray(Coding(get_format("int8")).dequantize(codes.astype(np.int8), scale, zero))
    np.testing.assert_allclose(back, (codes - float(zero)) * float(scale), rtol=1e-6)
    assert (int(zero) == 0) == symmetric


def test_scale_and_offset_come_from_the_extremes() -> None:
    scale, zero = parameters(False)
    assert float(scale) == pytest.approx((ROW.max() - ROW.min()) / 255, rel=1e-6)
    assert int(zero) == round(-128 - float(ROW.min() / scale))


@pytest.mark.parametrize(("granularity", "count"), [(Tensor(), 1), (Channel(0), 7), (Group(1, 8), 21)])
def test_scales_are_shared_by_a_tensor_a_channel_or_a_group(granularity: Any, count: int) -> None:
    tiles = granularity.tile(ROW) if not isinstance(granularity, Tensor) else ROW.reshape(1, -1)
    lo, hi = tiles.min(-1), tiles.max(-1)
    scale, zero = Grid(get_format("int8")).parameters(lo, hi)
    assert np.size(scale) == count
    step = np.broadcast_to(granularity.expand(scale, ROW.shape) if count > 1 else scale, ROW.shape)
    assert (
        np.abs(Coding(get_format("int8"), granularity).fake_quantize(ROW, scale, zero) - ROW) <= step * 0.5001
    ).all()


# ---- what stands in the file -------------------------------------------------------------------------------------


def test_fake_quantized_values_have_their_own_width() -> None:
    scale, zero = parameters(True)
    rounded = Coding(get_format("int8")).fake_quantize(ROW, scale, zero)
    assert rounded.dtype == ROW.dtype and len(np.unique(rounded)) <= 255
    np.testing.assert_array_equal(rounded, Coding(get_format("int8")).fake_quantize(rounded, scale, zero))


def test_the_model_runs_without_this_package() -> None:
    """Q and DQ nodes; a session that knows nothing of us runs it, and its inputs and outputs stay float."""
    proto = quantized().proto
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in proto.graph.node}
    assert not proto.functions and {one.domain for one in proto.opset_import} <= {"", "ai.onnx"}
    for value in (*proto.graph.input, *proto.graph.output):
        assert value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert decibels(proto) > 25


@pytest.mark.parametrize("float_weights", [False, True])
def test_weights_are_codes_unless_float_ones_are_asked_for(float_weights: bool) -> None:
    proto = quantized(AddQDQPairToWeight=float_weights).proto
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer if len(tensor.dims) > 1}
    assert set(kinds.values()) == {onnx.TensorProto.FLOAT if float_weights else onnx.TensorProto.INT8}
    assert decibels(proto) > 25


# ---- the torch flow ----------------------------------------------------------------------------------------------


def small() -> Any:
    from torch import nn

    return nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Flatten(), nn.Linear(10 * 5 * 4, 11)).eval()


def configuration(**fields: Any) -> Any:
    from quark.torch.quantization import Int8PerTensorSpec
    from quark.torch.quantization.config.config import QConfig
    from quark.torch.quantization.config.config import QLayerConfig as Layer

    spec = Int8PerTensorSpec(
        observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even", is_dynamic=False
    )
    given = dict.fromkeys(("weight", "input_tensors", "output_tensors", "bias"), spec.to_quantization_spec())
    return QConfig(global_quant_config=Layer(**{**given, **fields}))


def test_layers_are_replaced_and_what_they_read_and_write_is_rounded() -> None:
    """Linear and Conv2d become Quant classes that round inputs, outputs, biases and weights; values stay float."""
    torch = pytest.importorskip("torch")
    from quark.torch import ModelQuantizer

    model, x = small(), torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(0))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        exact = model(x)
        done = ModelQuantizer(configuration()).quantize_model(model, [x])
        found = done(x)
    assert [type(done[k]).__name__ for k in (0, 3)] == ["QuantConv2d", "QuantLinear"]
    assert all(torch.equal(value, done.state_dict()[name]) for name, value in kept.items())
    assert found.dtype == torch.float32 and 1e-4 < float((found - exact).norm() / exact.norm()) < 0.1
    assert len(torch.unique(found)) <= 256  # the output is rounded too


@pytest.mark.parametrize("name", ["PerTensorMinMaxObserver", "PerChannelMinMaxObserver", "PerBlockMXObserver"])
def test_observer(name: str) -> None:
    torch = pytest.importorskip("torch")
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import QConfig, QTensorConfig
    from quark.torch.quantization.config.config import QLayerConfig as Layer
    from quark.torch.quantization.config.type import Dtype, QSchemeType
    from quark.torch.quantization.observer import observer

    fields: dict[str, Any] = {
        "PerTensorMinMaxObserver": {"dtype": Dtype.int8, "qscheme": QSchemeType.per_tensor, "symmetric": True},
        "PerChannelMinMaxObserver": {
            "dtype": Dtype.int8,
            "qscheme": QSchemeType.per_channel,
            "symmetric": True,
            "ch_axis": 0,
        },
        "PerBlockMXObserver": {
            "dtype": Dtype.mx,
            "mx_element_dtype": Dtype.fp8_e4m3,
            "qscheme": QSchemeType.per_group,
            "group_size": 32,
            "ch_axis": -1,
            "is_dynamic": True,
            "scale_type": "float",
        },
    }[name]
    if "scale_type" in fields:
        from quark.torch.quantization import OCP_MXFP8E4M3Spec

        spec = OCP_MXFP8E4M3Spec(ch_axis=-1, is_dynamic=True).to_quantization_spec()
        assert spec.observer_cls is getattr(observer, name)
    else:
        spec = QTensorConfig(observer_cls=getattr(observer, name), is_dynamic=False, **fields)
    model, x = small(), torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exact = model(x)
        found = ModelQuantizer(QConfig(global_quant_config=Layer(weight=spec))).quantize_model(model, [x])(x)
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.1


def test_the_steps(tmp_path: Path) -> None:
    """Load, define data, configure, quantize in place, export."""
    torch = pytest.importorskip("torch")
    from quark.torch import ModelQuantizer, export_safetensors

    model, data = small(), [torch.randn(2, 3, 7, 6)]
    quantizer = ModelQuantizer(configuration())
    done = quantizer.quantize_model(model, data)
    assert done is model
    export_safetensors(quantizer.freeze(done), str(tmp_path / "out"))
    assert list((tmp_path / "out").glob("*.safetensors"))


# ---- the table ---------------------------------------------------------------------------------------------------

ONNX_TYPES = ("Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Float16", "BFloat16")
TORCH_TYPES = ("float16", "bfloat16", "int4", "uint4", "int8", "fp8_e4m3", "mx", "fp6_e3m2", "fp6_e2m3", "fp4")


@pytest.mark.parametrize("name", ONNX_TYPES)
def test_type_of_the_onnx_flow(name: str) -> None:
    spec = getattr(quark.onnx, f"{name}Spec")()
    assert decibels(quantized(QLayerConfig(input_tensors=spec, weight=spec)).proto) > 20


def test_types_of_the_torch_flow() -> None:
    pytest.importorskip("torch")
    from quark.torch.quantization.config.type import Dtype

    assert set(TORCH_TYPES) <= set(Dtype.__members__)


def test_modes_of_the_torch_flow() -> None:
    pytest.importorskip("torch")
    from quark.torch.quantization.config.type import QSchemeType, QuantizationMode, ScaleType

    assert {"eager_mode", "fx_graph_mode"} <= set(QuantizationMode.__members__)
    assert {"per_tensor", "per_channel", "per_group"} <= set(QSchemeType.__members__)
    assert {"float32", "float16"} <= set(ScaleType.__members__)


@pytest.mark.parametrize("granularity", ["Tensor", "Channel"])
def test_scheme_of_the_onnx_flow(granularity: str) -> None:
    weight = Int8Spec(quant_granularity=QuantGranularity[granularity], calibration_method=CalibMethod.MinMax)
    plan = quantized(QLayerConfig(input_tensors=eight().input_tensors, weight=weight)).plan.tensors
    assert np.size(plan["w2"].scale) == (10 if granularity == "Channel" else 1)


@pytest.mark.parametrize("layer", ["Linear", "Conv2d", "ConvTranspose2d", "Embedding", "EmbeddingBag"])
def test_layer_of_the_torch_flow(layer: str) -> None:
    torch = pytest.importorskip("torch")
    from torch import nn

    from quark.torch import ModelQuantizer
    from quark.torch.quantization import Int8PerTensorSpec
    from quark.torch.quantization.config.config import QConfig
    from quark.torch.quantization.config.config import QLayerConfig as Layer

    spec = Int8PerTensorSpec(
        observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even", is_dynamic=False
    )
    made = {
        "Linear": (lambda: nn.Linear(9, 5), torch.randn(3, 9)),
        "Conv2d": (lambda: nn.Conv2d(6, 9, (3, 2), groups=3), torch.randn(2, 6, 7, 5)),
        "ConvTranspose2d": (lambda: nn.ConvTranspose2d(6, 4, (3, 2), groups=2), torch.randn(2, 6, 7, 5)),
        "Embedding": (lambda: nn.Embedding(13, 7), torch.randint(0, 13, (3, 4))),
        "EmbeddingBag": (lambda: nn.EmbeddingBag(13, 7), torch.randint(0, 13, (3, 4))),
    }
    build, x = made[layer]
    torch.manual_seed(0)
    model = nn.Sequential(build()).eval()
    one = Layer(weight=spec.to_quantization_spec())
    config = QConfig(global_quant_config=one, layer_type_quant_config={type(model[0]): one})
    with torch.no_grad():
        exact = model(x)
        found = ModelQuantizer(config).quantize_model(model, [x])(x)
    assert 0 < float((found - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize(
    "name",
    [
        "QuarotConfig",
        "SmoothQuantConfig",
        "CLEConfig",
        "BiasCorrectionConfig",
        "AdaQuantConfig",
        "AdaRoundConfig",
        "GPTQConfig",
    ],
)
def test_algorithm_of_the_onnx_flow(name: str) -> None:
    pytest.importorskip("torch")
    config = getattr(quark.onnx, name)
    fields = {"num_iterations": 3} if name.startswith("Ada") else {}
    from tests.seeds.awkward import Reader, samples

    from quark.onnx import ModelQuantizer, QConfig

    options = {"PrintSummary": False}
    made = QConfig(eight(), algo_config=[config(**fields)], extra_options=options)
    result = ModelQuantizer(made).run(network(), None, Reader(samples()))
    assert decibels(result.proto) > 20


@pytest.mark.parametrize("name", ["SmoothQuantConfig", "AWQConfig", "GPTQConfig"])
def test_algorithm_of_the_torch_flow(name: str) -> None:
    pytest.importorskip("torch")
    from quark.torch.quantization.config import config

    assert getattr(config, name)().name


def test_exports_of_the_torch_flow() -> None:
    pytest.importorskip("torch")
    from quark.torch import export_gguf, export_onnx, export_safetensors

    assert all(map(callable, (export_gguf, export_onnx, export_safetensors)))


def test_dynamic_axes_and_two_inputs_stay_as_they_are() -> None:
    proto = quantized().proto
    assert [value.name for value in proto.graph.input] == ["x", "z"]
    assert {models.session(proto).get_inputs()[k].shape[0] for k in range(2)} == {"N"}
