"""CPU seconds of whole processes on one core: a quantization from the command line against the bare inference.

    python -m benchmarks.whole_process [--methods XINT8 Entropy ...] [--samples 16] [--repeats 3] [--peers] [--check]

A user waits for the process, not for a call in it: imports, reading, calibration, writing and the run before the
result is published count. Every process is pinned to one core and gets one thread, repeats are interleaved, the
least CPU time counts (what else runs on the machine only adds). The bare process imports ONNX Runtime, opens a session
of the float model and runs the same samples; a ratio is that of one run on one machine. The run before the result is
published (the checker, a session, one or two inferences) is part of a process, and its seconds are shown apart.
So are, with --check, those of what is tried where the check finds the model not good, as it does on random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import measure, record
from benchmarks.measure import ROOT

BARE = "bare inference"
BARE_CODE = """
import sys, numpy, onnxruntime
from pathlib import Path
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
for path in sorted(Path(sys.argv[2]).glob("*.npy")):
    session.run(None, {session.get_inputs()[0].name: numpy.load(path)})
"""
PEER_CODE = """
import sys, numpy
from pathlib import Path
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static
class Reader(CalibrationDataReader):
    feeds = iter([{"images": numpy.load(path)} for path in sorted(Path(sys.argv[2]).glob("*.npy"))])
    def get_next(self):
        return next(self.feeds, None)
quantize_static(sys.argv[1], sys.argv[3], Reader(), calibrate_method=CalibrationMethod[sys.argv[4]],
                activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8)
"""
PEERS = {"ONNX Runtime, MinMax": "MinMax", "ONNX Runtime, Entropy": "Entropy", "ONNX Runtime, Percentile": "Percentile"}
RUN_CODE = """
import sys, time
from pathlib import Path
from quark.onnx import flow
output = sys.argv[3]
def timed(function, kind):
    def call(*given, **named):
        start = time.process_time()
        try:
            return function(*given, **named)
        finally:
            Path(output + kind).write_text(str(time.process_time() - start))
    return call
flow.first_run = timed(flow.first_run, ".run")
"""
PRESET_CODE = """
from quark.__main__ import run
if "--no-check" not in sys.argv:
    from quark.cli import quantization
    quantization.advise = timed(quantization.advise, ".tried")
sys.argv[1:] = ["onnx", "quantize", sys.argv[1], "--data", sys.argv[2], "-o", sys.argv[3], *sys.argv[4:]]
run()
"""
METHOD_CODE = """
import sys, numpy
from pathlib import Path
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
activations = UInt8Spec(calibration_method=CalibMethod[sys.argv[4]])
config = QConfig(global_config=QLayerConfig(input_tensors=activations, weight=Int8Spec()), target="cpu")
feeds = ({"images": numpy.load(path)} for path in sorted(Path(sys.argv[2]).glob("*.npy")))
ModelQuantizer(config).quantize_model(sys.argv[1], sys.argv[3], feeds)
"""
PRESETS = {"A8W8_CPU (MinMax)": "A8W8_CPU", "XINT8": "XINT8"}  # as the command line has them
METHODS = ("Percentile", "MinMSE", "LayerwisePercentile", "Entropy")  # uint8 and int8, from Python


@dataclass(frozen=True)
class Cost:
    """What one process took.

    Attributes:
        cpu: seconds of all its threads.
        wall: seconds.
        peak: most bytes ever resident.
        run: of ``cpu``, the run before the result is published.
        tried: of ``cpu``, what was tried because the result is not good.
    """

    cpu: float
    wall: float
    peak: int
    run: float = 0.0
    tried: float = 0.0


def cost_of(command: list[str], folder: str) -> Cost:
    """Run a process on one core, with one thread in every library.

    Raises:
        RuntimeError: it failed; its last words.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(folder) / "bytecode")}
    core = min(os.sched_getaffinity(0))
    start = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall = time.perf_counter() - start
        if child.returncode:
            said.seek(0)
            raise RuntimeError(said.read().decode(errors="replace")[-2000:])
    apart = [spent_in(Path(folder) / f"out.onnx.{kind}") for kind in ("run", "tried")]
    return Cost(used.ru_utime + used.ru_stime, wall, peak_of(used), *apart)


