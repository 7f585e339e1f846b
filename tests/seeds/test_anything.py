"""Fields of a configuration together, drawn at random: the result is a valid model, runs, and is near the float one."""

from __future__ import annotations

import random
from typing import Any

import onnx
import pytest
from tests.seeds.awkward import Reader, decibels, network, samples
from tests.seeds.values import POWERS

import quark.onnx
from quark.onnx import (
    CalibMethod,
    ExtendedQuantType,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
)

ACTIVATIONS = ("a", "r", "d", "l", "g", "c", "u", "s", "m", "j", "p", "f", "h", "k", "t", "v", "x", "z")
CONSTANTS = ("w1", "w2", "w3", "w4", "w5", "w6", "w7", "b1", "b2", "b3", "b5", "b6")
NODES = (
    "first",
    "depthwise",
    "leaky",
    "grouped",
    "clip",
    "up",
    "gate",
    "gated",
    "joined",
    "turned",
    "plain",
    "sum",
    "last",
)
SPECS = ("Int8", "UInt8", "Int16", "UInt16", "BFloat16", "BFP16", "FP8E4M3")
INTEGERS = tuple(ExtendedQuantType[name] for name in ("QInt8", "QUInt8", "QInt16", "QUInt16"))
TOGETHER: tuple[dict[str, Any], ...] = (
    *({}, {"EnableDualQuantNodePairs": True}, {"DedicatedQDQPair": True}, {"Int16Bias": True}, {"QuantizeBias": False}),
    *({"AddQDQPairToWeight": True}, {"EnableDualQuantNodePairs": True, "DedicatedQDQPair": True}),
)


def spec(draw: random.Random, names: tuple[str, ...] = SPECS, weight: bool = False) -> QTensorConfig:
    name, given = draw.choice(names), {}
    if "Int" in name:
        given["calibration_method"] = draw.choice((CalibMethod.MinMax, CalibMethod.Percentile))
        if weight and draw.random() < 0.4:
            given["quant_granularity"] = QuantGranularity.Channel
    made = getattr(quark.onnx, f"{name}Spec")(**given)
    assert isinstance(made, QTensorConfig)
    return made


def overrides(draw: random.Random) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for name in draw.sample(ACTIVATIONS + CONSTANTS, draw.randint(0, 4)):
        entry: dict[str, Any] = {"quant_type": draw.choice(INTEGERS)} if draw.random() < 0.6 else {}
        if name.startswith("w") and draw.random() < 0.5:
            entry["axis"] = draw.choice((0, 1))
            entry.setdefault("quant_type", draw.choice(INTEGERS))  # other types have no scale per channel: refused
        if name in ACTIVATIONS and draw.random() < 0.3:
            entry |= {"rmin": -4.0, "rmax": 5.0}
        if entry:
            found[name] = [entry]
    return found


def named(draw: random.Random) -> dict[QLayerConfig, list[Any]]:
    found: dict[QLayerConfig, list[Any]] = {}
    for _ in range(draw.randint(0, 2)):
        more: dict[str, Any] = {"output_tensors": spec(draw, SPECS[:4])} if draw.random() < 0.3 else {}
        more |= {"bias": spec(draw, ("Int8", "Int16"))} if draw.random() < 0.3 else {}
        layer = QLayerConfig(input_tensors=spec(draw), weight=spec(draw, weight=True), **more)
        found[layer] = draw.choice((draw.sample(NODES, 2), ["^j.*"], [(["grouped"], ["mean"])]))
    return found


def configuration(draw: random.Random) -> QConfig:
    layer = QLayerConfig(input_tensors=spec(draw, SPECS[:3]), weight=spec(draw, SPECS[:2], weight=True))
    sixteen = QLayerConfig(input_tensors=spec(draw, ("Int16",)), weight=spec(draw, ("Int8",), weight=True))
    return QConfig(
        layer if draw.random() < 0.75 else POWERS,
        specific_layer_config=named(draw) or None,
        layer_type_config=draw.choice((None, None, {None: ["Gemm"]}, {sixteen: ["Conv", "ConvTranspose"]})),
        exclude=draw.choice((None, None, draw.sample(NODES, 1), [(["clip"], ["joined"])], ["^g.*"])),
        extra_options={"PrintSummary": False, "TensorQuantOverrides": overrides(draw), **draw.choice(TOGETHER)},
    )


def check(seed: int) -> None:
    draw = random.Random(seed)
    proto, config = network(draw.choice((11, 13, 17, 19, 21))), configuration(draw)
    found = ModelQuantizer(config).quantize_model(proto, None, Reader(samples()))
    assert found is not None
    onnx.checker.check_model(found, full_check=True)
    assert decibels(found, proto) > 10, config


@pytest.mark.parametrize("seed", range(20))
def test_anything(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(20, 620, 50))
def test_much_more(start: int) -> None:
    for seed in range(start, start + 50):
        check(seed)
