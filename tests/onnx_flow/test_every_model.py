"""Old, odd and real models under every kind of configuration: the file passes the checker, loads, and answers right.

With 16 bits everywhere quantization is nearly lossless, so a wrong scale, axis, reader or shared tensor cannot hide.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.old_operators import ZOO
from tests.pairs import pairs, thinned

from quark.errors import ModelError
from quark.onnx import (
    CalibMethod,
    Config,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QuantGranularity,
    get_default_config,
)

MINMAX = CalibMethod.MinMax
CHANNEL = QuantGranularity.Channel
ALL = {"PrintSummary": False, "QuantizeAllOpTypes": True}


def wide() -> QConfig:
    spec, weight = Int16Spec(calibration_method=MINMAX), Int16Spec(quant_granularity=CHANNEL)
    return QConfig(QLayerConfig(input_tensors=spec, weight=weight), extra_options=ALL)


def int8(**more: object) -> QConfig:
    spec, weight = Int8Spec(calibration_method=MINMAX), Int8Spec(quant_granularity=CHANNEL)
    return QConfig(QLayerConfig(input_tensors=spec, weight=weight), extra_options=ALL, **more)  # type: ignore[arg-type]


def preset(name: str) -> Config:
    config = get_default_config(name)
    config.extra_options["PrintSummary"] = False
    return Config(config)


CONFIGS = {
    "16 bits": wide,
    "int8": int8,
    "cpu": lambda: int8(target="cpu"),
    "XINT8": lambda: preset("XINT8"),
    "A8W8_CPU": lambda: preset("A8W8_CPU"),
    "U8U8_AAWA": lambda: preset("U8U8_AAWA"),
}


def quantized(proto: onnx.ModelProto, config: QConfig | Config, feed: dict[str, np.ndarray]) -> onnx.ModelProto | None:
    """The quantized model; ``None`` where the model holds nothing to quantize, which the error must say."""
    try:
        return ModelQuantizer(config).quantize_model(proto, None, [feed])
    except ModelError as error:
        assert "nothing in the model can be quantized" in str(error) or "float16" in str(error)
        return None


def sqnr(expected: np.ndarray, found: np.ndarray) -> float:
    expected, found = expected.astype(np.float64), found.astype(np.float64)
    error = ((expected - found) ** 2).sum()
    return float("inf") if error == 0 else float(10 * np.log10((expected**2).sum() / error))


@pytest.mark.parametrize("case", thinned(product(ZOO, CONFIGS), 5), ids="-".join)
def test_models_of_old_exporters(case: tuple[str, str]) -> None:
    name, config = case
    opsets, build = ZOO[name]
    proto = build(opsets[0])
    feed = models.feeds(proto)
    if not all(np.isfinite(array).all() for array in models.run(proto, feed) if array.dtype == np.float32):
        feed = {key: np.abs(array) + 1 for key, array in feed.items()}
    result = quantized(proto, CONFIGS[config](), feed)
    if result is None:
        return
    onnx.checker.check_model(result, full_check=True)
    expected, found = models.run(proto, feed), models.run(result, feed)
    if config == "16 bits":
        for before, after in zip(expected, found, strict=True):
            if before.dtype == np.float32:
                assert sqnr(before, after) > 45
            elif before.dtype == np.bool_ or before.dtype.kind in "iu":
                assert np.mean(before == after) > 0.9


REAL = ["squeezenet11_flowers5", "yolox_nano", "ultraface_rfb320", "stories260K", "gtcrn_simple", "silero_vad_16k_op15"]


@pytest.mark.golden
@pytest.mark.parametrize(("config", "name"), pairs(["16 bits", "A8W8_CPU", "XINT8"], REAL))
def test_real_models(name: str, config: str) -> None:
    if not models.REAL_MODELS.is_dir():
        pytest.skip("no folder 'shared' beside the repository")
    proto = onnx.load(models.REAL_MODELS / f"{name}.onnx")
    feed = models.real_feeds(name, proto)
    result = quantized(proto, CONFIGS[config](), feed)
    assert result is not None
    onnx.checker.check_model(result, full_check=True)
    expected, found = models.run(proto, feed), models.run(result, feed)
    assert all(np.isfinite(array).all() for array in found)
    if config == "16 bits":  # silero squares a spectrum: more dynamic range than 16 bits have
        assert sqnr(expected[0], found[0]) > (20 if name.startswith("silero") else 30)
