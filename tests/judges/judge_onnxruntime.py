"""ONNX Runtime's tests of its quantizer, with this package behind the three functions that quantize.

Everything else of ``onnxruntime.quantization`` (its types, its readers, its arithmetic for the expected values) stays
theirs. What this package does not have raises ``NotHere``, so that a test fails for a reason that can be counted.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx
import onnxruntime.quantization as theirs
from judge_reached import counted

from quark.config.options import OPTIONS
from quark.onnx import (
    CalibMethod,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    SmoothQuantConfig,
)
from quark.onnx.quantization.config import data_type
from quark.onnx.tools.command import main
from quark.onnx.tools.convert_qdq_to_qop import TOOL

INTEGERS = ("Int8", "Int16", "Int4")
#: Options of ONNX Runtime that are fields of a spec here, or that nothing depends on; those in small letters are the
#: tests' own, which ONNX Runtime passes over.
ELSEWHERE = (
    "ActivationSymmetric",
    "WeightSymmetric",
    "UseQDQContribOps",
    "CalibStridedMinMax",
    "CalibMaxIntermediateOutputs",
    "SmoothQuant",
    "scenario",
    "extra.",
    "dual_feed",
)


class NotHere(NotImplementedError):
    """An argument that this package does not have."""


def named(value: Any) -> str:
    """A type of theirs (or its number in ONNX) as ours is called."""
    name = value.name if hasattr(value, "name") else onnx.TensorProto.DataType.Name(value)
    for ours in data_type.data_types():
        if (
            name.lower() in (f"q{ours}".lower(), ours.lower())
            or name.lower().replace("float8e4m3fn", "fp8e4m3").lstrip("q") == ours.lower()
        ):
            return ours
    raise NotHere(f"type {name}")


def tensor(kind: str, symmetric: bool, **more: Any) -> QTensorConfig:
    """A spec of our side."""
    return QTensorConfig(symmetric=symmetric, data_type=data_type.data_types()[kind], narrow=False, **more)


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """Their options that are options here."""
    kept = {name: value for name, value in given.items() if not name.startswith(ELSEWHERE) and value is not None}
    for name in kept:
        if name not in OPTIONS:
            raise NotHere(f"option {name}")
    return kept


def reduced(source: Any, options: dict[str, Any]) -> dict[str, Any]:
    """``reduce_range``: half of the codes for every weight; here it is said of single tensors."""
    model = source if isinstance(source, onnx.ModelProto) else onnx.load(source, load_external_data=False)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    weights = [one.name for one in model.graph.initializer if one.data_type in floats and len(one.dims) > 1]
    told = options.get("TensorQuantOverrides", {})
    half = [{"reduce_range": True}]
    return {**options, "TensorQuantOverrides": {**dict.fromkeys(weights, half), **told}} if weights else options


def run(source: Any, target: Any, reader: Any, config: QConfig, operators: bool) -> None:
    """Quantize from file to file; ``operators``: integer operators in the place of the pairs around them."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder) / "pairs.onnx" if operators else target
        ModelQuantizer(config).quantize_model(source, pairs, reader)
        if operators and main(TOOL, [str(pairs), str(target), "--overwrite"]):
            raise NotHere("the tool for integer operators refused the model")
    if not config.use_external_data_format:
        onnx.save(readable(onnx.load(target)), target)


def readable(model: onnx.ModelProto) -> onnx.ModelProto:
    """Parameters in the typed fields of the file, which the tests read; ours are raw bytes, which say the same."""
    for one in model.graph.initializer:
        if one.name.endswith(("_scale", "_zero_point")):
            values = onnx.numpy_helper.to_array(one)
            one.CopyFrom(onnx.helper.make_tensor(one.name, one.data_type, one.dims, values.ravel().tolist()))
    return model


