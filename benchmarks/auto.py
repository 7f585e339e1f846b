"""``quark auto`` on real models, judged on labelled halves that it never saw.

    python -m benchmarks.auto [--models yolox gtcrn ...] [--purposes cpu npu] [--minutes 10] [--agreement] [--cpu]

The tool gets the calibration samples, and as its metric the first labelled half (every other picture, the first half of
the sound, other stories); with ``--agreement`` no metric, only the agreement with the float model. The winner, the
default preset and the float model are then measured on the second half. UltraFace has no labels: what the float model
finds is the truth, in the calibration views (first half) and in the pictures themselves (second half). ``near`` says
whether the winner is within 1 % of float or within one standard error of the difference, by leaving out one part of the
second half at a time. stories260K is measured on stories; its text from The Wizard of Oz is reported beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.search import SHARED, helper
from quark.measure.score import Score, error, mean, score

Data = Any
Halves = tuple[Callable[[str], Score], Callable[[str], Score]]
PARTS = 8  # of a sound, that are left out one at a time


@dataclass(frozen=True)
class Case:
    """A model, how its samples are made, and its metric on both labelled halves (larger is better)."""

    file: str
    metric: str
    samples: Callable[[Data], Iterable[dict[str, np.ndarray]]]
    halves: Callable[[Data], Halves]


def flowers(data: Data) -> Halves:
    """Top-1 on every other test image."""

    def hits(path: str, start: int) -> Score:
        session = data.open_session(path)
        images = itertools.islice(data.flower_images("test"), start, None, 2)
        return mean([float(session.run(None, {"data": data.caffe_input(i)})[0].argmax() == k) for i, k in images])

    return lambda path: hits(path, 0), lambda path: hits(path, 1)


def boxes(data: Data, detect: Callable[..., Any], images: Sequence[Any]) -> Callable[[str], Score]:
    """mAP50 on labelled pictures."""

    def measured(path: str) -> Score:
        session, truths = data.open_session(path), [one[1] for one in images]
        found = [detect(session, one[0]) for one in images]
        average = data.mean_average_precision
        return score(lambda part: average([found[k] for k in part], [truths[k] for k in part]), len(images))

    return measured


def pictures(detector: str) -> Callable[[Data], Halves]:
    """mAP50 of a detector of 80 classes."""

    def halves(data: Data) -> Halves:
        images, detect = data.coco_images(), getattr(data, f"detect_{detector}")
        return boxes(data, detect, images[::2]), boxes(data, detect, images[1::2])

    return halves


def faces(data: Data) -> Halves:
    """AP50 against what the float model finds, in pictures where it finds any."""
    session = data.open_session(data.MODELS / "ultraface_rfb320.onnx")

    def known(images: Iterable[Any]) -> list[Any]:
        found = [(image, data._as_truth(data.detect_faces(session, image))) for image in images]
        return [one for one in found if len(one[1])]

    views, whole = list(data.calib_images(63)), [one[0] for one in data.coco_images()]
    return boxes(data, data.detect_faces, known(views)), boxes(data, data.detect_faces, known(whole))


def sounds(evaluate: Callable[[Data, str, tuple[Any, ...]], np.ndarray]) -> Callable[[Data], Halves]:
    """SI-SDR in dB on the first and on the second half of the recording."""

    def halves(data: Data) -> Halves:
        clean, noisy, active = data.speech()
        middle = len(clean) // 2

        def measured(path: str, part: slice) -> Score:
            sound = clean[part], noisy[part], active[part]
            made = evaluate(data, path, sound)
            where = np.array_split(np.flatnonzero(sound[2][: len(made)]), PARTS)

            def ratio(parts: Sequence[int]) -> float:
                chosen = np.concatenate([where[k] for k in parts])
                return float(data.si_sdr(sound[0][chosen], made[chosen]))

            return score(ratio, PARTS)

        return lambda path: measured(path, slice(0, middle)), lambda path: measured(path, slice(middle, None))

    return halves


def gtcrn(data: Data, path: str, sound: tuple[Any, ...]) -> np.ndarray:
    """The enhanced sound."""
    steps = (part for _, part in data.gtcrn_steps(data.open_session(path), sound[1]))
    return np.asarray(data.overlap_add(steps, len(sound[1]), 512, 256))


def dtln(part: int) -> Callable[[Data, str, tuple[Any, ...]], np.ndarray]:
    """The enhanced sound with one of both parts replaced."""

    def made(data: Data, path: str, sound: tuple[Any, ...]) -> np.ndarray:
        sessions = data.dtln_sessions(part, data.open_session(path))
        steps = (step[2] for step in data.dtln_steps(*sessions, sound[1]))
        return np.asarray(data.overlap_add(steps, len(sound[1]), 512, 128))

    return made


def silero(data: Data) -> Halves:
    """Accuracy over chunks; the threshold is that of the whole recording."""
    clean, noisy, _ = data.speech()
    energy = (clean[: len(clean) // 512 * 512].reshape(-1, 512) ** 2).mean(1)
    truth, middle = energy > 1e-3 * energy.max(), len(energy) // 2

    def measured(path: str, part: slice) -> Score:
        guess = np.array([one for _, one in data.silero_steps(data.open_session(path), noisy)])
        return mean(((guess > 0.5) == truth[: len(guess)])[part].astype(float))

    return lambda path: measured(path, slice(0, middle)), lambda path: measured(path, slice(middle, None))


def stories(data: Data) -> Halves:
    """Minus the mean log-loss, of which 1 % is 1 % of the logarithm of the perplexity."""

    def measured(path: str, part: slice) -> Score:
        session, ids = data.open_session(path), data.token_ids()[part]
        losses = [data.language_score(session.run(None, {"input_ids": one[None, :-1]})[0], one[None]) for one in ids]
        logs = np.log([one["perplexity"] for one in losses])
        return score(lambda chosen: -float(np.exp(logs[list(chosen)].mean())), len(logs))

    return lambda path: measured(path, slice(32, 64)), lambda path: measured(path, slice(64, None))


CASES = {
    "squeezenet": Case("squeezenet11_flowers5", "top-1", lambda data: data.calib_flowers5(64), flowers),
    "yolox": Case("yolox_nano", "mAP50", lambda data: data.calib_yolox_nano(63), pictures("yolox")),
    "fastestdet": Case("fastestdet", "mAP50", lambda data: data.calib_fastestdet(63), pictures("fastestdet")),
    "ultraface": Case("ultraface_rfb320", "AP50", lambda data: data.calib_ultraface(63), faces),
    "gtcrn": Case("gtcrn_simple", "SI-SDR", lambda data: data.calib_gtcrn(250), sounds(gtcrn)),
    "dtln1": Case("dtln_1", "SI-SDR", lambda data: data.calib_dtln(0), sounds(dtln(0))),
    "dtln2": Case("dtln_2", "SI-SDR", lambda data: data.calib_dtln(1), sounds(dtln(1))),
    "silero": Case("silero_vad_16k_op15", "accuracy", lambda data: data.calib_silero(250), silero),
    "stories": Case("stories260K", "-perplexity", lambda data: data.calib_stories(32), stories),
}


def found(case: Case, purpose: str, options: argparse.Namespace, data: Data, folder: Path) -> dict[str, Any]:
    """What the tool makes of a model, measured on the half that it never saw."""
    from quark.onnx.auto import auto
    from quark.onnx.trials import PURPOSES, OnnxGoal
    from quark.search.parts import split

    model, (first, second) = SHARED / "models" / f"{case.file}.onnx", case.halves(data)
    start = time.perf_counter()
    goal = OnnxGoal(purpose, None, None if options.agreement else first, 60 * options.minutes)
    tell = print if options.verbose else lambda words: None
    outcome = auto(model, split(list(case.samples(data))), goal, folder, tell)
    seconds = time.perf_counter() - start
    base = next((one for one in outcome.trials if one.name == PURPOSES[purpose].bases[0]), None)
    won, whole = second(str(outcome.winner.path or model)), second(str(model))
    base_score = None if base is None or base.path is None else second(str(base.path)).value
    chance, loss = error(won, whole), whole.value - won.value
    near = loss <= max(0.01 * abs(whole.value), 0.0 if np.isnan(chance) else chance)
    return {
        "winner": outcome.winner.name,
        "solved": outcome.solved,
        "near": bool(near),
        "float": whole.value,
        "value": won.value,
        "error": chance,
        "default": base_score,
        "kB": outcome.winner.bytes / 1e3,
        "speed": outcome.float_seconds / outcome.winner.seconds,
        "trials": len(outcome.trials),
        "seconds": seconds,
    }


def row(*cells: object) -> None:
    """One line of a Markdown table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--purposes", nargs="*", default=["cpu", "npu"])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--agreement", action="store_true", help="no metric: the agreement with the float model")
    parser.add_argument("--verbose", action="store_true", help="a line a trial")
    parser.add_argument("--cpu", action="store_true", help="minutes of this process, where others use the machine too")
    parser.add_argument("--json", type=Path, help=record.HELP)
    options, data, figures = parser.parse_args(), helper("load_examples"), {}
    if options.cpu:
        time.perf_counter = time.process_time  # for the search's clock and for latencies as well
    row("model", "for", "winner", "solved", "near float", "metric", "float", "winner", "± difference", "default", "kB",
        "speed", "trials", "seconds")  # fmt: skip
    row(*["---"] * 14)
    for name, purpose in itertools.product(options.models, options.purposes):
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            one = figures[f"{name} {purpose}"] = found(case, purpose, options, data, Path(folder))
        yes = {True: "yes", False: "no"}
        default = "–" if one["default"] is None else f"{one['default']:.4g}"
        values = (f"{one[key]:.4g}" for key in ("float", "value", "error"))
        rest = f"{one['kB']:.0f}", f"{one['speed']:.2f}", one["trials"], f"{one['seconds']:.0f}"
        row(name, purpose, one["winner"], yes[one["solved"]], yes[one["near"]], case.metric, *values, default, *rest)
    if options.json is not None:
        options.json.write_text(json.dumps({"figures": figures}, indent=1, default=str))


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
