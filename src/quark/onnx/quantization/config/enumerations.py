"""The enumerations by which documents of the interface name values of two options.

    WeightCalibrateMethod = CalibrationMethod.MinMax | ExtendedCalibrationMethod.MinMSE
    quant_type in TensorQuantOverrides = QuantType.Int8 | ExtendedQuantType.QBFP | …

Members count by their name; members of that name of ``onnxruntime.quantization``, and plain strings, do as well.
The numbers are those of the interface.
"""

from __future__ import annotations

import enum


class CalibrationMethod(enum.Enum):
    """Range searches of ONNX Runtime's list."""

    MinMax = 0
    Entropy = 1
    Percentile = 2
    Distribution = 3


class ExtendedCalibrationMethod(enum.Enum):
    """Range searches of weights with float scales."""

    MinMSE = 0


class QuantType(enum.Enum):
    """Data types that ONNX Runtime's quantizer has, with and without their Q."""

    QInt8 = 0
    QUInt8 = 1
    QFLOAT8E4M3FN = 2
    QInt16 = 3
    QUInt16 = 4
    QInt4 = 5
    QUInt4 = 6
    QFLOAT8E5M2 = 7
    Int8 = QInt8
    UInt8 = QUInt8
    Int16 = QInt16
    UInt16 = QUInt16
    Int4 = QInt4
    UInt4 = QUInt4


class ExtendedQuantType(enum.Enum):
    """Data types of the extended operators. ``QBFP`` is BFP16 and ``QMX`` is MXINT8."""

    QInt8 = 1
    QUInt8 = 2
    QInt16 = 3
    QUInt16 = 4
    QInt32 = 5
    QUInt32 = 6
    QFloat16 = 7
    QBFloat16 = 8
    QBFP = 9
    QMX = 10
