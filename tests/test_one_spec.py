"""One specification means one thing in both flows: blocks of any length, narrow codes, scale rules, methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from tests.onnx_flow import models
from torch import nn

import quark.onnx as q
from quark.config.tensor import TensorSpec
from quark.errors import ConfigError
from quark.numerics.blocks import BLOCKS
from quark.numerics.granularity import Channel, Group, Tensor
from quark.onnx.qdq.node_kinds import block_operator
from quark.operators import add_functions, node, stored
from quark.torch import ModelQuantizer
from quark.torch.export.layout import store
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.observer.observer import PerChannelPowOf2MinMSEObserver

OPTIONS = {"PrintSummary": False, "OpTypesToExcludeOutputQuantization": ["MatMul"], "QuantizeBias": False}
RNG = np.random.default_rng(17)
X = (RNG.normal(size=(6, 72)) * np.exp2(RNG.integers(-3, 4, (6, 72)))).astype(np.float32)
W = (RNG.normal(size=(72, 40)) * np.exp2(RNG.integers(-3, 4, (72, 1)))).astype(np.float32)
GROUP = {"quant_granularity": q.QuantGranularity.Group}
E8M0 = {"scale_format": "e8m0", "scale_calculation_mode": "floor", "qscheme": "per_group"}
#: ONNX class -> data type and fields of the torch dialect.
TWINS: dict[type[q.QTensorConfig], tuple[Dtype, dict[str, Any]]] = {
    q.MXFP4E2M1Spec: (Dtype.fp4, E8M0),
    q.MXFP6E3M2Spec: (Dtype.fp6_e3m2, E8M0),
    q.MXFP6E2M3Spec: (Dtype.fp6_e2m3, E8M0),
    q.MXFP8E4M3Spec: (Dtype.fp8_e4m3, E8M0),
    q.MXFP8E5M2Spec: (Dtype.fp8_e5m2, E8M0),
    q.MX6Spec: (Dtype.mx6, {}),
    q.MX9Spec: (Dtype.mx9, {}),
    q.AMDFP4Spec: (Dtype.fp4, {"scale_format": "e5m3", "qscheme": "per_group"}),
    q.NVFP4Spec: (Dtype.fp4, {"scale_format": "e4m3", "qscheme": "per_group"}),
}


def onnx_result(inputs: q.QTensorConfig, weight: q.QTensorConfig) -> Any:
    """A MatMul quantized in the ONNX flow."""
    proto = models.model("g (float[n,72] x) => (float[n,40] y) { y = MatMul(x, w) }", {"w": W})
    config = q.QConfig(q.QLayerConfig(input_tensors=inputs, weight=weight), extra_options=OPTIONS)
    return q.ModelQuantizer(config).run(proto, None, [{"x": X}])


def onnx_answer(proto: onnx.ModelProto) -> np.ndarray:
    """What stock ONNX Runtime computes, products in float32."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})[0]


def torch_model(inputs: QTensorConfig | None, weight: QTensorConfig) -> nn.Module:
    """The same product quantized in the torch flow."""
    model = nn.Sequential(nn.Linear(72, 40, bias=False))
    model[0].weight.data = torch.from_numpy(W.T.copy())
    ModelQuantizer(QConfig(QLayerConfig(input_tensors=inputs, weight=weight))).quantize_model(
        model, [torch.from_numpy(X)]
    )
    return model