def quantize_static(
    model_input: Any, model_output: Any, calibration_data_reader: Any, quant_format: Any = theirs.QuantFormat.QDQ,
    op_types_to_quantize: Any = None, per_channel: bool = False, reduce_range: bool = False,
    activation_type: Any = theirs.QuantType.QInt8, weight_type: Any = theirs.QuantType.QInt8,
    nodes_to_quantize: Any = None, nodes_to_exclude: Any = None, use_external_data_format: bool = False,
    calibrate_method: Any = theirs.CalibrationMethod.MinMax, calibration_providers: Any = None,
    extra_options: dict[str, Any] | None = None, calibration_cache_path: Any = None,
) -> None:  # fmt: skip
    """Theirs, argument by argument as docs/migrate/onnxruntime.md says."""
    given, activation, weight = dict(extra_options or {}), named(activation_type), named(weight_type)
    options = reduced(model_input, options_of(given)) if reduce_range else options_of(given)
    if op_types_to_quantize:
        options["OpTypesToQuantize"] = list(op_types_to_quantize)
    if nodes_to_quantize:
        options["NodesToQuantize"] = list(nodes_to_quantize)
    config = QConfig(
        QLayerConfig(
            input_tensors=tensor(
                activation,
                bool(given.get("ActivationSymmetric", False)),
                calibration_method=CalibMethod[calibrate_method.name],
            ),
            weight=tensor(
                weight,
                bool(given.get("WeightSymmetric", per_channel or weight in INTEGERS)),
                quant_granularity=QuantGranularity.Channel if per_channel else QuantGranularity.Tensor,
            ),
        ),
        exclude=list(nodes_to_exclude or []),
        use_external_data_format=use_external_data_format,
        algo_config=[SmoothQuantConfig(alpha=given.get("SmoothQuantAlpha", 0.5))] if given.get("SmoothQuant") else None,
        extra_options=options,
    )
    run(model_input, model_output, calibration_data_reader, config, quant_format == theirs.QuantFormat.QOperator)


def quantize_dynamic(
    model_input: Any, model_output: Any, op_types_to_quantize: Any = None, per_channel: bool = False,
    reduce_range: bool = False, weight_type: Any = theirs.QuantType.QInt8, nodes_to_quantize: Any = None,
    nodes_to_exclude: Any = None, use_external_data_format: bool = False, extra_options: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Theirs, with uint8 activations."""
    given, weight = dict(extra_options or {}), named(weight_type)
    options = reduced(model_input, options_of(given)) if reduce_range else options_of(given)
    if op_types_to_quantize:
        options["OpTypesToQuantize"] = list(op_types_to_quantize)
    if nodes_to_quantize:
        options["NodesToQuantize"] = list(nodes_to_quantize)
    granularity = QuantGranularity.Channel if per_channel else QuantGranularity.Tensor
    config = QConfig(
        QLayerConfig(
            input_tensors=tensor("UInt8", False),
            weight=tensor(weight, per_channel or weight in INTEGERS, quant_granularity=granularity),
        ),
        exclude=list(nodes_to_exclude or []),
        use_external_data_format=use_external_data_format,
        extra_options=options,
        use_dynamic_quant=True,
    )
    run(model_input, model_output, None, config, False)


def quantize(model_input: Any, model_output: Any, quant_config: Any) -> None:
    """Theirs: a configuration says which of the two."""
    static = isinstance(quant_config, theirs.StaticQuantConfig)
    names = (quantize_static if static else quantize_dynamic).__code__.co_varnames
    given = {name: value for name, value in vars(quant_config).items() if name in names}
    (quantize_static if static else quantize_dynamic)(model_input, model_output, **given)


def pytest_configure(config: Any) -> None:
    """Before their modules are imported."""
    for name, function in (
        ("quantize_static", quantize_static),
        ("quantize_dynamic", quantize_dynamic),
        ("quantize", quantize),
    ):
        for module in (sys.modules["onnxruntime.quantization.quantize"], theirs):
            setattr(module, name, counted(function))
