"""Accuracy of the ONNX flow on real models: float, rounding to nearest, every algorithm, the best recipe, in one run.

    python -m benchmarks.onnx_accuracy [--models yolox-xint8 ultraface ...] [--recipes nearest CE ...] [--steps 100]

Columns: `signal` is the SQNR of the outputs on the calibration samples (the worst output, dB): it needs no labels, and
recipes may be chosen by it. `A` and `B` are the metric on every other labelled image, `all` on all of them: what was
chosen by looking at A is reported on B. UltraFace has no labels (the float model's faces are the truth), and 36 of its
47 faces are in one picture, so its A are the 63 calibration views and B the 21 pictures themselves.

XINT8: power-of-two scales per tensor, NPU rules, `ConvertSigmoidToHardSigmoid=False`; detectors with `FloatDecoding`.
Needs the folder `shared` beside the repository. AdaRound and AdaQuant take minutes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import quark.onnx as q
from benchmarks import record
from benchmarks.formats import SHARED, examples
from quark.errors import QuarkError

Metric = Callable[[Path, str], float]
POWERS = q.QLayerConfig(q.XInt8Spec(), q.XInt8Spec())
CHANNELS = q.QLayerConfig(
    q.Int8Spec(calibration_method=q.CalibMethod.MinMax),
    q.Int8Spec(calibration_method=q.CalibMethod.MinMax, quant_granularity=q.QuantGranularity.Channel),
)
UNSIGNED = q.QLayerConfig(
    q.UInt8Spec(),
    q.Int8Spec(calibration_method=q.CalibMethod.MinMax, quant_granularity=q.QuantGranularity.Channel),
)
KEEP_SIGMOID = {"ConvertSigmoidToHardSigmoid": False}
DECODE = {"FloatDecoding": True}


@dataclass(frozen=True)
class Case:
    """A model in a format.

    Attributes:
        file: of the model.
        metric: name of its metric.
        calibration: loader of its samples, how many, how many of them fine-tuning takes.
        layer, options: the format.
        asked: what issue 7 asks for, as words.
        best: names of the algorithms of the recipe that was chosen; see docs/results/accuracy.md for how.
        extra: options of that recipe alone.
    """

    file: str
    metric: str
    calibration: tuple[str, int, int]
    layer: q.QLayerConfig
    options: dict[str, Any]
    asked: str
    best: tuple[str, ...]
    extra: dict[str, Any] = field(default_factory=dict)


CASES = {
    "squeezenet": Case(
        "squeezenet11_flowers5.onnx", "top-1", ("calib_flowers5", 32, 32), POWERS, {}, ">= 0.8525", ("AdaRound",)
    ),
    "yolox-xint8": Case(
        "yolox_nano.onnx",
        "mAP50",
        ("calib_yolox_nano", 16, 16),
        POWERS,
        KEEP_SIGMOID | DECODE,
        ">= 0.60",
        ("CE", "AdaRound"),
    ),
    "yolox-a8w8": Case(
        "yolox_nano.onnx", "mAP50", ("calib_yolox_nano", 16, 16), CHANNELS, DECODE, ">= 0.73", ("CE", "search")
    ),
    "yolox-u8": Case(
        "yolox_nano.onnx",
        "mAP50",
        ("calib_yolox_nano", 16, 16),
        UNSIGNED,
        DECODE | {"Percentile": 99.9},
        ">= 0.73",
        ("CE",),
    ),
    "ultraface": Case(
        "ultraface_rfb320.onnx",
        "AP50",
        ("calib_ultraface", 63, 63),
        POWERS,
        DECODE,
        ">= 0.85",
        ("AdaRound", "BC gain"),
        {"Int32Bias": True},
    ),
}


def algorithm(name: str, arguments: argparse.Namespace, samples: int) -> q.AlgoConfig:
    """One algorithm by its short name."""
    tuned = {"num_iterations": arguments.steps, "data_size": samples}
    made: dict[str, Callable[[], q.AlgoConfig]] = {
        "CLE": lambda: q.CLEConfig(keep_worse=False),
        "search": lambda: q.CalibrationSearchConfig(),
        "CE": lambda: q.ChannelEqualizationConfig(),
        "BiasCorrection": lambda: q.BiasCorrectionConfig(),
        "BC gain": lambda: q.BiasCorrectionConfig(gain=True),
        "AdaRound": lambda: q.AdaRoundConfig(**tuned),
        "AdaRound on float inputs": lambda: q.AdaRoundConfig(**tuned, drop_ratio=0.0),
        "AdaQuant": lambda: q.AdaQuantConfig(**tuned, learning_rate=1e-3),
    }
    return made[name]()


RECIPES = {
    "float": None,
    "nearest": (),
    "CLE": ("CLE",),
    "CE": ("CE",),
    "CE, search": ("CE", "search"),
    "BiasCorrection": ("BiasCorrection",),
    "AdaRound": ("AdaRound",),
    "AdaRound, BC gain": ("AdaRound", "BC gain"),
    "AdaRound on float inputs": ("AdaRound on float inputs",),
    "AdaQuant": ("AdaQuant",),
    "CE, AdaRound": ("CE", "AdaRound"),
    "best": (),
}


def metric_of(loaders: Any, case: Case) -> Metric:
    """The metric of a model's file on a part of the labelled data: A, B or all."""
    if case.metric == "top-1":
        return lambda path, part: _flowers(loaders, path, part)
    images = loaders.coco_images()
    parts = {"A": images[::2], "B": images[1::2], "all": images}
    if case.metric == "mAP50":
        return lambda path, part: float(loaders.eval_yolox_nano(path, images=parts[part])["mAP50"])
    views = [(view, None, None) for view in loaders.calib_images(63)]
    parts = {"A": views, "B": images, "all": images}
    return lambda path, part: float(loaders.eval_ultraface(path, images=parts[part])["AP50"])


