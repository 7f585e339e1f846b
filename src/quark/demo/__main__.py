"""``python -m quark.demo``: quantize a trained network three ways and say what each cost and won."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from quark.dataclass import dataclass
from quark.demo import data
from quark.errors import QuarkError
from quark.files.outputs import Output, check_outputs
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.auto import auto
from quark.onnx.causes import causes, with_causes
from quark.onnx.compare import ENDS, Comparison, compare
from quark.onnx.coverage import coverage
from quark.onnx.describe import file_bytes
from quark.onnx.examples import examples
from quark.onnx.graph.session import quiet_options
from quark.onnx.latency import quiet_seconds
from quark.onnx.page import model_view
from quark.onnx.page import page as report_of
from quark.onnx.trials import OnnxGoal
from quark.report import Report, Table, decibels, file_size, milliseconds, print_table
from quark.report.html import write_html
from quark.report.verdict import Verdict, accuracy_line, coverage_line, size_line, speed_line, worst
from quark.search.parts import split

PRESETS = {
    "A8W8": "int8 × int8, float scales",
    "XINT8": "8 × 8 bits, power-of-two scales",
    "A8W8_CPU": "uint8 × int8 per channel, for CPUs",
}
CALIBRATION = 128
BATCH = 50
FEW = 10  # images that single layers are measured on
TRIED, SECONDS = 32, 5.0  # samples and time for quark auto


@dataclass(frozen=True)
class DemoRow:
    """What one quantization made and how good it is."""

    preset: str
    path: Path
    seconds: float
    top1: float
    sqnr: float


def quantize(preset: str, calibration: np.ndarray, folder: Path) -> tuple[Path, float]:
    """Write the quantized model into ``folder``; returns its path and the seconds it took."""
    path = folder / f"digits_{preset}.onnx"
    config = get_default_config(preset)
    config.print_summary = False
    start = time.perf_counter()
    quantizer = ModelQuantizer(Config(global_quant_config=config))
    quantizer.quantize_model(data.model_path(), path, data.Reader(calibration))
    return path, time.perf_counter() - start


def top1(path: Path, inputs: np.ndarray, labels: np.ndarray) -> float:
    """Share of the images whose largest logit is the right digit."""
    session = onnxruntime.InferenceSession(path, quiet_options(), providers=["CPUExecutionProvider"])
    logits = np.concatenate([session.run(None, feed)[0] for feed in batches(inputs)])
    return float((logits.argmax(axis=1) == labels).mean())


def batches(inputs: np.ndarray) -> list[dict[str, np.ndarray]]:
    """The inputs as feeds."""
    return [{data.INPUT: inputs[start : start + BATCH]} for start in range(0, len(inputs), BATCH)]


def measure(preset: str, folder: Path) -> DemoRow:
    """Quantize with one preset; measure on the held-out images."""
    (train, _), (inputs, labels) = data.split()
    path, seconds = quantize(preset, train[:CALIBRATION], folder)
    distance = compare(data.model_path(), path, batches(inputs), ENDS).outputs["logits"]
    return DemoRow(preset, path, seconds, top1(path, inputs, labels), distance.sqnr)


def table(outcomes: Sequence[DemoRow], seconds: dict[str, float], accuracy: float) -> Table:
    """One row a model."""
    float_row = ("float", percent(accuracy), file_size(file_bytes(data.model_path())), milliseconds(seconds["float"]))
    rows = [
        (
            one.preset,
            percent(one.top1),
            file_size(file_bytes(one.path)),
            milliseconds(seconds[one.preset]),
            f"{seconds['float'] / seconds[one.preset]:.1f}×",
            decibels(one.sqnr),
            f"{one.seconds:.2f} s",
        )
        for one in outcomes
    ]
    columns = ("model", "top-1", "size", "latency", "speed", "SQNR", "quantized in")
    note = (
        f"{data.HELD_OUT} held-out images; latency: the fast tenth of single inferences in turns, "
        f"ONNX Runtime {onnxruntime.__version__}, {platform.machine()}. "
        "A8W8 and XINT8 are for NPU compilers, A8W8_CPU is for CPUs."
    )
    title = "A network for digits, 0.4 M parameters, quantized three ways"
    return Table(title, columns, ((*float_row, "1.0×", "–", "–"), *rows), note)


def percent(share: float) -> str:
    """``98.2 %``."""
    return f"{100 * share:.1f} %"


def page(overview: Table, paths: Mapping[str, Path], seconds: Mapping[str, float]) -> Report:
    """The HTML page: the quantized models side by side, layer by layer."""
    _, (inputs, _) = data.split()
    feeds, few, views, measured = batches(inputs)[:1], [{data.INPUT: inputs[:FEW]}], [], []
    for preset, path in paths.items():
        found, single = compare(data.model_path(), path, feeds), causes(data.model_path(), path, few)
        measured.append(single)
        verdict = verdict_of(found, path, seconds["float"], seconds[preset])
        views.append(model_view(preset, data.model_path(), path, with_causes(found, single), verdict))
    seen = examples(data.model_path(), list(paths.values()), [{data.INPUT: image[None]} for image in inputs[:2]])
    return report_of("Digits, quantized three ways", data.model_path(), views, measured, seen, (overview,))


def verdict_of(found: Comparison, path: Path, before: float, after: float) -> Verdict:
    """The lines of one model; seconds per inference of the float and of the quantized one."""
    accuracy = accuracy_line(worst(found.outputs, found.answers), f"on {BATCH} held-out images")
    shares = coverage(path)
    size = size_line(file_bytes(data.model_path()), file_bytes(path))
    return Verdict((accuracy, speed_line(before, after), size, coverage_line(shares.integer, shares.stored)))


def run(folder: Path) -> None:
    """The whole demo; files go into ``folder``."""
    pages, made = folder / "report.html", [folder / f"digits_{preset}.onnx" for preset in PRESETS]
    check_outputs([Output(pages, folder=True), *(Output(path, kind="model", folder=True) for path in made)], (), False)
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = [measure(preset, folder) for preset in PRESETS]
    _, (inputs, labels) = data.split()
    models = {"float": data.model_path(), **{one.preset: one.path for one in outcomes}}
    seconds = quiet_seconds(models, {data.INPUT: inputs[:1]}, rounds=50)
    overview = table(outcomes, seconds, top1(data.model_path(), inputs, labels))
    print_table(overview)
    report = write_html(page(overview, {one.preset: one.path for one in outcomes}, seconds), pages)
    best = chosen()
    print(f"\nModels and {report} are in {folder}. Open the report in a browser: what causes the loss, layer by layer.")
    print(f"{best}\nYour own model: quark auto model.onnx -o best.onnx --data samples/ --for cpu")


def chosen() -> str:
    """What ``quark auto`` finds for the smallest file, in a sentence; top-1 on images that it has not seen."""
    (train, _), (inputs, labels) = data.split()
    samples = [{data.INPUT: image[None]} for image in train[:TRIED]]
    with tempfile.TemporaryDirectory() as folder:
        found = auto(data.model_path(), split(samples), OnnxGoal("size", seconds=SECONDS), Path(folder))
        path = found.winner.path or data.model_path()
        kept, size = percent(top1(path, inputs, labels)), file_size(file_bytes(path))
    return f"quark auto --for size takes {found.winner.name}, of {len(found.trials)} trials: {size}, top-1 {kept}."


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quark.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the results")
    try:
        run(parser.parse_args(arguments).output)
    except QuarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
