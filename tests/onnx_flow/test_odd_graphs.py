"""Odd graphs under every kind of configuration: a file that loads and answers right at every size, or a sentence."""

from __future__ import annotations

import copy
from pathlib import Path

import onnx
import pytest
from tests.onnx_flow.judged import configuration, judged
from tests.onnx_flow.odd_graphs import ODD
from tests.onnx_flow.test_free_sizes import false_statements

from quark.errors import ModelError
from quark.onnx import ModelQuantizer
from quark.onnx.graph import wire

INTEGERS = ("int8", "wide")
PRESETS = (
    "wide",
    "A8W8",
    "A8W8_CPU",
    "XINT8",
    "A16W8",
    "BF16",
    "BFP16",
    "MX9",
    "FP8E4M3",
    "UINT8_DYNAMIC_QUANT",
    "MATMUL_NBITS",
)
#: Whose refusal is right: the body of a Scan is computed row by row, and stays float.
SCAN = ("a_scan", "nothing in the model can be quantized")


def check(name: str, preset: str) -> None:
    model, feeds = ODD[name]()
    outcome = judged(model, feeds, preset)
    if outcome.word == "refused":  # nothing here suits the preset: no MatMul with a weight, no layer worth it
        assert "nothing in the model can be quantized" in outcome.why, outcome
        assert preset not in INTEGERS or name == SCAN[0]
    else:
        assert outcome.word == "ok", outcome


@pytest.mark.parametrize("name", ODD)
def test_integers_everywhere(name: str) -> None:
    check(name, "int8")


@pytest.mark.parametrize("name", [name for name in ODD if name.startswith("mask by")])
def test_a_mask_that_is_moved_stays_float(name: str) -> None:
    """No scale covers infinity, and presets for compilers quantize what only moves values, too."""
    for preset in ("A8W8", "UINT8_DYNAMIC_QUANT"):
        check(name, preset)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ODD)
def test_every_preset(name: str, preset: str) -> None:
    check(name, preset)


@pytest.mark.parametrize("name", ODD)
def test_where_the_weights_lie_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory, left in the model file, in external data: one result, to the byte, or one refusal."""
    monkeypatch.setattr(wire, "LARGE_FILE", 0)
    monkeypatch.setattr(wire, "LARGE", 16)
    proto, feeds = ODD[name]()
    outside = copy.deepcopy(proto)
    onnx.save(proto, tmp_path / "inside.onnx")
    onnx.save(outside, tmp_path / "outside.onnx", save_as_external_data=True, location="data", size_threshold=0)

    def outcome(source: onnx.ModelProto | Path) -> bytes | str:
        try:
            ModelQuantizer(configuration("A8W8")).quantize_model(source, tmp_path / "q.onnx", iter(feeds))
        except ModelError as error:
            return str(error)
        return (tmp_path / "q.onnx").read_bytes()

    expected = outcome(proto)
    assert outcome(tmp_path / "inside.onnx") == expected
    assert outcome(tmp_path / "outside.onnx") == expected


@pytest.mark.parametrize("name", ["shared_convolution", "optional_inputs", "opset 13", "opset 21"])
def test_what_is_stated_is_true_at_every_size(name: str) -> None:
    model, feeds = ODD[name]()
    for preset in ("A8W8", "XINT8"):
        made = ModelQuantizer(configuration(preset)).quantize_model(model, None, feeds[:1])
        assert made is not None
        assert [false_statements(made, feed) for feed in feeds] == [[]] * len(feeds)