def _flowers(loaders: Any, path: Path, part: str) -> float:
    session = loaders.open_session(path)
    start, step = {"A": (0, 2), "B": (1, 2), "all": (0, 1)}[part]
    images = itertools.islice(loaders.flower_images("test"), start, None, step)
    return float(np.mean([session.run(None, {"data": loaders.caffe_input(i)})[0].argmax() == k for i, k in images]))


def signal(loaders: Any, source: Path, path: Path, feeds: Sequence[dict[str, np.ndarray]]) -> float:
    """The SQNR of the worst output, dB."""
    sessions = loaders.open_session(source), loaders.open_session(path)
    noise, power = 0.0, 0.0
    for feed in feeds:
        x, y = (session.run(None, feed) for session in sessions)
        noise = noise + np.array([np.square(a - b, dtype=np.float64).sum() for a, b in zip(x, y, strict=True)])
        power = power + np.array([np.square(a, dtype=np.float64).sum() for a in x])
    return float((10 * np.log10(power / np.maximum(noise, 1e-300))).min())


def rows_of(loaders: Any, name: str, arguments: argparse.Namespace, folder: Path) -> Iterator[list[str]]:
    """One line per recipe."""
    case = CASES[name]
    source, measure = SHARED / "models" / case.file, metric_of(loaders, case)
    loader, samples, tuning = case.calibration
    feeds = list(itertools.islice(getattr(loaders, loader)(), samples))
    for recipe in arguments.recipes:
        names = case.best if recipe == "best" else RECIPES[recipe]
        start, path, shown = time.perf_counter(), folder / f"{name}.onnx", recipe
        if names is None:
            path = source
        else:
            shown += f" ({', '.join([*names, *case.extra]) or 'nearest'})" if recipe == "best" else ""
            options = {**case.options, **(case.extra if recipe == "best" else {})}
            try:
                algorithms = [algorithm(one, arguments, tuning) for one in names]
                quantize(source, path, feeds, case.layer, options, algorithms)
            except QuarkError as error:
                yield [name, shown, "-", "-", "-", "-", case.asked, str(error)[:80]]
                continue
        seconds = time.perf_counter() - start
        quality = "" if names is None else f"{signal(loaders, source, path, feeds):.2f}"
        scores = [f"{measure(path, part):.4f}" for part in ("A", "B", "all")]
        yield [f"{name}, {case.metric}", shown, quality, *scores, case.asked, f"{seconds:.0f}"]


def quantize(
    source: Path,
    path: Path,
    feeds: Sequence[dict[str, np.ndarray]],
    layer: q.QLayerConfig,
    options: dict[str, Any],
    algorithms: list[q.AlgoConfig],
) -> None:
    """One run of the quantizer."""
    options = {"PrintSummary": False, "ForceQuantizeNoInputCheck": True, **options}
    config = q.QConfig(layer, algo_config=algorithms, extra_options=options)
    q.ModelQuantizer(config).quantize_model(source, path, feeds)


def hard_sigmoid(loaders: Any, folder: Path) -> list[str]:
    """The float YOLOX with HardSigmoid in the place of Sigmoid: what XINT8 does to it before anything is quantized."""
    case = CASES["yolox-xint8"]
    source, measure, path = SHARED / "models" / case.file, metric_of(loaders, case), folder / "hard.onnx"
    model = onnx.load(source)
    for node in model.graph.node:
        if node.op_type == "Sigmoid":
            node.op_type = "HardSigmoid"
            node.attribute.extend([onnx.helper.make_attribute("alpha", 1 / 6), onnx.helper.make_attribute("beta", 0.5)])
    onnx.save(model, path)
    scores = [f"{measure(path, part):.4f}" for part in ("A", "B", "all")]
    return ["yolox, mAP50", "float, Sigmoid replaced by HardSigmoid", "", *scores, "reported", ""]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*CASES, "hard-sigmoid"], choices=[*CASES, "hard-sigmoid"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--steps", type=int, default=60, help="steps per layer of AdaRound and AdaQuant")
    parser.add_argument("--json", type=Path, help=record.HELP)
    arguments = parser.parse_args(argv)
    loaders = examples()
    header = ["model, metric", "recipe", "signal dB", "A", "B", "all", "asked (all)", "s"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            found = [hard_sigmoid(loaders, Path(folder))] if name == "hard-sigmoid" else None
            for row in found or rows_of(loaders, name, arguments, Path(folder)):
                print("| " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
