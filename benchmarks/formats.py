"""Every data type on the real models: the task metric in float and quantized, and the size of the file.

    python -m benchmarks.formats [--models flowers5 ultraface stories] [--types MXFP4E2M1 Int4 ...] [--every 4]

A type is a preset, or a spec class without its ``Spec``. Activations and weights are both in the data type (presets: as
they say), round to nearest, MinMax calibration where the type has a range; no algorithm is used, so narrow types show
what rounding alone costs. Needs the folder ``shared`` beside the repository.
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

import quark.onnx as q
from benchmarks import record
from quark.config.presets import PRESETS

SHARED = Path(__file__).parents[1] / ".." / "shared" / "data"
DEFAULT = (
    *("A8W8", "A8W8_CPU", "A16W8", "A8W4", "XINT8", "BF16_BFP16", "BF16_MXINT8", "MX9_INT8"),
    *("Int32", "UInt32", "Int16", "UInt16", "Int8", "UInt8", "Int4", "UInt4", "Int3", "UInt3", "Int2", "UInt2"),
    *("FP16", "BF16", "FP8E4M3", "FP8E5M2", "FP6E2M3", "FP6E3M2", "FP4E2M1"),
    *("BFP16", "MX9", "MX6", "MX4", "MXINT8", "MXFP8E4M3", "MXFP8E5M2", "MXFP6E2M3", "MXFP6E3M2", "MXFP4E2M1"),
    *("NVFP4", "AMDFP4", "AMDFP4G32"),
)


def configuration(name: str) -> q.Config | q.QConfig:
    """A preset, or both sides in the data type of a spec class."""
    if name in PRESETS:
        preset = q.get_default_config(name)
        preset.extra_options["PrintSummary"] = False
        return q.Config(preset)
    spec = getattr(q, f"{name}Spec")(calibration_method=q.CalibMethod.MinMax)
    layer = q.QLayerConfig(input_tensors=spec, weight=spec)
    return q.QConfig(layer, extra_options={"PrintSummary": False, "ForceQuantizeNoInputCheck": True})


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
    "silero": ("silero_vad_16k_op15.onnx", "calib_silero", 250, ("accuracy", "auc")),
    "gtcrn": ("gtcrn_simple.onnx", "calib_gtcrn", 250, ("si_sdr_out",)),
    "stories": ("stories260K.onnx", "calib_stories", 8, ("perplexity", "accuracy")),
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


def rows_of(loaders: Any, name: str, types: Sequence[str], every: int, folder: Path) -> Iterator[list[str]]:
    """One line per data type, float first."""
    file, calibration, samples, shown = MODELS[name]
    source, measure = SHARED / "models" / file, metric_of(loaders, name, every)
    feeds = list(itertools.islice(getattr(loaders, calibration)(), samples))
    yield [name, "float", text(measure(source), shown), "1.000", ""]
    for one in types:
        config, out, start = configuration(one), folder / f"{name}.onnx", time.perf_counter()
        q.ModelQuantizer(config).quantize_model(source, out, feeds)
        seconds = time.perf_counter() - start
        size = out.stat().st_size / source.stat().st_size
        yield [name, one, text(measure(out), shown), f"{size:.3f}", f"{seconds:.1f}"]


def text(metrics: dict[str, float], shown: Sequence[str]) -> str:
    """The metrics that count, or all of them where none has such a name."""
    chosen = {key: value for key, value in metrics.items() if key.split(".")[-1] in shown} or metrics
    return ", ".join(f"{key} {value:.4g}" for key, value in chosen.items())


def main() -> None:
    """Print the table, line by line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    known = sorted({*PRESETS, *(spec.removesuffix("Spec") for spec in q.__all__ if spec.endswith("Spec"))})
    parser.add_argument("--types", nargs="+", default=list(DEFAULT), choices=known, metavar="TYPE")
    parser.add_argument("--every", type=int, default=4, help="use every so many-th test image of flowers5")
    parser.add_argument("--json", type=Path, help=record.HELP)
    arguments = parser.parse_args()
    print("| model | data type | metric | size over float | seconds |\n|---|---|---|---|---|", flush=True)
    loaders = examples()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            for row in rows_of(loaders, name, arguments.types, arguments.every, Path(folder)):
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
