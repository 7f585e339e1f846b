"""How fast real models run once they are quantized: float, `A8W8_CPU`, and ONNX Runtime's own quantizer, taking turns.

    python -m benchmarks.latency                                  # every shared model, on one thread and on two
    python -m benchmarks.latency --models yolox_nano --rounds 40 --metrics
    python -m benchmarks.latency --peer-python PATH               # and AMD Quark's A8W8 from an environment of its own

Every model is quantized on the same samples by each. ONNX Runtime's: `quant_pre_process`, then `quantize_static` with
QDQ, uint8 activations and int8 weights per channel, MinMax. Inferences of one sample take turns; each block is thrown
away by its first. A ratio is the time of the float model over that of the quantized one, of the fastest inferences and
of the medians; noise of a shared machine is in the latter. The task metric (`--metrics`) is that of all labelled data.
Needs the folder `shared` beside the repository.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime

from benchmarks import measure, record
from benchmarks.formats import SHARED, examples
from benchmarks.peers.job import write_feeds
from quark.onnx import ModelQuantizer, QConfig

BLOCK = 4  # inferences of one model before the next has its turn; the first is thrown away
PER_CHANNEL = 13  # opset of scales per channel
#: Seconds before a block on several threads: those of the session before go on spinning, about 0.03 s, on the cores.
REST = 0.06
NOISE = 0.97  # ratio below which a model counts as slower


@dataclass(frozen=True)
class Case:
    """A model: the loader of its samples, how many of them, and what measures its task."""

    samples: Callable[[Any], Iterable[Mapping[str, np.ndarray]]]
    metric: Callable[[Any, Path], Any]


CASES = {
    "squeezenet11_flowers5": Case(lambda e: e.calib_flowers5(32), lambda e, path: e.eval_flowers5(path)),
    "yolox_nano": Case(lambda e: e.calib_yolox_nano(16), lambda e, path: e.eval_yolox_nano(path)),
    "ultraface_rfb320": Case(lambda e: e.calib_ultraface(32), lambda e, path: e.eval_ultraface(path)),
    "fastestdet": Case(lambda e: e.calib_fastestdet(32), lambda e, path: e.eval_fastestdet(path)),
    "gtcrn_simple": Case(lambda e: e.calib_gtcrn(60), lambda e, path: e.eval_gtcrn(path)),
    "dtln_1": Case(lambda e: e.calib_dtln(0, 60), lambda e, path: e.eval_dtln(path, part=0)),
    "dtln_2": Case(lambda e: e.calib_dtln(1, 60), lambda e, path: e.eval_dtln(path, part=1)),
    "silero_vad_16k_op15": Case(lambda e: e.calib_silero(60), lambda e, path: e.eval_silero(path)),
    "stories260K": Case(lambda e: e.calib_stories(16), lambda e, path: e.eval_stories(path)),
}


def variants(
    name: str, model: Path, feeds: list[dict[str, np.ndarray]], folder: Path, peer: str | None
) -> dict[str, Path]:
    """The files by who made them; what failed is told on standard error and left out."""
    found = {"float": model, "ours": folder / f"{name}.ours.onnx"}
    config = QConfig.get_default_config("A8W8_CPU")
    config.global_quant_config.extra_options.update(PrintSummary=False)
    ModelQuantizer(config).quantize_model(model, found["ours"], feeds)
    stored = folder / f"{name}.npz"
    write_feeds(stored, feeds)
    source = raised(model, folder)
    jobs = {"onnxruntime": ("onnxruntime_job", sys.executable)} | ({"amd": ("quark_job", peer)} if peer else {})
    for who, (job, python) in jobs.items():
        target = folder / f"{name}.{who}.onnx"
        values = {"model": str(source), "output": str(target), "feeds": str(stored), "method": "MinMax"}
        given = {"activation": "QUInt8", "weight": "QInt8", "per_channel": True, "symmetric": False, "preprocess": True}
        made = measure.run_job(job, values | (given if who == "onnxruntime" else {"preset": "A8W8"}), python)
        error = made.error if not made.ok else refused(target)
        if error:
            print(f"{name}: {who} fails: {error}", file=sys.stderr)
        else:
            found[who] = target
    return found


def raised(model: Path, folder: Path) -> Path:
    """The model at an opset that has scales per channel, which ONNX Runtime's quantizer does not see to."""
    proto = onnx.load(model)
    if max(one.version for one in proto.opset_import if not one.domain) >= PER_CHANNEL:
        return model
    target = folder / f"{model.stem}.raised.onnx"
    onnx.save(onnx.version_converter.convert_version(proto, PER_CHANNEL), target)
    return target


def refused(path: Path) -> str:
    """Why ONNX Runtime does not open a file; empty where it does."""
    try:
        session(path, 1)
    except Exception as error:  # noqa: BLE001  whatever it raises is what is asked for
        return str(error)[:200]
    return ""


