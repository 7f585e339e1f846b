"""ONNX Runtime's tests of weights in four bits, with this package behind ``MatMul4BitsQuantizer``.

The module has another name today, so a run with its own program needs the old one (``OLD``), too.
"""

from __future__ import annotations

import sys
from typing import Any

import onnx
import onnxruntime.quantization as theirs
from judge_onnxruntime import NotHere
from judge_reached import counted
from onnxruntime.quantization import matmul_nbits_quantizer
from onnxruntime.quantization.onnx_model import ONNXModel

from quark.onnx import Int4, ModelQuantizer, QConfig, QLayerConfig, QTensorConfig, QuantGranularity, UInt4, UInt8Spec

ALGORITHMS = {"DEFAULT": "DEFAULT", "GPTQ": "GPTQ", "HQQ": "HQQ"}
#: Its quantizer of today takes the name that it had.
OLD = "matmul_4bits_quantizer"


class Quantizer:
    """Theirs: a model and a configuration, ``process``, and the model."""

    def __init__(
        self, model: Any, block_size: int = 128, is_symmetric: bool = False, accuracy_level: int | None = None,
        nodes_to_exclude: Any = None, algo_config: Any = None, **more: Any,
    ) -> None:  # fmt: skip
        self.model = model if isinstance(model, ONNXModel) else ONNXModel(model)
        self.exclude = list(nodes_to_exclude or [])
        self.group = getattr(algo_config, "block_size", block_size)
        self.symmetric = getattr(algo_config, "is_symmetric", is_symmetric)
        self.told = algo_config
        self.accuracy = accuracy_level or 0

    def config(self) -> QConfig:
        """The configuration of this package."""
        told, options = self.told, {}
        if told is not None and getattr(told, "op_types_to_quantize", None):
            options["OpTypesToQuantize"] = list(told.op_types_to_quantize)
        if getattr(told, "quant_format", None) is theirs.QuantFormat.QDQ:
            kind = Int4 if self.symmetric else UInt4
            group = QuantGranularity.Group
            weight = QTensorConfig(
                self.symmetric, data_type=kind, quant_granularity=group, group_size=self.group, narrow=False
            )
            options["WeightsOnly"] = True
            return QConfig(QLayerConfig(weight=weight), exclude=self.exclude, extra_options=options)
        name = getattr(told, "algorithm", "DEFAULT")
        if name not in ALGORITHMS:
            raise NotHere(f"algorithm {name}")
        settings = {"Algorithm": ALGORITHMS[name], "GroupSize": self.group, "Symmetric": self.symmetric, "Bits": 4}
        settings["AccuracyLevel"] = self.accuracy
        options |= {"UseMatMulNBits": True, "MatMulNBitsParams": settings}
        return QConfig(QLayerConfig(UInt8Spec(), UInt8Spec()), exclude=self.exclude, extra_options=options)

    def process(self) -> None:
        """Quantize."""
        reader = getattr(self.told, "calibration_data_reader", None)
        made = ModelQuantizer(self.config()).quantize_model(self.model.model, None, reader)
        self.model = ONNXModel(made if isinstance(made, onnx.ModelProto) else onnx.load(made))


def pytest_configure(config: Any) -> None:
    """Before their modules are imported."""
    Quantizer.process = counted(Quantizer.process)  # type: ignore[method-assign]
    for module in (matmul_nbits_quantizer, sys.modules.get(f"onnxruntime.quantization.{OLD}")):
        if module is not None:
            module.MatMulNBitsQuantizer = module.MatMul4BitsQuantizer = Quantizer
