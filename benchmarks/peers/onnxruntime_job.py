"""Quantize one model with `onnxruntime.quantization.quantize_static`.

{"model", "output", "feeds", "method": "MinMax", "activation": "QInt8", "weight": "QInt8", "per_channel": false,
 "symmetric": true, "preprocess": false}
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks.peers.job import FileReader, main, measured, timed, version


def preprocessed(package: Any, job: dict[str, Any]) -> str:
    """The model after the preparation that its documentation recommends, in a file beside the output."""
    path = Path(job["output"]).with_suffix(".prepared.onnx")
    shape_inference = importlib.import_module("onnxruntime.quantization.shape_inference")
    shape_inference.quant_pre_process(job["model"], path, skip_symbolic_shape=True)
    return str(path)


def quantize(job: dict[str, Any]) -> dict[str, Any]:
    """Import, prepare where asked, then quantize; the preparation counts."""
    import_seconds, package = timed(lambda: importlib.import_module("onnxruntime.quantization"))

    def run() -> None:
        package.quantize_static(
            preprocessed(package, job) if job.get("preprocess") else job["model"],
            job["output"],
            FileReader(job["feeds"]),
            quant_format=package.QuantFormat.QDQ,
            calibrate_method=package.CalibrationMethod[job["method"]],
            activation_type=package.QuantType[job["activation"]],
            weight_type=package.QuantType[job["weight"]],
            per_channel=job.get("per_channel", False),
            extra_options={"ActivationSymmetric": job["symmetric"], "WeightSymmetric": True},
        )

    return {**measured(run), "import_seconds": import_seconds, "version": version("onnxruntime")}


if __name__ == "__main__":
    main(quantize)
