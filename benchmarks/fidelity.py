"""How close the quantized models stay to the float ones, ours beside two peers, from the same calibration data.

    python -m benchmarks.fidelity [--peer-python PATH] [--models NAME ...] [--configs NAME ...] [--cache FOLDER]

Signal-to-noise ratio of each output over all held-out samples, 10 log10(sum x^2 / sum (x - x_quantized)^2), and each
model's task metric, at the same data types and calibration method. "Never worse" asks of every output to stay within
0.1 dB of the better peer. Two models that differ in nothing but the last bit of their scales already differ by a few
tenths of a decibel on a small set, so a lead comes with its standard error (bootstrap over samples, paired), and a
deficit within two of them is called "level". A peer gets its best of several chances: the model as it is, lifted to
opset 13, prepared as its documentation recommends. `--cache` keeps the peers' results and every quantized model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import version_converter

from benchmarks import measure, models, record
from benchmarks.models import Example
from benchmarks.peers.float_job import open_session
from benchmarks.peers.job import Feeds, write_feeds

TOLERANCE_DB = 0.1
CEILING_DB = 150.0
DRAWS = 400
Noise = dict[str, list[float]]
OURS, ONNXRUNTIME, QUARK = "ours", "onnxruntime", "AMD Quark"


@dataclass(frozen=True)
class Config:
    """Data types and calibration method, in the terms of each package.

    Attributes:
        inputs: spec of activations in the `quark` interface.
        weight: spec of weights there.
        onnxruntime: arguments of its job; None where it cannot express this.
        options: our `extra_options`.
        peer_options: `extra_options` of the peer that mean the same.
    """

    inputs: dict[str, str]
    weight: dict[str, str]
    onnxruntime: dict[str, Any] | None
    options: dict[str, Any] = field(default_factory=dict)
    peer_options: dict[str, Any] = field(default_factory=dict)


def spec(name: str, method: str, **fields: str) -> dict[str, str]:
    """A spec of the `quark` interface as the jobs read it."""
    return {"spec": name, "calibration_method": method, **fields}


INT8 = {"activation": "QInt8", "weight": "QInt8", "symmetric": True}
XINT8 = spec("XInt8Spec", "MinMSE")
CONFIGS = {
    "int8-minmax": Config(spec("Int8Spec", "MinMax"), spec("Int8Spec", "MinMax"), {**INT8, "method": "MinMax"}),
    "int8-percentile": Config(
        spec("Int8Spec", "Percentile"), spec("Int8Spec", "Percentile"), {**INT8, "method": "Percentile"}
    ),
    "uint8-channel-minmax": Config(
        spec("UInt8Spec", "MinMax"),
        spec("Int8Spec", "MinMax", quant_granularity="Channel"),
        {"activation": "QUInt8", "weight": "QInt8", "symmetric": False, "per_channel": True, "method": "MinMax"},
    ),
    "xint8-mse": Config(XINT8, XINT8, None, {"EnableNPUCnn": False}, {"EnableNPUCnn": False}),
    "xint8-mse-npu": Config(XINT8, XINT8, None),
    "int16-int8-minmax": Config(
        spec("Int16Spec", "MinMax"), spec("Int8Spec", "MinMax"), {**INT8, "activation": "QInt16", "method": "MinMax"}
    ),
}


@dataclass(frozen=True)
class Score:
    """What one tool reached on one model with one configuration.

    Attributes:
        sqnr: dB by output name.
        noise: energy of the error of each sample, by output name.
        metrics: task metrics by name.
        variant: which of the tool's chances this is.
        seconds: wall time of its call.
        error: why there is no result; None when there is.
    """

    sqnr: dict[str, float] = field(default_factory=dict)
    noise: dict[str, list[float]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    variant: str = ""
    seconds: float | None = None
    error: str | None = None

    @property
    def mean_sqnr(self) -> float:
        """Mean over the outputs; below every real one where there is no result."""
        return float(np.mean(list(self.sqnr.values()))) if self.sqnr else -np.inf


@dataclass(frozen=True)
class LayerRuns:
    """A model ready to be quantized and judged: its files, and its float outputs on held-out data."""

    example: Example
    folder: Path
    feeds: Path
    held_out: list[Feeds]
    reference: list[list[np.ndarray]]

    def models(self) -> dict[str, Path]:
        """The float model, and the same lifted to opset 13 where it is older and the converter can."""
        found, lifted = {"as is": self.example.path}, self.folder / f"{self.example.name}.lifted.onnx"
        model = onnx.load(self.example.path)
        if opset(model) >= 13:
            return found
        if not lifted.exists():
            onnx.save(version_converter.convert_version(model, 13), lifted)
        return {**found, "lifted": lifted}


def opset(model: onnx.ModelProto) -> int:
    """Version of the standard operators."""
    return next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def prepare(example: Example, folder: Path) -> LayerRuns:
    """Store the calibration feeds and run the float model on the held-out ones."""
    feeds, held_out = folder / f"{example.name}.feeds.npz", list(example.held_out())
    write_feeds(feeds, list(example.calibration()))
    return LayerRuns(example, folder, feeds, held_out, outputs(example.path, held_out))


def outputs(path: Path, feeds: Iterable[Feeds]) -> list[list[np.ndarray]]:
    """Outputs of a model for each sample."""
    session = open_session(str(path))
    return [session.run(None, feed) for feed in feeds]


def energies(
    names: Sequence[str], samples: list[list[np.ndarray]], others: list[list[np.ndarray]] | None = None
) -> Noise:
    """Energy of each sample, or of its difference to another's, by output name."""
    found: Noise = {}
    for k, name in enumerate(names):
        pairs = [(sample[k], 0.0 if others is None else others[n][k]) for n, sample in enumerate(samples)]
        found[name] = [float(np.square(np.subtract(one, other, dtype=np.float64)).sum()) for one, other in pairs]
    return found


