"""Every data type on the real models: the task metric in float and quantized, and the size of the file.

    python -m benchmarks.formats [--models flowers5 ultraface stories] [--presets MXFP4E2M1 BFP16 ...] [--every 4]

Activations and weights are both in the data type, round to nearest, MinMax calibration where the type has a range; no
algorithm is used, so narrow types show what rounding alone costs. Needs the folder ``shared`` beside the repository.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quark.config.presets import PRESETS
from quark.onnx import Config, ModelQuantizer, get_default_config

SHARED = Path(__file__).parents[1] / ".." / "shared" / "data"
DEFAULT = (
    *("A8W8", "A8W8_CPU", "A16W8", "XINT8", "FP16", "BF16", "FP8E4M3", "FP8E5M2", "BFP16", "MX4", "MX6", "MX9"),
    *("MXINT8", "MXFP8E4M3", "MXFP8E5M2", "MXFP6E2M3", "MXFP6E3M2", "MXFP4E2M1"),
)


def examples() -> Any:
    """The loaders of the shared models."""
    sys.path.insert(0, str(SHARED))
    import load_examples

    return load_examples


def flowers_top1(loaders: Any, model: Path, every: int) -> dict[str, float]:
    """Top-1 of SqueezeNet on every so many-th test image."""
    session = loaders.open_session(model)
    images = itertools.islice(loaders.flower_images("test"), 0, None, every)
    hits = [session.run(None, {"data": loaders.caffe_input(im)})[0].argmax() == label for im, label in images]
    return {"top1": float(np.mean(hits))}


#: name -> (file, calibration feeds, number of samples, metrics shown)
MODELS: dict[str, tuple[str, str, int, tuple[str, ...]]] = {
    "flowers5": ("squeezenet11_flowers5.onnx", "calib_flowers5", 16, ("top1",)),
    "yolox_nano": ("yolox_nano.onnx", "calib_yolox_nano", 16, ("mAP50",)),
    "ultraface": ("ultraface_rfb320.onnx", "calib_ultraface", 16, ("AP50",)),
    "silero": ("silero_vad_16k_op15.onnx", "calib_silero", 100, ("accuracy", "auc")),
    "gtcrn": ("gtcrn_simple.onnx", "calib_gtcrn", 200, ("si_sdr_out",)),
    "stories": ("stories260K.onnx", "calib_stories", 8, ("perplexity", "next_token_accuracy")),
}


def metric_of(loaders: Any, name: str, every: int) -> Callable[[Path], dict[str, float]]:
    """The measurement of a model."""
    if name == "flowers5":
        return lambda model: flowers_top1(loaders, model, every)
    return lambda model: flattened(getattr(loaders, f"eval_{name}")(model))


def flattened(found: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a nested result, by dotted name."""
    numbers: dict[str, float] = {}
    for key, value in found.items():
        if isinstance(value, dict):
            numbers.update(flattened(value, f"{prefix}{key}."))
        elif isinstance(value, (int, float)):
            numbers[f"{prefix}{key}"] = float(value)
    return numbers


def rows_of(loaders: Any, name: str, presets: Sequence[str], every: int, folder: Path) -> Iterator[list[str]]:
    """One line per preset, float first."""
    file, calibration, samples, shown = MODELS[name]
    source, measure = SHARED / "models" / file, metric_of(loaders, name, every)
    feeds = list(itertools.islice(getattr(loaders, calibration)(), samples))
    yield [name, "float", text(measure(source), shown), "1.000", ""]
    for preset in presets:
        config = get_default_config(preset)
        config.extra_options["PrintSummary"] = False
        out, start = folder / f"{name}.onnx", time.perf_counter()
        ModelQuantizer(Config(config)).quantize_model(source, out, feeds)
        seconds = time.perf_counter() - start
        size = out.stat().st_size / source.stat().st_size
        yield [name, preset, text(measure(out), shown), f"{size:.3f}", f"{seconds:.1f}"]


def text(metrics: dict[str, float], shown: Sequence[str]) -> str:
    """The metrics that count, or all of them where none has such a name."""
    chosen = {key: value for key, value in metrics.items() if key.split(".")[-1] in shown} or metrics
    return ", ".join(f"{key} {value:.4g}" for key, value in chosen.items())


def main() -> None:
    """Print the table, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--presets", nargs="+", default=list(DEFAULT), choices=sorted(PRESETS))
    parser.add_argument("--every", type=int, default=4, help="use every so many-th test image of flowers5")
    arguments = parser.parse_args()
    print("| model | data type | metric | size over float | seconds |\n|---|---|---|---|---|", flush=True)
    loaders = examples()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            for row in rows_of(loaders, name, arguments.presets, arguments.every, Path(folder)):
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
