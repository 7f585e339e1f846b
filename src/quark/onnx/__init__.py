"""The ONNX flow: ``ModelQuantizer(config).quantize_model(model_input, model_output, calibration_data_reader)``.

Importing this module is cheap: the engine (onnx, onnx_ir, ONNX Runtime) is imported when a model is first touched, and
the data readers when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quark.deferred import defer
from quark.onnx.quantization.config import Config, QConfig, QuantizationConfig, custom_config, data_type, spec
from quark.onnx.quantization.config.algorithm import *  # noqa: F403
from quark.onnx.quantization.config.algorithm import __all__ as ALGORITHMS
from quark.onnx.quantization.config.custom_config import __all__ as PRESETS
from quark.onnx.quantization.config.data_type import BaseDataType, DataType
from quark.onnx.quantization.config.enumerations import (
    CalibrationMethod,
    ExtendedCalibrationMethod,
    ExtendedQuantType,
    QuantType,
)
from quark.onnx.quantization.config.spec import (
    CalibMethod,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    ScaleType,
    XInt8Spec,
)
from quark.onnx.quantizer import ModelQuantizer

defer("sympy", "onnx_ir._symbolic_shapes")  # of no use to the flow, and half of the time that its imports take

if TYPE_CHECKING:
    from quark.onnx.data import CachedDataReader, CalibrationDataReader
    from quark.onnx.data_files import PathDataReader
    from quark.onnx.data_sets import DatasetReader
    from quark.onnx.preprocessing import Preprocessing
    from quark.onnx.quantization.config.custom_config import *  # noqa: F403
    from quark.onnx.random_data import RandomDataReader

_LATE = {
    "CachedDataReader": "quark.onnx.data",
    "CalibrationDataReader": "quark.onnx.data",
    "DatasetReader": "quark.onnx.data_sets",
    "PathDataReader": "quark.onnx.data_files",
    "Preprocessing": "quark.onnx.preprocessing",
    "RandomDataReader": "quark.onnx.random_data",
}


def __getattr__(name: str) -> Any:
    if name.endswith("_CONFIG") or name in PRESETS:
        return getattr(custom_config, name)
    if name.removesuffix("Spec") in data_type.data_types():  # a row of the table of formats
        return getattr(spec if name.endswith("Spec") else data_type, name)
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATE[name]), name)


_FORMATS = data_type.data_types()
__all__ = [
    "BaseDataType",
    "CachedDataReader",
    "CalibMethod",
    "CalibrationDataReader",
    "CalibrationMethod",
    "Config",
    "DataType",
    "DatasetReader",
    "ExtendedCalibrationMethod",
    "ExtendedQuantType",
    "ModelQuantizer",
    "PathDataReader",
    "Preprocessing",
    "QConfig",
    "QLayerConfig",
    "QTensorConfig",
    "QuantGranularity",
    "QuantType",
    "QuantizationConfig",
    "RandomDataReader",
    "ScaleType",
    "XInt8Spec",
    *ALGORITHMS,
    *PRESETS,
    *_FORMATS,
    *(f"{name}Spec" for name in _FORMATS),
]