def spent_in(file: Path) -> float:
    """The seconds that a process left in a file, which is removed; 0 where there is none."""
    spent = float(file.read_text()) if file.is_file() else 0.0
    file.unlink(missing_ok=True)
    return spent


def peak_of(used: resource.struct_rusage) -> int:
    """Bytes; Linux counts kilobytes, macOS bytes."""
    return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def commands(folder: Path, chosen: list[str], peers: bool, check: bool) -> dict[str, list[str]]:
    """The command of every line of the table."""
    files = [str(folder / "model.onnx"), str(folder / "samples"), str(folder / "out.onnx")]
    found = {BARE: [sys.executable, "-c", BARE_CODE, *files]}
    for name, preset in PRESETS.items():
        words = ["-p", preset, "--overwrite", *([] if check else ["--no-check"])]
        found[name] = [sys.executable, "-c", RUN_CODE + PRESET_CODE, *files, *words]
    found |= {name: [sys.executable, "-c", RUN_CODE + METHOD_CODE, *files, name] for name in METHODS}
    for name, method in PEERS.items() if peers else ():
        found[name] = [sys.executable, "-c", PEER_CODE, *files, method]
    return {name: words for name, words in found.items() if name == BARE or name in (*chosen, *PEERS)}


WORK_CODE = """
import sys, numpy, onnx
from benchmarks import models
onnx.save(models.resnet(), sys.argv[1])
for number, feed in enumerate(models.random_images(models.Shape().image, int(sys.argv[3]), seed=1)):
    numpy.save(f"{sys.argv[2]}/{number:04}.npy", feed["images"])
"""


def write_work(folder: Path, samples: int) -> None:
    """A ResNet-50 and its samples, by a process of its own: a child's peak begins with its parent's."""
    (folder / "samples").mkdir()
    words = [str(folder / "model.onnx"), str(folder / "samples"), str(samples)]
    subprocess.run([sys.executable, "-c", WORK_CODE, *words], cwd=ROOT, check=True)


def measured(work: dict[str, list[str]], folder: str, repeats: int) -> dict[str, Cost]:
    """The cheapest of several runs of each, in rounds; the first round compiles, and is left out."""
    found: dict[str, list[Cost]] = {name: [] for name in work}
    for number in range(repeats + 1):
        for name, command in work.items():
            cost = cost_of(command, folder)
            if number:
                found[name].append(cost)
    return {name: min(costs, key=lambda cost: cost.cpu) for name, costs in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=(*PRESETS, *METHODS), default=[*PRESETS, *METHODS])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="also ONNX Runtime's quantize_static")
    parser.add_argument("--check", action="store_true", help="with the check after the quantization")
    parser.add_argument("--json", type=Path, help=record.HELP)
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        write_work(Path(name), chosen.samples)
        work = commands(Path(name), chosen.methods, chosen.peers, chosen.check)
        costs = measured(work, name, chosen.repeats)
    bare = costs[BARE]
    cells = [
        [
            name,
            f"{cost.cpu:.2f}",
            f"{cost.cpu / bare.cpu:.2f}",
            f"{cost.run:.2f}",
            f"{cost.tried:.2f}",
            f"{(cost.cpu - cost.run - cost.tried) / bare.cpu:.2f}",
            f"{cost.wall:.2f}",
            f"{cost.peak / 1e6:.0f}",
            f"{cost.peak / bare.peak:.2f}",
        ]
        for name, cost in costs.items()
    ]
    titles = [
        "process",
        "CPU s",
        "of bare",
        "first run s",
        "tried s",
        "without, of bare",
        "wall s",
        "peak MB",
        "of bare's",
    ]
    print(measure.table(titles, cells))
    if chosen.json:
        chosen.json.write_text(
            json.dumps({"processes": {name: asdict(cost) for name, cost in costs.items()}}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
