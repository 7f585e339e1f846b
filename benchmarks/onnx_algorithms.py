"""Every algorithm of the ONNX flow against rounding to nearest at the same format, on every real model, in one run.

    python -m benchmarks.onnx_algorithms [--models NAME ...] [--formats XINT8 W4A8 ...] [--algorithms AdaRound ...]
        [--steps 60] [--json FILE]

Per row: the signal-to-noise ratio of every output on held-out samples, the lead over rounding to nearest on the output
that leads least, with the standard error of it over the samples (bootstrap, paired), and the task metric. Same
calibration samples for all rows of a model. XINT8: power-of-two scales per tensor, NPU rules; A8W8 and W4A8: int8
activations (MinMax, symmetric), int8 or int4 weights per channel; W4: int4 weights in groups of 32, float activations;
W4N: the same as MatMulNBits. Rows that the JSON file has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import quark.onnx as q
from benchmarks import models, record
from benchmarks.fidelity import LayerRuns, Score, judge, leads, prepare
from benchmarks.peers.job import read_feeds
from quark.errors import QuarkError

CHANNEL = q.QuantGranularity.Channel
MINMAX = q.CalibMethod.MinMax
INT8 = q.Int8Spec(calibration_method=MINMAX)
FORMATS = {
    "XINT8": q.QLayerConfig(q.XInt8Spec(), q.XInt8Spec()),
    "A8W8": q.QLayerConfig(INT8, q.Int8Spec(calibration_method=MINMAX, quant_granularity=CHANNEL)),
    "W4A8": q.QLayerConfig(INT8, q.Int4Spec(calibration_method=MINMAX, quant_granularity=CHANNEL)),
    "W4A4": q.QLayerConfig(
        q.Int4Spec(calibration_method=MINMAX), q.Int4Spec(calibration_method=MINMAX, quant_granularity=CHANNEL)
    ),
    "W4": q.QLayerConfig(INT8, q.Int4Spec(quant_granularity=q.QuantGranularity.Group, group_size=32)),
    "W4N": q.QLayerConfig(INT8, INT8),
}
OPTIONS: dict[str, dict[str, Any]] = {"W4": {"WeightsOnly": True}, "W4N": {"UseMatMulNBits": True}}
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "yolox_nano": {"ConvertSigmoidToHardSigmoid": False, "FloatDecoding": True},
    "ultraface_rfb320": {"FloatDecoding": True},
    "silero_vad": {"ConvertSigmoidToHardSigmoid": False},
    "gtcrn": {"ConvertSigmoidToHardSigmoid": False},
    "stories260K": {"ConvertSigmoidToHardSigmoid": False},
}
SAMPLES = {"squeezenet11_flowers5": 32, "yolox_nano": 16, "silero_vad": 128, "gtcrn": 128, "stories260K": 32}
HELD_OUT = 128
HEAD = "| model | format | algorithm | SQNR dB | lead dB | metrics | s |\n" + 7 * "|---" + "|"


def algorithms(steps: int) -> dict[str, tuple[q.AlgoConfig, ...]]:
    """Every row: its name and its ``algo_config``."""
    tuned: dict[str, Any] = {"num_iterations": steps}
    rows: dict[str, tuple[q.AlgoConfig, ...]] = {
        "nearest": (),
        "CLE": (q.CLEConfig(keep_worse=False),),
        "CE": (q.ChannelEqualizationConfig(),),
        "BiasCorrection": (q.BiasCorrectionConfig(),),
        "BC gain": (q.BiasCorrectionConfig(gain=True),),
        "SmoothQuant": (q.SmoothQuantConfig(),),
        "AWQ": (q.AWQConfig(),),
        "QuaRot": (q.QuarotConfig(),),
        "SVDQuant": (q.SVDQuantConfig(svd_rank=8, min_layer_size=32),),
        "GPTQ": (q.GPTQConfig(),),
        "GPTAQ": (q.GPTAQConfig(),),
        "Qronos": (q.QronosConfig(),),
        "HQQ": (),
        "AdaRound": (q.AdaRoundConfig(**tuned),),
        "AdaQuant": (q.AdaQuantConfig(**tuned, learning_rate=1e-3),),
        "AutoRound": (q.AutoRoundConfig(**tuned, learning_rate=0.01),),
        "AdaRound, BC gain": (q.AdaRoundConfig(**tuned), q.BiasCorrectionConfig(gain=True)),
    }
    return rows


COLUMNWISE = ("GPTQ", "GPTAQ", "Qronos")
LINEAR = ("SmoothQuant", "AWQ", "QuaRot", "SVDQuant", *COLUMNWISE, "HQQ")
CONVOLUTIONS = ("CLE", "CE", "BiasCorrection", "BC gain", "AdaRound, BC gain")


@dataclass(frozen=True)
class Row:
    """One algorithm on one model in one format."""

    model: str
    format: str
    algorithm: str
    score: Score


def makes_sense(model: str, format: str, name: str) -> bool:
    """Whether a row is run: an algorithm needs the layers that it works on."""
    language = model == "stories260K"
    if format in ("W4", "W4N"):
        some = {
            "W4": ("nearest", "SmoothQuant", "AWQ", "SVDQuant", *COLUMNWISE, "AdaRound", "AdaQuant", "AutoRound"),
            "W4N": ("nearest", "SmoothQuant", "AWQ", "SVDQuant", *COLUMNWISE, "HQQ"),
        }
        allowed = some[format]
        return language and name in allowed
    if name == "HQQ":
        return False
    return name not in CONVOLUTIONS if language else name not in LINEAR


def made(bench: LayerRuns, format: str, name: str, run: argparse.Namespace) -> Score:
    """Quantize and judge; what is refused is a row too."""
    samples = SAMPLES.get(bench.example.name, 63)
    feeds = list(read_feeds(bench.feeds))
    count = min(samples, len(feeds))
    feeds = [feeds[k * len(feeds) // count] for k in range(count)]  # spread: the first second of a sound may be silence
    options = {"PrintSummary": False, "ForceQuantizeNoInputCheck": True, **OPTIONS.get(format, {})}
    options |= MODEL_OPTIONS.get(bench.example.name, {})
    if format == "W4N":
        kind = "GPTQ" if name in COLUMNWISE else name if name == "HQQ" else "DEFAULT"
        options["MatMulNBitsParams"] = {"Algorithm": kind, "GroupSize": 32, "Bits": 4, "Symmetric": False}
    chosen = algorithms(run.steps)[name]
    config = q.QConfig(FORMATS[format], algo_config=list(chosen), extra_options=options)
    path = bench.folder / f"{bench.example.name}_{format}_{name}.onnx"
    start = time.process_time()
    try:
        q.ModelQuantizer(config).quantize_model(bench.example.path, path, feeds)
    except QuarkError as error:
        return Score(error=str(error)[:120])
    seconds = time.process_time() - start
    found = judge(bench, path, with_metrics=True)
    path.unlink()
    return replace(found, seconds=seconds)


def cells(row: Row, nearest: Score) -> str:
    """One line of the table."""
    score = row.score
    if score.error is not None:
        return f"| {row.model} | {row.format} | {row.algorithm} | refused: {score.error} | | | |"
    quality = " / ".join(f"{value:.2f}" for value in score.sqnr.values())
    lead = min(leads(score, [nearest]), key=lambda one: one.decibels) if row.algorithm != "nearest" else None
    shown = "" if lead is None else f"{lead.decibels:+.2f} ± {lead.error:.2f}"
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in score.metrics.items())
    return f"| {row.model} | {row.format} | {row.algorithm} | {quality} | {shown} | {metrics} | {score.seconds:.0f} |"


def stored(path: Path | None) -> dict[tuple[str, str, str], Row]:
    """The rows that a JSON file has."""
    rows = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    found = [Row(**{**row, "score": Score(**row["score"])}) for row in rows]
    return {(row.model, row.format, row.algorithm): row for row in found}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="short names; all by default")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--algorithms", nargs="+", default=list(algorithms(1)), choices=list(algorithms(1)))
    parser.add_argument("--steps", type=int, default=60, help="steps per layer of AdaRound and AdaQuant")
    parser.add_argument("--json", type=Path, help="write the figures to this file too, and go on from it")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, line by line."""
    run = parse(argv)
    rows = stored(run.json)
    say: Callable[[str], None] = lambda line: print(line, flush=True)  # noqa: E731
    say(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        for example in models.real_examples():
            if run.models and example.name not in run.models:
                continue
            short = replace(example, held_out=lambda example=example: islice(example.held_out(), HELD_OUT))
            bench = prepare(short, Path(folder))
            for format in run.formats:
                names = [name for name in run.algorithms if makes_sense(example.name, format, name)]
                for name in dict.fromkeys(["nearest", *names] if names else []):
                    key = (example.name, format, name)
                    if key not in rows:
                        rows[key] = Row(*key, made(bench, format, name, run))
                    say(cells(rows[key], rows[(example.name, format, "nearest")].score))
                    if run.json:
                        run.json.write_text(json.dumps({"rows": [asdict(row) for row in rows.values()]}))
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
