"""What the flow counts of the graph in memory against what is counted of the file that it wrote."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from tests.onnx_flow import models
from tests.onnx_flow.test_passes import ZOO

from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.coverage import coverage

PRESETS = ("A8W8_CPU", "XINT8")


def fixed(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model for two rows: every free size is 2."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    for value in (*made.graph.input, *made.graph.output):
        for size in value.type.tensor_type.shape.dim:
            if not size.HasField("dim_value"):
                size.dim_value = 2
    return made


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ZOO)
def test_the_graph_in_memory_counts_as_the_file_does(name: str, preset: str, tmp_path: Path) -> None:
    config = get_default_config(preset)
    config.extra_options["FloatWhereFaster"] = False
    quantizer = ModelQuantizer(Config(global_quant_config=config))
    for model in (ZOO[name], fixed(ZOO[name])):
        onnx.save(model, tmp_path / "model.onnx")
        samples = [models.feeds(model, seed) for seed in range(2)]
        result = quantizer.run(tmp_path / "model.onnx", tmp_path / "q.onnx", samples)
        found = coverage(tmp_path / "q.onnx")
        assert result.coverage == found
        assert result.counted in (found, None)
    assert result.counted is not None
