"""A model of 3.2 GB with external data: how much memory a quantization needs beside ONNX Runtime itself."""

from __future__ import annotations

import sys

import pytest

#: Gigabytes that a quantization may need above what ONNX Runtime needs to run the model.
ABOVE = 0.8


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="the system does not tell the peak there")
def test_weights_stream() -> None:
    from benchmarks.large_model import JOBS, measure

    found = measure(3.2)
    least = found["onnxruntime"]["gigabytes"]
    assert least > 3.2, "the model does not fit into the runtime without its weights"
    for job in JOBS[1:]:
        assert found[job]["gigabytes"] < least + ABOVE, job
