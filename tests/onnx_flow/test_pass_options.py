"""The options of the graph passes, each by its effect on a model that goes through the whole flow."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models, pass_models

from quark.errors import ConfigError, ModelError
from quark.onnx import (
    Config,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    UInt8Spec,
    XInt8Spec,
    get_default_config,
)
from quark.onnx.quantization.config.spec import CalibMethod

MINMAX = CalibMethod.MinMax
SPECS = {
    "int8": Int8Spec(calibration_method=MINMAX),
    "int16": Int16Spec(calibration_method=MINMAX),
    "uint8": UInt8Spec(calibration_method=MINMAX),
    "xint8": XInt8Spec(),
}


def quantized(proto: onnx.ModelProto, spec: str = "int8", **options: object) -> onnx.ModelProto:
    given = QLayerConfig(input_tensors=SPECS[spec], weight=SPECS[spec])
    config = QConfig(given, extra_options={"PrintSummary": False, **options})
    result = ModelQuantizer(config).quantize_model(proto, None, [models.feeds(proto, seed=k) for k in range(4)])
    assert result is not None
    onnx.checker.check_model(result, full_check=True)
    return result


def count(proto: onnx.ModelProto, op_type: str) -> int:
    return models.op_types(proto).count(op_type)


#: option -> (model, operator, how many without, how many with the option on).
EFFECTS = {
    "FuseInstanceNorm": (pass_models.instance_norm(), "InstanceNormalization", 0, 3),
    "FuseLayerNorm": (pass_models.layer_norm(), "LayerNormalization", 0, 3),
    "FuseGelu": (pass_models.gelu(), "Gelu", 0, 3),
    "FuseL2Norm": (pass_models.l2_norm(), "LpNormalization", 0, 2),
    "FoldBatchNorm": (pass_models.concat_norm(), "BatchNormalization", 1, 0),
    "ConvertSplitToSlice": (pass_models.pools_and_splits(), "Split", 3, 0),
    "ConvertBNToConv": (pass_models.pools_and_splits(), "BatchNormalization", 1, 0),
    "SplitLargeKernelPool": (pass_models.pools_and_splits(), "AveragePool", 0, 1),
}


@pytest.mark.parametrize("option", EFFECTS)
def test_a_pass_runs_when_its_option_says_so(option: str) -> None:
    proto, op_type, without, with_ = EFFECTS[option]
    spec = "int16" if option == "FuseL2Norm" else "int8"  # of its operators, int8 quantizes none
    off, on = quantized(proto, spec, **{option: False}), quantized(proto, spec, **{option: True})
    assert (count(off, op_type), count(on, op_type)) == (without, with_)
    models.run(on, models.feeds(proto))


@pytest.mark.parametrize("option", ["ConvertSplitToSlice", "ConvertBNToConv", "SplitLargeKernelPool"])
@pytest.mark.parametrize(("spec", "on"), [("int8", False), ("xint8", True), ("int16", True)])
def test_forms_for_devices_are_the_default_of_their_flows(option: str, spec: str, on: bool) -> None:
    proto, op_type, without, with_ = EFFECTS[option]
    assert count(quantized(proto, spec), op_type) == (with_ if on else without)


def test_a_clip_becomes_a_relu_where_the_codes_cut_at_its_bound() -> None:
    proto = models.depthwise_cnn()
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(models.normal(4, 1, 3, 3, scale=9), "wd"))
    off, on = quantized(proto, "uint8"), quantized(proto, "uint8", ConvertClipToRelu=True)
    assert (count(off, "Clip"), count(on, "Clip"), count(on, "Relu")) == (1, 0, 1)
    feed = models.feeds(proto, seed=9)
    models.assert_close(models.run(on, feed), models.run(off, feed), 1e-6)


def test_a_clip_whose_codes_reach_further_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    proto = models.depthwise_cnn()
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(models.normal(4, 1, 3, 3, scale=9), "wd"))
    assert count(quantized(proto, "xint8", ConvertClipToRelu=True), "Relu") == 1
    assert "becomes a Relu, but the codes behind it reach 7.9375, beyond its bound 6" in caplog.text


def test_relus_disappear_behind_asymmetric_codes() -> None:
    proto = models.cnn()
    off, on = quantized(proto, "uint8"), quantized(proto, "uint8", FoldRelu=True)
    assert count(off, "Relu") == 2 and count(on, "Relu") == 0
    feed = models.feeds(proto, seed=9)
    models.assert_close(models.run(on, feed), models.run(off, feed), 1e-6)
    assert count(quantized(proto, "int8", FoldRelu=True), "Relu") == 2


def test_nhwc_takes_the_calibration_data_of_the_float_model() -> None:
    proto = pass_models.image_model()
    plain, last = quantized(proto), quantized(proto, ConvertNCHWToNHWC=True)
    feed = models.feeds(proto, seed=7)
    moved = {name: np.moveaxis(a, 1, -1) if a.ndim == 4 else a for name, a in feed.items()}
    y, v = models.run(plain, feed)
    models.assert_close(models.run(last, moved), [np.moveaxis(y, 1, -1), v], 1e-6)


@pytest.mark.parametrize("given", ["x:[2,3,8,6];other:[2,4]", {"x": [2, 3, 8, 6], "other": [2, 4]}])
def test_fixed_shapes_reach_every_tensor(given: object) -> None:
    result = quantized(pass_models.image_model(), FixShapes=given)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in result.graph.output}
    assert shapes == {"y": [2, 4, 8, 6], "v": [2, 4]}
    inner = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in result.graph.value_info}
    assert all(0 not in sizes for sizes in inner.values()) and inner["p"] == [2, 4, 1, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": [-1, 3, 8, 6]}, "must be 1 or more"),
        ("x:[0,3,8,6]", "must be 1 or more"),
        ("x=[5,3,8,6]", "not of the form"),
        ("z:[5,3]", "unknown input or output"),
        ("x:[5,4,8,6]", "contradicts"),
        ("x:[5,3,8]", "has 4 axes"),
    ],
)
def test_shapes_that_cannot_be(given: object, message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        quantized(pass_models.image_model(), FixShapes=given)


def test_every_tensor_of_the_result_has_a_type_and_a_shape() -> None:
    proto = models.depthwise_cnn()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    result = quantized(proto, FillAllValueInfo=True)
    stated = {value.name for value in (*result.graph.value_info, *result.graph.output)}
    assert {name for node in result.graph.node for name in node.output} <= stated
    assert all(value.type.tensor_type.HasField("shape") for value in result.graph.value_info)


@pytest.mark.parametrize("filled", [False, True])
def test_tensors_that_operators_of_the_runtime_make_are_stated_on_request(filled: bool) -> None:
    """Inference knows nothing of com.microsoft; a run does."""
    proto = models.cnn()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    config = get_default_config("UINT8_DYNAMIC_QUANT")
    config.extra_options.update(PrintSummary=False, FillAllValueInfo=filled)
    result = ModelQuantizer(Config(config)).quantize_model(proto)
    assert result is not None
    known = (*result.graph.value_info, *result.graph.output)
    stated = {value.name for value in known if value.type.tensor_type.HasField("shape")}
    made = {name for node in result.graph.node for name in node.output if name}
    assert (made <= stated) == filled


def test_initializers_that_a_feed_may_override_stay_float() -> None:
    proto = models.initializers_as_inputs(models.cnn())
    off = quantized(proto, RemoveInputInit=False)
    assert len(off.graph.input) == len(proto.graph.input) and len(quantized(proto).graph.input) == 1
    assert "w1" in {tensor.name for tensor in off.graph.initializer}
    models.run(off, models.feeds(models.cnn()))


# ---- Shapeshifter ----------------------------------------------------------------------------------------------------


def test_passes_before_and_after_instead_of_the_list_of_the_flow() -> None:
    recipe = {"preprocess_passes": {"onnx_fold_batch_norm": None}, "postprocess_passes": [{"fold_relu": {}}]}
    result = quantized(models.cnn(), "uint8", PreprocessYAML=recipe)
    assert count(result, "BatchNormalization") == 0 and count(result, "Relu") == 0
    kept = quantized(models.cnn(), "uint8", PreprocessYAML={"preprocess_passes": {"copy_bias_init": None}})
    assert count(kept, "BatchNormalization") == 2


@pytest.mark.parametrize("template", ["xint8", "a8w8", "a16w8", "bf16", "bfp16"])
def test_templates(template: str) -> None:
    proto = pass_models.pools_and_splits()
    result = quantized(proto, "int16", PreprocessYAML=template)
    assert next(entry.version for entry in result.opset_import if entry.domain == "") == 21
    assert count(result, "Split") == (0 if template == "xint8" else 3)
