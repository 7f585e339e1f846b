"""A model that collapses says so: which layers, why, and what helps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tests.onnx_flow import models

from quark.numerics.elements import ELEMENTS, Int
from quark.onnx import Config, ModelQuantizer, diagnosis, get_default_config
from quark.onnx.compare import compare
from quark.onnx.diagnosis import of_model
from quark.onnx.flow import Result
from quark.onnx.graph.model import load
from quark.report.summary import weakness_table

GRAPH = """g (float[1,8,8,8] x) => (float[1,8,8,8] y) {
    [first] a = Conv<pads = [1,1,1,1]>(x, w) [depth] b = Conv<pads = [1,1,1,1], group = 8>(a, d)
    [last] y = Conv(b, v) }"""
SPREAD = np.exp2(-np.arange(8.0)).astype(np.float32).reshape(8, 1, 1, 1)
NORMAL = models.normal(8, 1, 3, 3, seed=2)
WEIGHTS = {
    "w": models.normal(8, 8, 3, 3, seed=1),
    "d": NORMAL / np.abs(NORMAL).max((1, 2, 3), keepdims=True) * SPREAD,
    "v": models.normal(8, 8, 1, 1, seed=3),
}


def quantized(preset: str, path: Path | None = None) -> Result:
    config = get_default_config(preset)
    config.include_cle = False  # it evens the channels out, which is a remedy of its own
    config.extra_options |= {"PrintSummary": False}
    proto = models.model(GRAPH, WEIGHTS)
    return ModelQuantizer(Config(config)).run(proto, path, [models.feeds(proto)])


@pytest.mark.parametrize("preset", ["A8W8", "XINT8"])
def test_a_depthwise_layer_of_unlike_channels_is_named_with_its_remedy(preset: str) -> None:
    [found] = quantized(preset).weak
    assert (found.node, found.op_type) == ("depth", "Conv")
    # the weakest of 8 channels is 2**-7 of the widest, which has 8 bits with its sign: 1 is left; a tenth is above it
    assert found.advice == "depthwise weights per tensor keep 2 of 8 bits; per channel keeps 8"
    assert found.sqnr < 30  # 8 bits give about 40


def test_the_remedy_helps() -> None:
    assert quantized("A8W8_PER_CHANNEL").weak == ()


def test_too_few_bits_are_another_cause() -> None:
    config = get_default_config("A8W4")
    config.extra_options |= {"PrintSummary": False}
    proto = models.model(GRAPH, WEIGHTS)
    weak = ModelQuantizer(Config(config)).run(proto, None, [models.feeds(proto)]).weak
    assert weak and all("4 bits leave" in one.advice and "exclude the node" in one.advice for one in weak)
    assert [one.sqnr for one in weak] == sorted(one.sqnr for one in weak)


def test_the_file_tells_the_same_as_the_plan() -> None:
    result = quantized("A8W8")
    assert result.proto is not None
    [stored], [planned] = of_model(ir.from_proto(result.proto)), result.weak
    assert (stored.node, stored.advice) == (planned.node, planned.advice)
    assert stored.sqnr == pytest.approx(planned.sqnr, abs=3)


@pytest.mark.parametrize("axis", [0, 1])
def test_scales_along_another_axis_say_nothing_of_the_channels(axis: int) -> None:
    codes = np.ones((8, 8, 1, 1), np.int8)
    codes[0, 0] = 127
    numbers = {"w": codes, "s": np.full(8, 0.01, np.float32), "z": np.zeros(8, np.int8)}
    text = f"""g (float[1,8,4,4] x) => (float[1,8,4,4] y) {{
        d = DequantizeLinear<axis = {axis}>(w, s, z) [layer] y = Conv(x, d) }}"""
    assert [one.node for one in of_model(load(models.model(text, numbers)))] == ["layer"][axis:]


@pytest.mark.parametrize("name", ["int2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32"])
@pytest.mark.parametrize("width", [0.3, 0.9, 1.0, 1.1, 3.0])
def test_weights_that_need_no_rounding_to_be_judged_lose_less_than_is_said(name: str, width: float) -> None:
    """Whatever the zero point, and where codes do not reach all values, too."""
    row, random = ELEMENTS[name], np.random.default_rng(0)
    assert isinstance(row, Int)
    zero = np.linspace(row.min, row.max, 9).astype(np.int64).repeat(2)
    scale = np.exp2(random.uniform(-20, 20, 18)).astype(np.float32)
    reach = np.minimum(row.max - zero, zero - row.min) * scale * width
    values = (random.uniform(-1, 1, (18, 500)) * np.maximum(reach, scale)[:, None]).astype(np.float32)
    weight = diagnosis.Weight(ir.node("Conv", []), values, scale, zero.astype(row.zero_dtype), row)
    most = diagnosis._most_noise(weight, scale, np.abs(values).max(1))
    assert (diagnosis._noise(weight, scale) <= most).all()
    assert np.isfinite(most).any() or row.bits not in (8, 16) or width > 1


def test_the_summary_has_the_worst_first_and_counts_the_rest() -> None:
    [found] = quantized("A8W8").weak
    table = weakness_table([found] * 12)
    assert len(table.rows) == 10 and table.note.startswith("2 more. A preset with _PER_CHANNEL has a scale per channel")
    assert table.rows[0][3] == found.advice


def test_a_comparison_gives_causes_beside_its_layers() -> None:
    proto = models.model(GRAPH, WEIGHTS)
    found = compare(proto, quantized("A8W8").proto, [models.feeds(proto)])  # type: ignore[arg-type]
    assert [one.node for one in found.weak] == ["depth"]
