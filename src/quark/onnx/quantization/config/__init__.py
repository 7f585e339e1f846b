"""Configurations of the ONNX dialect."""

from quark.onnx.quantization.config.config import Config, QConfig, QuantizationConfig, get_default_config

__all__ = ["Config", "QConfig", "QuantizationConfig", "get_default_config"]
