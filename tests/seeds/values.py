"""Values of every option: those that the text's type allows, and one that is tried on the network of awkward shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxruntime.quantization import QuantType
from tests.seeds.awkward import Reader, eight, samples
from tests.seeds.options import OPTIONS

from quark.onnx import (
    BFloat16Spec,
    BFP16Spec,
    CalibMethod,
    ExtendedQuantType,
    Int16Spec,
    QLayerConfig,
    QuantGranularity,
    XInt8Spec,
)

POWERS = QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())
BLOCKS = QLayerConfig(input_tensors=BFP16Spec(), weight=BFP16Spec())
BRAIN = QLayerConfig(input_tensors=BFloat16Spec(), weight=BFloat16Spec())
MIXED = QLayerConfig(input_tensors=Int16Spec(calibration_method=CalibMethod.MinMax), weight=eight().weight)
CHANNELS = QLayerConfig(eight().input_tensors, weight=eight(quant_granularity=QuantGranularity.Channel).weight)
LAYERWISE = eight(calibration_method=CalibMethod.LayerwisePercentile)

#: Values of a kind; None is added where the text says so.
OF_KIND: dict[str, tuple[Any, ...]] = {"bool": (True, False)}
#: Values of options whose kind alone does not say what makes sense.
OF_OPTION: dict[str, tuple[Any, ...]] = {
    "PreprocessYAML": ("xint8", "a8w8", "a16w8", "bf16", "bfp16"),
    "SkipPreprocess": (True, False),
    "OpTypesToQuantize": (["Conv"], ("Conv", "Gemm"), []),
    "NodesToQuantize": (["first"], ("first", "turned"), []),
    "ExtraOpTypesToQuantize": (["Gemm"], ("Gemm",), []),
    "ExecutionProviders": (["CPUExecutionProvider"], ("CPUExecutionProvider",)),
    "SimplifyModelOptions": (
        {},
        {"skip_fusion_patterns": ["EliminationSlice"]},
        {
            "model_check": True,
            "skip_fusion_patterns": ["EliminationSlice"],
            "save_as_external_data": False,
            "verbose": True,
        },
    ),
    "OpTypesToExcludeOutputQuantization": (["Conv"], ("Conv",), []),
    "NodesToExcludeOutputQuantization": (["gated"], ("gated",), []),
    "QDQOpTypePerChannelSupportToAxis": ({"MatMul": 1}, {}),
    "CalibMovingAverageConstant": (0.01, 0.5),
    "Percentile": (99.999, 99.9, 100.0),
    "LWPMetric": ("mae", "mse"),
    "PercentileCandidates": ([99.99, 99.999, 99.99999], (99.0, 99.9)),
    "RandomDataReaderInputShape": ({"image": [1, 3, 224, 224]}, {"image": (1, 3, 224, 224)}, {}),
    "RandomDataReaderInputDataRange": ({"image": [0.0, 1.0]}, {"image": (-1, 1)}),
    "MinMSEModePof2Scale": ("All", "MostCommon"),
    "NumBins": (2048, 128, 0),
    "ConvertOpsetVersion": (21,),
    "MaxLoopNum": (5, 1),
    "SaveAndRestore": ("state.json",),
    "CopySharedInit": (["Conv", "Gemm", "Mul"], ("Conv",), []),
    "CopyBiasInit": (["Conv", "Gemm", "Mul"], ("Conv",), []),
    "RemoveQDQBetweenOps": ([("Conv", "Relu")], (("Conv", "Relu"),), []),
    "FixShapes": ("input_1:[1,224,224,3];input_2:[1,96,96,3];output_1:[1,100];output_2:[1,1000]",),
    "CalibDataSize": (1, 100),
    "CalibWorkerNum": (1, 4),
    "MatMulNBitsParams": (
        {},
        *({"Algorithm": name} for name in ("DEFAULT", "GPTQ", "HQQ")),
        {"GroupSize": 128, "Symmetric": True, "Bits": 4, "AccuracyLevel": 0},
        *({"AccuracyLevel": level} for level in range(5)),
    ),
    "EvalDataReader": (Reader([]),),
    "TmpDir": ("folder", "/absolute/folder", None),
    "UserCustomOpLibPath": ("folder", "/absolute/library.so", None),
    "EncryptionAlgorithm": ("AES-256", None),
    "WeightCalibrateMethod": (
        "quark.onnx.CalibrationMethod.MinMax",
        "quark.onnx.ExtendedCalibrationMethod.MinMSE",
        None,
    ),
    "MinMSEModeFloatScale": ("Percentile", "HistCenter", "All"),
    "TensorQuantOverrides": (
        {
            "/model/conv_1/weight": [{"quant_type": QuantType.QInt8, "axis": 1}],
            "/model/conv_2/output_0": [{"quant_type": ExtendedQuantType.QBFP}],
        },
        {},
    ),
    "CalibPassthroughOpTypes": (
        ["Reshape", "Transpose", "MaxPool", "Split", "Slice", "Squeeze", "Unsqueeze", "Gather"],
        ("Reshape",),
        [],
    ),
}


def values_of(name: str, kind: str) -> tuple[Any, ...]:
    """Every value that the text allows."""
    bare = kind.removesuffix("?")
    given = OF_OPTION[name] if name in OF_OPTION else OF_KIND[bare]
    return (*given, None) if kind.endswith("?") and None not in given else given


#: Options that are tried with another layer, or beside other options.
BASE: Mapping[str, tuple[QLayerConfig, Mapping[str, Any]]] = {
    **{row.name: (POWERS, {}) for row in OPTIONS if row.name.startswith(("Adjust", "Align", "Convert"))},
    **dict.fromkeys(("NPULimitationCheck", "MaxLoopNum", "SimulateDPU", "MinMSEModePof2Scale"), (POWERS, {})),
    **dict.fromkeys(("ActivationScaled", "WeightScaled", "BF16WithClip", "BF16QDQToCast"), (BRAIN, {})),
    "EnableVaimlBF16": (BRAIN, {}),
    "RefineBlockAxis": (BLOCKS, {}),
    "RemoveFusedQDQ": (BLOCKS, {}),
    "AlignEltwiseQuantType": (MIXED, {}),
    "ConvertOpsetVersion": (eight(), {}),
    "QDQOpTypePerChannelSupportToAxis": (CHANNELS, {}),
    **dict.fromkeys(("LWPMetric", "PercentileCandidates", "CalibOptimizeMem", "CalibOptimizeDisk"), (LAYERWISE, {})),
    "Percentile": (eight(calibration_method=CalibMethod.Percentile), {}),
    "NumBins": (eight(calibration_method=CalibMethod.Percentile), {}),
    "SaveTensorHistFig": (eight(calibration_method=CalibMethod.Percentile), {}),
    "CalibMovingAverageConstant": (eight(), {"CalibMovingAverage": True}),
    "RandomDataReaderInputShape": (eight(), {"UseRandomData": True}),
    "RandomDataReaderInputDataRange": (eight(), {"UseRandomData": True}),
    "MatMulNBitsParams": (eight(), {"UseMatMulNBits": True}),
    "MinMSEModeFloatScale": (eight(), {"WeightCalibrateMethod": "MinMSE"}),
    "EvalDataReader": (eight(), {"EvalMetrics": True}),
    "EncryptionAlgorithm": (eight(), {"CryptoMode": True}),
    "Int16Bias": (eight(), {"ConvertOpsetVersion": 21}),
}
#: The value that is tried, where it is not the opposite of the default or the first of ``values_of``.
TRIED: Mapping[str, Any] = {
    "RandomDataReaderInputShape": {"x": [3, 6, 9, 7], "z": [3, 5]},
    "RandomDataReaderInputDataRange": {"x": [-2, 2], "z": [-2, 2]},
    "FixShapes": "x:[2,6,9,7];z:[2,5];y:[2,3];image:[2,4,5,3]",
    "LWPMetric": "mse",
    "Percentile": 99.9,
    "PercentileCandidates": [99.0, 99.9, 100.0],
    "CalibMovingAverageConstant": 0.5,
    "MinMSEModePof2Scale": "MostCommon",
    "NumBins": 128,
    "MaxLoopNum": 1,
    "CalibDataSize": 2,
    "CalibWorkerNum": 2,
    "MatMulNBitsParams": {"Algorithm": "HQQ", "GroupSize": 16, "Symmetric": False},
    "WeightCalibrateMethod": "MinMSE",
    "MinMSEModeFloatScale": "HistCenter",
    "TensorQuantOverrides": {
        "w1": [{"quant_type": QuantType.QInt8, "axis": 1}],
        "w5": [{"quant_type": QuantType.QInt8, "axis": 0}],
        "w4": [{"quant_type": QuantType.QInt8, "axis": 1}],
        "r": [{"quant_type": ExtendedQuantType.QInt16}],
    },
    "EvalDataReader": samples(2, seed=5),
    "CopySharedInit": [],
    "ExtraOpTypesToQuantize": ["Softmax"],
    "QDQOpTypePerChannelSupportToAxis": {"MatMul": 1, "Gemm": 0},
    "PreprocessYAML": "a8w8",
    "RemoveQDQBetweenOps": [("Mul", "Concat")],
}
