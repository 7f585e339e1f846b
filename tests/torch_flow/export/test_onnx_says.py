"""What an ONNX file has no nodes for: a table of scales, types and axes, each asked alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quark.errors import ConfigError
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import WHOLE, Block2D, Channel, Group, Tensor, Token
from quark.torch.export import onnx_says

CHANNEL, GROUP, TURNED, BLOCKS = Channel(0), Group(-1, 32), Group(0, 32), Block2D(32, 32)


def stage(format: str, granularity: Any = None, rule: str = "float32", **facts: Any) -> Any:
    spec = SimpleNamespace(rounding="half_even", scale_rule=rule, granularity=granularity or Tensor())
    return SimpleNamespace(**{"real_zero": False, "format": FORMATS[format], "spec": spec, "calibrated": True, **facts})


def said(check: Any, *asked: Any) -> str:
    try:
        check("x", *asked)
    except ConfigError as error:
        return str(error)
    return ""


STATIC = [
    (Tensor(), ""),
    (CHANNEL, ""),
    (GROUP, "static scales"),
    (Token(), "static scales"),
    (BLOCKS, "static scales"),
]
DYNAMIC = [
    (Tensor(), ""), (Token(), ""), (GROUP, ""), (Group(-1, 7), ""), (TURNED, "along the axis 0"),
    (Group(-2, 32), "along the axis -2"), (CHANNEL, "dynamic scales"), (BLOCKS, "dynamic scales"),
]  # fmt: skip


@pytest.mark.parametrize("format", ["int8", "uint4", "fp8_e4m3"])
def test_scales_of_activations(format: str) -> None:
    for granularity, words in STATIC:
        found = said(onnx_says.check_activation, stage(format, granularity))
        assert words in found and bool(words) == bool(found)
    for granularity, words in DYNAMIC:
        found = said(onnx_says.check_activation, stage(format, granularity, calibrated=False))
        assert words in found and bool(words) == bool(found)
        rule = said(onnx_says.check_activation, stage(format, granularity, "float16", calibrated=False))
        assert "of the rule 'float16'" in rule
    assert said(onnx_says.check_activation, stage(format, CHANNEL, "float16")) == ""


def test_activations_that_are_only_cast_or_rounded_otherwise() -> None:
    for format in ("bfloat16", "float16"):
        assert said(onnx_says.check_activation, stage(format, BLOCKS, "float16", calibrated=False)) == ""
    for change in ({"real_zero": True}, {"rounding": "half_up"}):
        one = stage("int8", real_zero=change.get("real_zero", False))
        one.spec.rounding = change.get("rounding", "half_even")
        assert "real zero points and roundings" in said(onnx_says.check_activation, one)
    assert "of the rule" in said(onnx_says.check_activation, stage("e8m0", calibrated=False))


@pytest.mark.parametrize(("format", "calibrated", "words"), [
    ("mxfp4", False, ""), ("mxfp4", True, ""), ("nvfp4", True, ""), ("nvfp4", False, "must be static"),
    ("bfp16", False, ""), ("mx6", False, ""),
])  # fmt: skip
def test_blocks_of_activations(format: str, calibrated: bool, words: str) -> None:
    found = said(onnx_says.check_activation, stage(format, calibrated=calibrated))
    assert words in found and bool(words) == bool(found)
    long = stage(format, calibrated=calibrated)
    long.format = replace(long.format, size=WHOLE)
    assert "as long as an axis" in said(onnx_says.check_activation, long)


def constant(format: str, granularity: Any, shape: tuple[int, ...] = (64, 64), real_zero: bool = False) -> Any:
    return SimpleNamespace(
        element=FORMATS[format], granularity=granularity, shape=shape, stage=SimpleNamespace(real_zero=real_zero)
    )


PLAIN = (Tensor(), CHANNEL, GROUP, TURNED)


@pytest.mark.parametrize(("format", "granularity", "words"), [
    *((kind, one, "") for kind in ("int8", "uint8", "int4", "uint4", "int16") for one in PLAIN),
    *((kind, BLOCKS, "none of DequantizeLinear") for kind in ("int8", "int4", "int32")),
    ("int32", Tensor(), ""), ("int32", CHANNEL, ""), ("int32", GROUP, "more than 8 bits"),
    *(("fp8_e4m3", one, "") for one in (Tensor(), CHANNEL, GROUP, TURNED, BLOCKS)),
    *((kind, one, "") for kind in ("int3", "fp6_e2m3") for one in (*PLAIN[:3], Group(1, 32), Group(-1, 99))),
    ("e5m3", GROUP, ""),
    *(("int3", one, "whole groups along the last axis") for one in (TURNED, Group(-2, 32), Group(-1, 48))),
    ("int3", BLOCKS, "with scales"), ("fp6_e2m3", BLOCKS, "with scales"),
])  # fmt: skip
def test_scales_of_constants(format: str, granularity: Any, words: str) -> None:
    found = said(onnx_says.check_scales, constant(format, granularity))
    assert words in found and bool(words) == bool(found)
    assert "real zero points" in said(onnx_says.check_scales, constant(format, granularity, real_zero=True))


def test_only_constants_with_scales_of_their_own_are_asked_about_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(onnx_says, "check_scales", lambda name, layout: asked.append(layout))
    monkeypatch.setattr(onnx_says, "check_operator", lambda name, row: asked.append(row))

    class Element(onnx_says.ElementLayout):
        def __init__(self, needs_range: bool) -> None:
            object.__setattr__(self, "stage", SimpleNamespace(needs_range=needs_range))

    for layout in (Element(True), Element(False), SimpleNamespace(stage=SimpleNamespace(needs_range=True))):
        onnx_says.check_constant("x", layout)  # type: ignore[arg-type]
    assert [one.stage.needs_range for one in asked] == [True]
    pair = onnx_says.PairLayout(Element(False), Element(True))
    onnx_says.check_constant("x", pair)
    assert asked[1] is pair.second and len(asked) == 2