@pytest.mark.parametrize("size", [2, 64])
@pytest.mark.parametrize("name", TWINS, ids=lambda cls: cls.__name__)
def test_blocks_of_any_length_are_the_same_in_both_flows(name: type[q.QTensorConfig], size: int) -> None:
    method = {"calibration_method": q.CalibMethod.MinMax, **GROUP}
    spec = name(group_size=size, **method)  # type: ignore[arg-type]
    result = onnx_result(spec, spec)
    dtype, fields = TWINS[name]
    config = QTensorConfig(dtype, group_size=size, ch_axis=-1, **fields)
    for tensor in result.plan:
        assert tensor.spec.row == config.to_stage().format
        assert tensor.spec.row.size == size
    inputs = replace(config, is_dynamic=True)
    with torch.no_grad():
        expected = torch_model(inputs, config)(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(onnx_answer(result.proto), expected, rtol=1e-5, atol=2e-6 * np.abs(expected).max())


def test_standard_blocks_are_written_as_before() -> None:
    spec = q.AMDFP4Spec(calibration_method=q.CalibMethod.MinMax)
    graph = ir.from_proto(onnx_result(spec, spec).proto).graph
    assert all("block_size" not in node.attributes for node in graph if node.domain == "org.openquark")


def test_block_scales_without_an_operator_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'bfp16' under e4m3 scales"):
        block_operator(TensorSpec("bfp16", scale_rule="e4m3"))
    even = block_operator(TensorSpec("mxfp4", scale_rule="e8m0_even", granularity=Group(-1, 64)))
    assert even.attributes == {"format": "mxfp4_even", "block_size": 64}
    with pytest.raises(ConfigError, match="a block of 3 must be a multiple of 2"):
        TensorSpec("mx6", granularity=Group(-1, 3))


@pytest.mark.parametrize("size", [1 << 62, 96, 72, 34])
@pytest.mark.parametrize("name", ["mx6", "mxfp4", "nvfp4"])
def test_stored_blocks_longer_than_their_axis(name: str, size: int) -> None:
    """What a file holds of a weight, and what stock ONNX Runtime reads in it, under blocks of an own length."""
    block = replace(BLOCKS[name], size=size)
    above = np.float32(0.01) if block.tensor_scale else None
    kept = stored(block.encode(W, 0, "half_even", above), block, 0, above)
    inputs = [part if part in kept.tensors else "" for part in ("codes", "scales", "shifts", "tensor_scale")]
    inputs = inputs[: 4 if above is not None else 3 if "shifts" in kept.tensors else 2]
    graph = helper.make_graph(
        [node("BlockDequantize", inputs, ["y"], kept.attributes)],
        "g",
        [],
        [helper.make_tensor_value_info("y", 1, [72, 40])],
        [numpy_helper.from_array(value, part) for part, value in kept.tensors.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    add_functions(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {})[0], block.round(W, 0, "half_even", above))


INT8 = {"calibration_method": q.CalibMethod.MinMax, "data_type": q.Int8, "symmetric": True}


def codes_of(proto: onnx.ModelProto, name: str) -> np.ndarray:
    return next(numpy_helper.to_array(part) for part in proto.graph.initializer if part.name == name)


@pytest.mark.parametrize("rule", ["float32", "power_of_two", "int16", "bfloat16", "e8m0", "e5m3"])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("channels", [True, False], ids=["channel", "tensor"])
def test_codes_are_equal_when_the_configurations_are(rule: str, narrow: bool, channels: bool) -> None:
    kind = q.QuantGranularity.Channel if channels else q.QuantGranularity.Tensor
    fields = {"narrow": narrow, "scale_rule": rule}
    found = onnx_result(
        q.QTensorConfig(**INT8, **fields),
        q.QTensorConfig(**INT8, quant_granularity=kind, **fields),  # type: ignore[arg-type]
    )
    scheme = {"qscheme": "per_channel", "ch_axis": 0} if channels else {"qscheme": "per_tensor"}
    model = torch_model(
        QTensorConfig(Dtype.int8, qscheme="per_tensor", **fields), QTensorConfig(Dtype.int8, **scheme, **fields)
    )
    weight = model[0].weight_quantizer
    plan = found.plan.tensors["w"]
    assert plan.spec.narrow is narrow and plan.spec.scale_rule == rule
    if rule != "power_of_two":  # there the ONNX flow widens what would overflow (NonOverflow), by its own method
        np.testing.assert_array_equal(np.reshape(plan.scale, -1), weight.scale.reshape(-1).numpy())
        codes = store(model[0].weight.detach(), weight)[""].numpy()
        np.testing.assert_array_equal(codes, codes_of(found.proto, "w_quantized").T)
        activation = found.plan.tensors["x"]
        np.testing.assert_array_equal(activation.scale, model[0].input_quantizer.scale.numpy())
    words = weight.extra_repr()
    assert ("full range" in words) is not narrow and rule in words and plan.spec.describe().count(rule) == 1


def test_a_clipped_weight_has_the_same_lowest_code_in_memory_and_in_a_file() -> None:
    for narrow in (True, False):
        config = QTensorConfig(
            Dtype.int8, PerChannelPowOf2MinMSEObserver, qscheme="per_channel", ch_axis=0, narrow=narrow
        )
        model = torch_model(None, config)
        quantizer, weight = model[0].weight_quantizer, model[0].weight.detach()
        quantizer.scale = quantizer.scale / 4
        codes = store(weight, quantizer)[""]
        assert codes.min() == (-127 if narrow else -128)
        torch.testing.assert_close(codes * quantizer.scale[:, None], quantizer(weight), rtol=0, atol=0)


def test_defaults_of_both_dialects_stay_and_files_keep_their_keys() -> None:
    plain = QTensorConfig(Dtype.int8, qscheme="per_tensor")
    assert q.QTensorConfig().to_spec().narrow and not plain.to_stage().spec.narrow
    assert not {"narrow", "scale_rule"} & (set(plain.to_dict()) | set(q.QTensorConfig().to_dict()))
    said = QTensorConfig(Dtype.int8, qscheme="per_tensor", narrow=True, scale_rule="e5m3")
    assert QTensorConfig.from_dict(said.to_dict()) == said


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"narrow": True, "symmetric": False}, "asymmetric"),
        ({"narrow": "yes"}, "narrow must be True, False or None"),
        ({"scale_rule": "pof2"}, "scale_rule"),
        ({"scale_rule": "int16", "scale_type": "power_of_two"}, "contradicts scale_type"),
    ],
)
def test_what_cannot_be_set_is_refused_in_both(fields: dict[str, Any], words: str) -> None:
    types = {"power_of_two": (q.ScaleType.PowerOf2, "pof2")}
    mine, theirs = dict(fields), dict(fields)
    if "scale_type" in fields:
        mine["scale_type"], theirs["scale_type"] = types[fields["scale_type"]]
    with pytest.raises(ConfigError, match=words):
        q.QTensorConfig(**mine).to_spec()
    with pytest.raises(ConfigError, match=words):
        QTensorConfig(Dtype.int8, qscheme="per_tensor", **theirs)
    with pytest.raises(ConfigError, match="not a rule for the blocks of"):
        q.MXFP4E2M1Spec(scale_rule="power_of_two").to_spec()
    with pytest.raises(ConfigError, match="not a rule for the blocks of"):
        QTensorConfig(Dtype.mx, ch_axis=-1, mx_element_dtype=Dtype.fp4, scale_rule="power_of_two")


def test_codes_are_made_as_the_spec_says() -> None:
    """A tie, the lowest code, scales per row: what ``coding`` has of each field of the spec."""
    x = np.float32([[0.5, -1000.0], [1.0, -1000.0]])
    spec = TensorSpec("int8", granularity=Channel(0), rounding="half_up", symmetric=True, narrow=True)
    codes = spec.coding.quantize(x, np.float32([1.0, 2.0]), np.int32([0, 0]))
    np.testing.assert_array_equal(codes, [[1, -127], [1, -127]])
    other = replace(spec, granularity=Tensor(), narrow=False, rounding="half_even").coding
    np.testing.assert_array_equal(other.quantize(x, 1.0, 0), [[0, -128], [1, -128]])
