"""ONNX files of quantized torch models: stored integers, and the outputs of the torch model on stock ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.torch_flow.export.networks import IDS, Mixed, llama, logits
from tests.torch_flow.export.programs import loaded_by
from tests.torch_flow.export.schemes import every
from tests.torch_flow.export.test_reload import layer, nvfp4, quantized
from tests.torch_flow.models import TwoLayers, data

from quark.errors import ConfigError, ModelError
from quark.torch import ModelQuantizer, export_onnx, export_safetensors, import_model_from_safetensors
from quark.torch.quantization.config.config import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerGroupSpec,
    FP8E4M3PerTensorSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    MX6Spec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    Uint8PerTensorSpec,
)
from quark.torch.quantization.config.type import Dtype

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")  # torch's exporter needs it
pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHTS = every()
INT8 = Int8PerChannelSpec(0, symmetric=True)
ACTIVATIONS = {
    "int8": layer(Int8PerTensorSpec(), Int8PerTensorSpec()),
    "int8 dynamic tokens": layer(INT8, Int8PerChannelSpec(1, is_dynamic=True)),
    "uint8": layer(INT8, Uint8PerTensorSpec()),
    "fp8": layer(FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec()),
    "fp8 dynamic tokens": layer(FP8E4M3PerChannelSpec(0), FP8E4M3PerChannelSpec(1, is_dynamic=True)),
    "int4 dynamic groups": layer(Int4PerGroupSpec(-1, 8), Int4PerGroupSpec(-1, 8, is_dynamic=True)),
    "fp8 short groups": layer(FP8E4M3PerTensorSpec(), FP8E4M3PerGroupSpec(-1, 24)),
    "mxfp4": layer(OCP_MXFP4Spec(-1, False), OCP_MXFP4Spec(-1, True)),
    "mx6": layer(MX6Spec(-1), MX6Spec(-1)),
    "nvfp4": layer(nvfp4(False), nvfp4(True)),
}
QUICK = ("int4-group-sym",)
FULL = [
    "uint4-group-asym", "fp8_e4m3-tensor-sym", "mx6", "nvfp4",
    *(f"{kind}-{scheme}-sym" for kind in ("int8", "int16", "int4") for scheme in ("tensor", "channel", "group0")),
    "int3-tensor-sym", "int3-channel-sym",
    "uint8-channel-asym", "uint4-tensor-asym", "int2-channel-sym", "uint2-channel-asym", "fp8_e5m2-channel-sym",
    "fp8_e4m3-group-sym", "fp8_e4m3-block-sym", "fp6_e2m3-channel-sym", "fp4-tensor-sym", "mx9", "mx9-32", "bfp16",
    "amdfp4-16", "int32-channel-sym", "int4_fp8", "float16", "bfloat16",
    *(name for name in WEIGHTS if name.startswith("OCP") and "static" in name),
]  # fmt: skip


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return ort.InferenceSession(str(path / "quark_model.onnx"), options)


def close(a: np.ndarray, b: np.ndarray, tolerance: float = 1e-5) -> bool:
    return np.abs(a - b).max() <= tolerance * np.abs(b).max()


@torch.no_grad()
def check_weights(name: str, folder: Path) -> None:
    model = quantized(Mixed(), QConfig(QLayerConfig(weight=WEIGHTS[name])))
    expected = model(IDS).numpy()
    export_onnx(model, folder, IDS, input_names=["ids"])
    assert close(session(folder).run(None, {"ids": IDS.numpy()})[0], expected)
    proto = onnx.load(folder / "quark_model.onnx")
    floats = [t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT and "embedding" not in t.name]
    assert max(int(np.prod(t.dims)) for t in floats) < 3072  # fc.weight is not there as float
    loaded_by("ONNX", f"{name} weights", "onnxruntime")


@pytest.mark.parametrize("name", QUICK)
def test_weights(name: str, tmp_path: Path) -> None:
    check_weights(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_weights_of_every_kind(name: str, tmp_path: Path) -> None:
    check_weights(name, tmp_path)


QUICK_ACTIVATIONS = ("int8", "fp8 short groups", "nvfp4")


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK_ACTIVATIONS else pytest.mark.slow) for name in ACTIVATIONS]
)
def test_activations(name: str, tmp_path: Path) -> None:
    x = data()[0]
    model = ModelQuantizer(QConfig(ACTIVATIONS[name])).quantize_model(TwoLayers().eval(), data())
    expected = model(x).numpy()
    (tmp_path / "notes.txt").write_text("what lies beside a model stays")
    varies = ({0: torch.export.Dim("rows")},)
    export_onnx(model, tmp_path, x, input_names=["x"], output_names=["y"], dynamic_shapes=varies)
    assert (tmp_path / "notes.txt").exists()
    run = session(tmp_path)
    assert [value.name for value in run.get_outputs()] == ["y"]
    assert close(run.run(None, {"x": x.numpy()})[0], expected)
    more = torch.cat([x, data()[1]])
    assert close(run.run(None, {"x": more.numpy()})[0], model(more).numpy())
    export_safetensors(model, tmp_path / "quark")
    again = import_model_from_safetensors(TwoLayers(), tmp_path / "quark")
    export_onnx(again, tmp_path / "again", x, input_names=["x"], output_names=["y"], dynamic_shapes=varies)
    assert [node.op_type for node in onnx.load(tmp_path / "again" / "quark_model.onnx").graph.node] == [
        node.op_type for node in onnx.load(tmp_path / "quark_model.onnx").graph.node
    ]
    assert close(session(tmp_path / "again").run(None, {"x": x.numpy()})[0], expected)
    loaded_by("ONNX", f"{name} activations", "onnxruntime")


@torch.no_grad()
def test_frozen_and_reloaded_models_store_integers(tmp_path: Path) -> None:
    x = data()[0]
    model = ModelQuantizer(QConfig(ACTIVATIONS["int8"])).quantize_model(TwoLayers().eval(), data())
    expected = model(x).numpy()
    export_safetensors(model, tmp_path / "quark")
    again = import_model_from_safetensors(TwoLayers(), tmp_path / "quark")
    for name, made in (("frozen", ModelQuantizer.freeze(model)), ("reloaded", again)):
        export_onnx(made, tmp_path / name, x, input_names=["x"])
        proto = onnx.load(tmp_path / name / "quark_model.onnx")
        weights = [tensor for tensor in proto.graph.initializer if len(tensor.dims) == 2]
        assert [tensor.data_type for tensor in weights] == [onnx.TensorProto.INT8] * 2
        assert sum(node.op_type == "DequantizeLinear" for node in proto.graph.node) == 4
        assert close(session(tmp_path / name).run(None, {"x": x.numpy()})[0], expected)
        assert np.array_equal(made(x).numpy(), expected)


@pytest.mark.slow
@torch.no_grad()
def test_four_bit_codes_take_four_bits(tmp_path: Path) -> None:
    model = quantized(Mixed(), QConfig(layer(Int4PerGroupSpec(1, 16))))
    export_onnx(model, tmp_path, IDS)
    proto = onnx.load(tmp_path / "quark_model.onnx")
    codes = next(tensor for tensor in proto.graph.initializer if tensor.name == "fc.weight.codes")
    assert (codes.data_type, len(codes.raw_data)) == (onnx.TensorProto.INT4, 48 * 64 // 2)
    node = next(node for node in proto.graph.node if "fc.weight.codes" in node.input)
    assert node.op_type == "DequantizeLinear"
    assert {a.name: a.i for a in node.attribute} == {"axis": 0, "block_size": 16}  # as the product reads them
    onnx.checker.check_model(proto)


@pytest.mark.slow
def test_a_language_model(tmp_path: Path) -> None:
    model = quantized(llama(), QConfig(layer(Int4PerGroupSpec(-1, 32)), exclude=["lm_head"]))
    model.config.use_cache = False
    export_onnx(model, tmp_path, (IDS,), input_names=["ids"])
    assert close(session(tmp_path).run(None, {"ids": IDS.numpy()})[0], logits(model).numpy(), 1e-4)
    loaded_by("ONNX", "int4 groups of a Llama model", "onnxruntime")


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["int8", "uint8"])
def test_openvino_loads_integers(name: str, tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    x = data()[0]
    model = ModelQuantizer(QConfig(ACTIVATIONS[name])).quantize_model(TwoLayers().eval(), data())
    export_onnx(model, tmp_path, x, input_names=["x"])
    compiled = openvino.compile_model(tmp_path / "quark_model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    result = compiled({"x": x.numpy()})[0]
    step = float(model(x).abs().max()) / 30
    assert np.abs(result - model(x).numpy()).max() < step
    loaded_by("ONNX", f"{name} activations", "openvino")


@pytest.mark.slow
@torch.no_grad()
def test_openvino_loads_four_bit_weights(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    model = quantized(Mixed(), QConfig(layer(Int4PerGroupSpec(1, 16)), exclude=["conv"]))
    export_onnx(model, tmp_path, IDS, input_names=["ids"])
    compiled = openvino.compile_model(tmp_path / "quark_model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert close(compiled({"ids": IDS.numpy()})[0], model(IDS).numpy(), 2e-2)
    loaded_by("ONNX", "int4 group weights", "openvino")


def test_block_scales_that_no_operator_has_are_refused(tmp_path: Path) -> None:
    first = QTensorConfig(Dtype.fp4, qscheme="per_group", ch_axis=-1, group_size=8, scale_format="float32")
    second = QTensorConfig(Dtype.fp8_e5m3, qscheme="per_tensor", is_scale_quant=True)
    model = quantized(Mixed(), QConfig(QLayerConfig(weight=[first, second])))
    with pytest.raises(ConfigError, match=r"cannot hold '.*weight': .*'nvfp4' under e5m3 scales"):
        export_onnx(model, tmp_path / "m", IDS)
    assert not (tmp_path / "m").exists()


def test_what_onnx_cannot_say_is_refused(tmp_path: Path) -> None:
    blocks = {"qscheme": "per_group", "scale_format": "e8m0", "is_dynamic": True}
    whole = QTensorConfig(Dtype.fp4, ch_axis=-1, group_size=-1, **blocks)
    model = quantized(Mixed(), QConfig(QLayerConfig(input_tensors=whole)))
    with pytest.raises(ConfigError, match=r"cannot hold .*blocks as long as an axis of an activation"):
        export_onnx(model, tmp_path / "m", IDS)
    assert not (tmp_path / "m").exists()
    with pytest.raises(ConfigError, match="opset_version must be 21"):
        export_onnx(model, tmp_path / "m", IDS, opset_version=17)
    with pytest.raises(ModelError, match="not quantized"):
        export_onnx(Mixed(), tmp_path / "m", IDS)
