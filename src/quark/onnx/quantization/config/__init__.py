"""Configurations of the ONNX dialect."""

from quark.onnx.quantization.config.config import (
    Config,
    QConfig,
    QuantizationConfig,
    get_default_config,
    get_default_config_mapping,
)

__all__ = ["Config", "QConfig", "QuantizationConfig", "get_default_config", "get_default_config_mapping"]
