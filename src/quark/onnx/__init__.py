"""The ONNX flow: ``ModelQuantizer(config).quantize_model(model_input, model_output, calibration_data_reader)``.

Importing this module is cheap: the engine (onnx, onnx_ir, ONNX Runtime) is imported when a model is first touched, and
the data readers when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.onnx.quantization.config import Config, QConfig, QuantizationConfig, get_default_config
from quark.onnx.quantization.config.custom_config import (
    A8W8_QCONFIG,
    A16W8_QCONFIG,
    BF16_QCONFIG,
    BFP16_QCONFIG,
    XINT8_QCONFIG,
)
from quark.onnx.quantization.config.data_type import (
    BFP16,
    FP8E4M3,
    FP8E5M2,
    MX4,
    MX6,
    MX9,
    MXFP4E2M1,
    MXFP6E2M3,
    MXFP6E3M2,
    MXFP8E4M3,
    MXFP8E5M2,
    BaseDataType,
    BFloat16,
    DataType,
    Float16,
    Int2,
    Int4,
    Int8,
    Int16,
    Int32,
    MXInt8,
    UInt2,
    UInt4,
    UInt8,
    UInt16,
    UInt32,
)
from quark.onnx.quantization.config.spec import (
    BFloat16Spec,
    BFP16Spec,
    CalibMethod,
    Float16Spec,
    FP8E4M3Spec,
    FP8E5M2Spec,
    Int2Spec,
    Int4Spec,
    Int8Spec,
    Int16Spec,
    Int32Spec,
    MX4Spec,
    MX6Spec,
    MX9Spec,
    MXFP4E2M1Spec,
    MXFP6E2M3Spec,
    MXFP6E3M2Spec,
    MXFP8E4M3Spec,
    MXFP8E5M2Spec,
    MXInt8Spec,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    ScaleType,
    UInt2Spec,
    UInt4Spec,
    UInt8Spec,
    UInt16Spec,
    UInt32Spec,
    XInt8Spec,
)
from quark.onnx.quantizer import ModelQuantizer

if TYPE_CHECKING:
    from quark.onnx.data import CachedDataReader, CalibrationDataReader, RandomDataReader
    from quark.onnx.data_files import PathDataReader

_LATE = {
    "CachedDataReader": "quark.onnx.data",
    "CalibrationDataReader": "quark.onnx.data",
    "PathDataReader": "quark.onnx.data_files",
    "RandomDataReader": "quark.onnx.data",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATE[name]), name)


__all__ = [
    "A8W8_QCONFIG",
    "A16W8_QCONFIG",
    "BF16_QCONFIG",
    "BFP16",
    "BFP16_QCONFIG",
    "FP8E4M3",
    "FP8E5M2",
    "MX4",
    "MX6",
    "MX9",
    "MXFP4E2M1",
    "MXFP6E2M3",
    "MXFP6E3M2",
    "MXFP8E4M3",
    "MXFP8E5M2",
    "XINT8_QCONFIG",
    "BFP16Spec",
    "BFloat16",
    "BFloat16Spec",
    "BaseDataType",
    "CachedDataReader",
    "CalibMethod",
    "CalibrationDataReader",
    "Config",
    "DataType",
    "FP8E4M3Spec",
    "FP8E5M2Spec",
    "Float16",
    "Float16Spec",
    "Int2",
    "Int2Spec",
    "Int4",
    "Int4Spec",
    "Int8",
    "Int8Spec",
    "Int16",
    "Int16Spec",
    "Int32",
    "Int32Spec",
    "MX4Spec",
    "MX6Spec",
    "MX9Spec",
    "MXFP4E2M1Spec",
    "MXFP6E2M3Spec",
    "MXFP6E3M2Spec",
    "MXFP8E4M3Spec",
    "MXFP8E5M2Spec",
    "MXInt8",
    "MXInt8Spec",
    "ModelQuantizer",
    "PathDataReader",
    "QConfig",
    "QLayerConfig",
    "QTensorConfig",
    "QuantGranularity",
    "QuantizationConfig",
    "RandomDataReader",
    "ScaleType",
    "UInt2",
    "UInt2Spec",
    "UInt4",
    "UInt4Spec",
    "UInt8",
    "UInt8Spec",
    "UInt16",
    "UInt16Spec",
    "UInt32",
    "UInt32Spec",
    "XInt8Spec",
    "get_default_config",
]
