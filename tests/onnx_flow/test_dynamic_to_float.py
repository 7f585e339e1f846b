"""Dynamically quantized models, ours and ONNX Runtime's, made float again: what the error for them advises."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic
from tests.onnx_flow import models, odd_graphs

from quark.errors import ModelError
from quark.numerics.metrics import sqnr
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.graph.model import load, to_proto
from quark.onnx.passes import quant_to_float

FLOAT: dict[str, Callable[[], odd_graphs.Built]] = {
    "cnn": lambda: (proto := models.cnn(), [models.feeds(proto)]),
    "attention": lambda: (proto := models.attention(), [models.feeds(proto)]),
    "lstm": odd_graphs.lstm,
    "lstm_both_ways": odd_graphs.lstm_both_ways,
}
INTEGERS = {"ConvInteger", "MatMulInteger", "DynamicQuantizeLSTM", "DynamicQuantizeLinear"}


def ours(proto: onnx.ModelProto) -> onnx.ModelProto:
    config = get_default_config("UINT8_DYNAMIC_QUANT")
    config.extra_options.update(PrintSummary=False)
    made = ModelQuantizer(Config(config)).quantize_model(proto)
    assert made is not None
    return made


def theirs(proto: onnx.ModelProto, per_channel: bool = False, weight: QuantType = QuantType.QInt8) -> onnx.ModelProto:
    path = "model.onnx"
    quantize_dynamic(copy.deepcopy(proto), path, per_channel=per_channel, weight_type=weight)
    return onnx.load(path)


MAKERS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "ours": ours,
    "theirs": theirs,
    "theirs by channel": lambda proto: theirs(proto, per_channel=True),
    "theirs unsigned": lambda proto: theirs(proto, weight=QuantType.QUInt8),
}


def operators(proto: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in proto.graph.node}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", FLOAT)
def test_a_dynamic_model_becomes_float_with_the_weights_of_its_codes(
    name: str, maker: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    proto, (feeds, *_) = FLOAT[name]()
    dynamic = MAKERS[maker](proto)
    assert operators(dynamic) & INTEGERS
    model = load(dynamic)
    report = quant_to_float.run(model)
    back = to_proto(model)
    assert report.fired and not report.refused and not operators(back) & INTEGERS
    for plain, float_again, quantized in zip(
        models.run(proto, feeds), models.run(back, feeds), models.run(dynamic, feeds), strict=True
    ):
        assert sqnr(plain, float_again) > max(25.0, sqnr(plain, quantized) - 3)  # only the weights are rounded now


READ_AS_INTEGERS = """
g (float[1, 8] x) => (float[1, 4] y) {
    c, s, z = DynamicQuantizeLinear (x)
    i = MatMulInteger (c, w, z)
    b = Add (i, bias)
    f = Cast <to = 1> (b)
    y = Mul (f, s)
}"""
QOPERATOR = "g (uint8[1, 8] x) => (uint8[1, 4] y) { y = QLinearMatMul (x, s, z, w, s, z, s, z) }"


def test_the_error_advises_only_what_works() -> None:
    weights = {"w": np.ones((8, 4), np.int8), "bias": np.arange(4, dtype=np.int32)}
    scale = {"w": np.ones((8, 4), np.uint8), "s": np.array(0.5, np.float32), "z": np.array(3, np.uint8)}
    config = get_default_config("A8W8")
    stuck, operator = models.model(READ_AS_INTEGERS, weights), models.model(QOPERATOR, scale)
    for proto, advised in ((ours(models.attention()), True), (stuck, False), (operator, False)):
        with pytest.raises(ModelError, match="already quantized") as error:
            ModelQuantizer(Config(config)).quantize_model(proto, None, [models.feeds(proto)])
        assert ("convert_quant_to_float" in str(error.value)) is advised
    report = quant_to_float.run(load(stuck))
    assert not report.fired and "its sums are read as integers" in report.refused[0]