def ratio(signal: Sequence[float], noise: Sequence[float]) -> float:
    """10 log10 of the sums' ratio, within CEILING_DB on both sides; the lower end where the noise is not finite."""
    total, error = sum(signal), sum(noise)
    if not np.isfinite(error) or total <= 0:
        return -CEILING_DB
    return float(np.clip(10 * np.log10(total / max(error, total * 1e-15)), -CEILING_DB, CEILING_DB))


def judge(bench: LayerRuns, path: Path, with_metrics: bool) -> Score:
    """The score of a quantized model on stock ONNX Runtime."""
    names = [output.name for output in open_session(str(bench.example.path)).get_outputs()]
    noise = energies(names, bench.reference, outputs(path, bench.held_out))
    signal = energies(names, bench.reference)
    metrics = bench.example.metrics(path) if with_metrics and bench.example.metrics else {}
    return Score({name: ratio(signal[name], noise[name]) for name in names}, noise, metrics)


def attempts(bench: LayerRuns, config: Config, tool: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """variant -> (job module, job) of a tool; ours has one chance, the model as it is."""
    layer: dict[str, Any] = {"inputs": config.inputs, "weight": config.weight}
    if tool == OURS:
        return {"as is": ("quark_job", {"model": str(bench.example.path), "options": config.options, **layer})}
    if tool == QUARK:
        layer = {**layer, "options": config.peer_options}
        return {name: ("quark_job", {"model": str(path), **layer}) for name, path in bench.models().items()}
    if config.onnxruntime is None:
        return {}
    lifted = str(list(bench.models().values())[-1])
    plain: dict[str, dict[str, Any]] = {name: {"model": str(path)} for name, path in bench.models().items()}
    chances = {**plain, "prepared": {"model": lifted, "preprocess": True}}
    return {name: ("onnxruntime_job", {**config.onnxruntime, **chance}) for name, chance in chances.items()}


def attempt(
    bench: LayerRuns, key: str, variant: str, task: tuple[str, dict[str, Any]], run: argparse.Namespace
) -> Score:
    """Quantize, unless the cache has a peer's file, and judge; whatever goes wrong in a peer's file is its result."""
    module, job = task
    output = bench.folder / f"{bench.example.name}__{key}__{variant.replace(' ', '_')}.onnx"
    seconds = None
    if key.endswith(OURS) or run.refresh or not output.exists():
        output.unlink(missing_ok=True)
        python = run.peer_python if QUARK in key else sys.executable
        outcome = measure.run_job(
            module, {**job, "feeds": str(bench.feeds), "output": str(output)}, python, run.timeout
        )
        if not outcome.ok:
            return Score(variant=variant, error=outcome.error)
        seconds = outcome.seconds
    try:
        return replace(judge(bench, output, run.metrics), variant=variant, seconds=seconds)
    except Exception as error:  # noqa: BLE001  (a file that does not load or run is a finding, not an end)
        return Score(variant=variant, seconds=seconds, error=f"unusable file: {str(error)[:300]}")


def score(bench: LayerRuns, name: str, tool: str, run: argparse.Namespace) -> Score:
    """The best of a tool's chances; a peer's is read from the cache where it is there."""
    cached = bench.folder / f"{bench.example.name}__{name}__{tool}.json"
    if tool != OURS and cached.exists() and not run.refresh:
        return Score(**json.loads(cached.read_text()))
    tasks = attempts(bench, CONFIGS[name], tool)
    tried = [attempt(bench, f"{name}__{tool}", variant, task, run) for variant, task in tasks.items()]
    best = max(tried, key=lambda one: one.mean_sqnr, default=Score(error="has no such method"))
    cached.write_text(json.dumps(asdict(best), indent=1))
    return best


@dataclass(frozen=True)
class Lead:
    """Ours against the better peer on one output, in dB, with the standard error of the difference."""

    output: str
    decibels: float
    error: float

    @property
    def verdict(self) -> str:
        """What the lead says."""
        if self.decibels >= -TOLERANCE_DB:
            return "never worse"
        return "level" if self.decibels + 2 * self.error >= -TOLERANCE_DB else "WORSE"


def leads(ours: Score, peers: Sequence[Score]) -> list[Lead]:
    """Our lead on every output, against the peer that is better there; empty where there is nothing to compare."""
    rivals = [peer for peer in peers if peer.sqnr]
    found = []
    for name, value in ours.sqnr.items() if rivals else ():
        best = max(rivals, key=lambda peer: peer.sqnr[name])
        error = paired_error(ours.noise.get(name, []), best.noise.get(name, []))
        found.append(Lead(name, value - best.sqnr[name], error))
    return found


def paired_error(ours: Sequence[float], other: Sequence[float]) -> float:
    """Standard error in dB of the difference of two signal-to-noise ratios over the same samples, by bootstrap."""
    both = np.array([ours, other])
    if both.shape[1] < 2 or not np.isfinite(both).all() or not both.sum(1).all():
        return 0.0
    random = np.random.default_rng(0)
    sums = both[:, random.integers(0, both.shape[1], (DRAWS, both.shape[1]))].sum(-1)
    return float(np.std(10 * np.log10(np.maximum(sums[1], 1e-300) / np.maximum(sums[0], 1e-300))))


def verdict(ours: Score, peers: Sequence[Score]) -> str:
    """Whether ours is never worse: the word of the output where it stands worst."""
    found = leads(ours, peers)
    if not found:
        return "fails" if ours.error else "no rival"
    order = ("WORSE", "level", "never worse")
    worst = min(found, key=lambda lead: (order.index(lead.verdict), lead.decibels))
    return f"{worst.verdict} ({worst.decibels:+.2f} ± {worst.error:.2f} dB)"


def cell(found: Score) -> str:
    """dB by output and the metrics, or why there are none."""
    if found.error:
        return found.error if found.error.startswith("has no") else f"fails: {found.error[:90]}"
    ratios = " / ".join(f"{value:.2f}" for value in found.sqnr.values())
    return f"{ratios} dB" + "".join(f"; {name} {value:.3f}" for name, value in found.metrics.items())


def compare(bench: LayerRuns, run: argparse.Namespace) -> list[dict[str, Any]]:
    """One line per configuration."""
    reference = bench.example.metrics(bench.example.path) if run.metrics and bench.example.metrics else {}
    lines = []
    for name in run.configs:
        print(f"running: {bench.example.name} {name}", file=sys.stderr)
        scores = {tool: score(bench, name, tool, run) for tool in run.tools}
        peers = [found for tool, found in scores.items() if tool != OURS]
        judged = verdict(scores[OURS], peers) if OURS in scores else ""
        plain = {tool: asdict(found) for tool, found in scores.items()}
        lines.append({"model": bench.example.name, "config": name, "float": reference, **plain, "verdict": judged})
        print("  " + " | ".join(cells(lines[-1], run.tools)), file=sys.stderr)
    return lines


def cells(line: dict[str, Any], tools: Sequence[str]) -> list[str]:
    """One line of the table."""
    reference = "; ".join(f"{name} {value:.3f}" for name, value in line["float"].items())
    return [line["model"], line["config"], reference, *[cell(Score(**line[tool])) for tool in tools], line["verdict"]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--peer-python", help="interpreter of an environment that holds AMD Quark")
    parser.add_argument("--data", type=Path, default=models.DATA, help="folder of the real models")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these; `toy` is a tiny network")
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), metavar="NAME")
    parser.add_argument("--tools", nargs="+", choices=[OURS, ONNXRUNTIME, QUARK], metavar="NAME")
    parser.add_argument("--cache", type=Path, help="keep peers' results and all quantized models here")
    parser.add_argument("--refresh", action="store_true", help="run the peers even where the cache has them")
    parser.add_argument("--no-metrics", dest="metrics", action="store_false", help="only signal-to-noise ratios")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for one quantization")
    parser.add_argument("--json", type=Path, help=record.HELP)
    arguments = parser.parse_args(argv)
    arguments.tools = arguments.tools or [OURS, ONNXRUNTIME, *([QUARK] if arguments.peer_python else [])]
    return arguments


def examples(run: argparse.Namespace, folder: Path) -> list[Example]:
    """The models that were asked for; all but the toy where none is named."""
    wanted = run.models or ["resnet50", *(example.name for example in models.real_examples(run.data))]
    built = {"toy": models.TOY, "resnet50": models.Shape()}
    found = [models.resnet_example(folder, shape, name) for name, shape in built.items() if name in wanted]
    return found + [example for example in models.real_examples(run.data) if example.name in wanted]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0 when ours is never worse and never fails, 1 otherwise."""
    run, machine = parse(argv), measure.machine()
    print(measure.machine_line(machine), end="\n\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder = run.cache or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [line for example in examples(run, folder) for line in compare(prepare(example, folder), run)]
    headers = ["model", "configuration", "float", *run.tools, "verdict"]
    print(measure.table(headers, [cells(line, run.tools) for line in lines]))
    if run.json:
        run.json.write_text(json.dumps({"machine": machine, "lines": lines}, indent=1))
    return 1 if any(line["verdict"].startswith(("WORSE", "fails")) for line in lines) else 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