def times(paths: Mapping[str, Path], feed: Mapping[str, np.ndarray], threads: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of the fastest inference of each file, and their median."""
    sessions = {who: session(path, threads) for who, path in paths.items()}
    seconds: dict[str, list[float]] = {who: [] for who in sessions}
    for _ in range(rounds):
        for who, one in sessions.items():
            time.sleep(REST if threads > 1 else 0.0)
            for k in range(BLOCK):
                start = time.perf_counter()
                one.run(None, dict(feed))
                if k:
                    seconds[who].append(time.perf_counter() - start)
    return {who: (1e3 * min(found), 1e3 * statistics.median(found)) for who, found in seconds.items()}


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """A default session on so many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def rows_of(told: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row a model and number of threads."""
    loaders, rows = examples(), []
    for name in told.models:
        case, model = CASES[name], SHARED / "models" / f"{name}.onnx"
        feeds = [dict(feed) for feed in islice(case.samples(loaders), told.samples)]
        paths = variants(name, model, feeds, folder, told.peer_python)
        metrics = {who: case.metric(loaders, path) for who, path in paths.items()} if told.metrics else {}
        for threads in told.threads:
            found = times(paths, feeds[0], threads, told.rounds)
            rows.append({"model": name, "threads": threads, "milliseconds": found, "metrics": metrics})
            print(f"{name}, {threads} threads: {found}", file=sys.stderr)
    return rows


def ratio(row: Mapping[str, Any], who: str, over: str = "float", kind: int = 0) -> float:
    """How many times as fast as ``over``; ``kind`` 0: the fastest inferences, 1: the medians."""
    found = row["milliseconds"]
    return found[over][kind] / found[who][kind] if who in found and over in found else math.nan


def table(rows: list[dict[str, Any]], threads: int) -> str:
    """The table of one number of threads, the geometric means at its end."""
    chosen = [row for row in rows if row["threads"] == threads]
    peers = [who for who in ("onnxruntime", "amd") if any(who in row["milliseconds"] for row in chosen)]
    heads = ["model", "float ms", "ours ×", "(median)", *(f"{who} ×" for who in peers), *(f"ours / {w}" for w in peers)]
    lines = []
    for row in chosen:
        own = [ratio(row, "ours"), ratio(row, "ours", kind=1)]
        others = [*(ratio(row, who) for who in peers), *(ratio(row, "ours", who) for who in peers)]
        figures = [row["milliseconds"]["float"][0], *own, *others]
        lines.append([row["model"], *(f"{one:.2f}" for one in figures)])
    means = [mean_of(ratio(row, who) for row in chosen) for who in ("ours", *peers)]
    last = [f"{one:.3f}" for one in means]
    lines.append(["geometric mean", "", last[0], "", *last[1:], *("" for _ in peers)])
    return f"{threads} thread{'s' if threads > 1 else ''}:\n\n{measure.table(heads, lines)}"


def mean_of(values: Iterable[float]) -> float:
    """The geometric mean of those that are known."""
    known = [math.log(value) for value in values if not math.isnan(value)]
    return math.exp(statistics.mean(known)) if known else math.nan


def metric_table(rows: list[dict[str, Any]]) -> str:
    """What each file reaches in the task."""
    first = {row["model"]: row["metrics"] for row in rows}
    names = list(dict.fromkeys(who for metrics in first.values() for who in metrics))
    lines = [[model, *(text_of(metrics.get(who)) for who in names)] for model, metrics in first.items()]
    return str(measure.table(["model", *names], lines))


def text_of(metric: Any) -> str:
    """A metric in a cell."""
    if not isinstance(metric, Mapping):
        return "–" if metric is None else f"{metric:.4g}"
    return ", ".join(f"{name} {value:.4g}" for name, value in metric.items() if isinstance(value, float))


def main() -> int:
    """Print the tables; models that are slower than float or than ONNX Runtime's quantizer are named at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--metrics", action="store_true", help="measure the tasks too (minutes)")
    parser.add_argument("--peer-python", help="Python of an environment with amd-quark")
    parser.add_argument("--json", type=Path, help=record.HELP)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(told, Path(folder))
    for threads in told.threads:
        print(table(rows, threads), end="\n\n")
    if told.metrics:
        print(metric_table(rows), end="\n\n")
    slower = [
        f"{row['model']} ({row['threads']} threads, over {over}: {ratio(row, 'ours', over):.2f})"
        for row in rows
        for over in ("float", "onnxruntime")
        if ratio(row, "ours", over) < NOISE
    ]
    print(f"slower than {NOISE}: {', '.join(slower) or 'none'}")
    if told.json:
        told.json.write_text(json.dumps({"rows": rows}, indent=1, default=str), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
