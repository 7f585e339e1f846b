"""What comes back of a quantization: sizes and shares that hold, plain values, a page, a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from quark.demo import data
from quark.errors import ModelError
from quark.onnx import Config, ModelQuantizer, get_default_config


def quantizer(preset: str, **options: object) -> ModelQuantizer:
    config = get_default_config(preset)
    config.extra_options.update({"PrintSummary": False, **options})
    return ModelQuantizer(Config(global_quant_config=config))


def samples() -> list[dict[str, np.ndarray]]:
    return [{"image": image[None]} for image in data.split()[0][0][:12]]


def test_the_result_of_a_file_says_what_the_file_is(tmp_path: Path) -> None:
    one = quantizer("A8W8_CPU", EvalMetrics=True)
    assert one.result is None
    assert one.quantize_model(data.model_path(), tmp_path / "q.onnx", samples()) is None
    found = one.result
    assert found is not None and found.bytes == (tmp_path / "q.onnx").stat().st_size
    assert found.bytes_before == Path(data.model_path()).stat().st_size
    assert found.coverage is not None and found.coverage.integer > 0.95
    words = {line.subject: line.word for line in found.verdict.lines}
    assert words == {"accuracy": "good", "size": "smaller", "coverage": "quantized"}
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert read["bytes"]["quantized"] == found.bytes and read["verdict"]["accuracy"]["word"] == "good"
    assert read["nodes"]["quantized"] == sum(node.quantized for node in found.plan.nodes.values()) > 0
    assert found._repr_html_().count("<tr>") == 3 and repr(found) == "\n".join(found.verdict.words())
    page = found.save_report(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "q.onnx" in page and "coverage" in page


def test_the_result_of_a_model_in_memory_and_of_a_failure() -> None:
    one = quantizer("UINT8_DYNAMIC_QUANT")
    proto = one.quantize_model(onnx.load(data.model_path()))
    assert one.result is not None and proto is not None
    assert one.result.bytes_before is None and one.result.bytes == proto.ByteSize()
    assert "size" not in {line.subject for line in one.result.verdict.lines}
    with pytest.raises(ModelError):
        one.quantize_model("nowhere.onnx")
    assert one.result is None
