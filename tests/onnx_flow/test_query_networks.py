"""Networks of transformers that choose among their own values are quantized as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.onnx_flow.query_networks import NETWORKS, SIDE, exported

from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.coverage import coverage


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("build", NETWORKS, ids=lambda build: build.__name__)
def test_nearly_all_multiplications_are_integer(build: Any, tmp_path: Path) -> None:
    model = exported(build, tmp_path / "float.onnx")
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options.update(PrintSummary=False)
    feed = {"pixels": np.random.default_rng(0).random((1, 3, SIDE, SIDE), np.float32)}
    made = ModelQuantizer(config).quantize_model(model, None, [feed])
    assert made is not None
    found = coverage(made, feed)
    assert found.integer >= 0.95
    assert found.stored >= 0.9
