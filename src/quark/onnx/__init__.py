"""The ONNX flow: ``ModelQuantizer(config).quantize_model(model_input, model_output, calibration_data_reader)``.

Importing this module is cheap: the engine (onnx, onnx_ir, ONNX Runtime) is imported when a model is first touched.
"""

from __future__ import annotations

from quark.onnx.quantization.config import Config, QConfig, QuantizationConfig, get_default_config
from quark.onnx.quantization.config.custom_config import A8W8_QCONFIG, A16W8_QCONFIG, XINT8_QCONFIG
from quark.onnx.quantization.config.data_type import (
    BaseDataType,
    DataType,
    Int4,
    Int8,
    Int16,
    Int32,
    UInt4,
    UInt8,
    UInt16,
    UInt32,
)
from quark.onnx.quantization.config.spec import (
    CalibMethod,
    Int4Spec,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    ScaleType,
    UInt4Spec,
    UInt8Spec,
    UInt16Spec,
    UInt32Spec,
    XInt8Spec,
)
from quark.onnx.quantizer import ModelQuantizer

__all__ = [
    "A16W8_QCONFIG",
    "A8W8_QCONFIG",
    "XINT8_QCONFIG",
    "BaseDataType",
    "CalibMethod",
    "Config",
    "DataType",
    "Int16",
    "Int16Spec",
    "Int32",
    "Int32Spec",
    "Int4",
    "Int4Spec",
    "Int8",
    "Int8Spec",
    "ModelQuantizer",
    "QConfig",
    "QLayerConfig",
    "QTensorConfig",
    "QuantGranularity",
    "QuantizationConfig",
    "ScaleType",
    "UInt16",
    "UInt16Spec",
    "UInt32",
    "UInt32Spec",
    "UInt4",
    "UInt4Spec",
    "UInt8",
    "UInt8Spec",
    "XInt8Spec",
    "get_default_config",
]
