"""Peak memory of a model with external data: what ONNX Runtime needs to run it, and what each quantization needs.

    python -m benchmarks.large_model [--gigabytes 3.2]

A chain of MatMul and Relu with weights of 64 MB each is written to a temporary folder; every job runs in a process of
its own, whose peak resident memory (``ru_maxrss``, mapped files included) the system reports. The time is CPU time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import record
from benchmarks.measure import table

SIZE = 4096
JOBS = ("onnxruntime", "weights_only", "static_random", "nbits")


def write_model(path: Path, gigabytes: float) -> None:
    """A chain of square MatMuls; the weights are written one by one."""
    import onnx
    from onnx import TensorProto, helper

    count = max(1, round(gigabytes * 1e9 / (4 * SIZE * SIZE)))
    rng, data = np.random.default_rng(0), path.with_name("weights.bin")
    nodes, weights = [], []
    with data.open("wb") as file:
        for index in range(count):
            tensor = TensorProto(name=f"w{index}", dims=[SIZE, SIZE], data_type=TensorProto.FLOAT)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", data.name), ("offset", file.tell()), ("length", 4 * SIZE * SIZE)):
                tensor.external_data.add(key=key, value=str(value))
            file.write((rng.standard_normal((SIZE, SIZE), np.float32) / 64).tobytes())
            weights.append(tensor)
            source = "x" if index == 0 else f"r{index - 1}"
            nodes.append(helper.make_node("MatMul", [source, f"w{index}"], [f"m{index}"], name=f"matmul{index}"))
            nodes.append(helper.make_node("Relu", [f"m{index}"], [f"r{index}"], name=f"relu{index}"))
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, SIZE]) for name in ("x", f"r{count - 1}")]
    graph = helper.make_graph(nodes, "chain", shapes[:1], shapes[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def run_job(job: str, model: Path, output: Path) -> dict[str, float]:
    """One job in this process; its peak memory in GB and its processor seconds."""
    if job == "onnxruntime":
        import onnxruntime

        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        session.run(None, {"x": np.ones((1, SIZE), np.float32)})
    else:
        from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig

        options = {
            "weights_only": {"WeightsOnly": True},
            "static_random": {"UseRandomData": True},
            "nbits": {"UseMatMulNBits": True},
        }[job]
        layer = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
        config = QConfig(layer, use_external_data_format=True, extra_options={"PrintSummary": False, **options})
        ModelQuantizer(config).quantize_model(model, output)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"gigabytes": peak / 1e9, "cpu_seconds": time.process_time()}


def measure(gigabytes: float) -> dict[str, dict[str, float]]:
    """Every job in a process of its own."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.onnx"
        write_model(model, gigabytes)
        for job in JOBS:
            command = [sys.executable, "-m", "benchmarks.large_model", "--job", job, "--model", str(model)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[job] = json.loads(done.stdout.splitlines()[-1])
            for written in Path(folder).glob("quantized*"):
                written.unlink()
    return found


def main() -> None:
    """Measure, or run one job."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=3.2)
    parser.add_argument("--job", choices=JOBS)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path, help=record.HELP)
    given = parser.parse_args()
    if given.job:
        print(json.dumps(run_job(given.job, given.model, given.model.with_name("quantized.onnx"))))
        return
    found = measure(given.gigabytes)
    least = found["onnxruntime"]["gigabytes"]
    rows = [
        [job, f"{row['gigabytes']:.2f}", f"{row['gigabytes'] - least:+.2f}", f"{row['cpu_seconds']:.1f}"]
        for job, row in found.items()
    ]
    print(table(["job", "peak GB", "above ONNX Runtime's own, GB", "CPU s"], rows))


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
