"""What layers lose alone: one trial per layer and candidate, against a few passes (ONNX) or one backward pass (torch).

    python -m benchmarks.sensitivity [--models squeezenet ultraface ...] [--samples 8] [--plans]

``runs`` counts inferences of the whole model: trials take layers × candidates × samples; of torch models a local pass
counts as two and a backward pass as three, a run of a part of an ONNX model as its share of the multiplications. What
``--estimate`` measures beside the passes, where the plan rests on it, is counted too. ``Spearman``: over the layers
within each candidate, median over candidates (smallest in brackets), of the passes alone. ``loss``: of the plan that
``--estimate`` finds, the sum of its trials' losses over that of the plan by all trials, dB, at eight limits of size
between the smallest and the largest plan: median (worst). ``plans``: for the size of every candidate but the smallest,
the plan by trials and the one by passes, both quantized and measured on other samples: the passes' SQNR less that of
the trials', the worst of all sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.search import SHARED, helper
from quark.files.journal import Journal
from quark.search.loop import within
from quark.search.refine import Alone, refined
from quark.search.target import SearchGoal
from quark.search.trials import Trying, study
from quark.search.values import Study

ONNX: dict[str, tuple[str, str]] = {
    "squeezenet": ("squeezenet11_flowers5", "calib_flowers5"),
    "ultraface": ("ultraface_rfb320", "calib_ultraface"),
    "fastestdet": ("fastestdet", "calib_fastestdet"),
    "stories": ("stories260K", "calib_stories"),
    "gtcrn": ("gtcrn_simple", "calib_gtcrn"),
    "yolox": ("yolox_nano", "calib_yolox_nano"),
}
CANDIDATES = ("uint8/int3", "uint8/int4", "uint8/int8@channel", "uint16/int8@channel")
TORCH = ("mxfp4_weight_only", "int4_wo_32", "int8_wo_per_channel", "bfp16")
LENGTH, LIMITS = 128, 8
Row = dict[str, Any]


def ranks(trials: Study, passes: Study) -> list[float]:
    """Spearman correlation over layers, of every candidate."""
    from scipy.stats import spearmanr

    found = []
    for name in trials.candidates:
        one, other = ([t.loss for t in study.trials if t.candidate == name] for study in (trials, passes))
        found.append(float(spearmanr(one, other).statistic))
    return found


def gaps(trials: Study, estimates: Study, alone: Callable[[], Alone]) -> list[float]:
    """What plans of ``estimates`` lose more than those of trials, dB, at sizes between the smallest and the largest."""
    losses = {(one.layer, one.candidate): one.loss for one in trials.trials}
    sizes = trials.table("size")
    ends = sizes.min(axis=1).sum(), np.where(np.isfinite(sizes), sizes, 0).max(axis=1).sum()

    def lost(study: Study, limit: float) -> float:
        return sum(losses[pair] for pair in zip(study.layers, within(study, "size", limit), strict=True))

    found = []
    for limit in np.linspace(*ends, LIMITS + 2)[1:-1]:
        plan_of = lambda study, most=limit: dict(zip(study.layers, within(study, "size", most), strict=True))  # noqa: E731
        made = refined(estimates, plan_of, alone())
        found.append(10 * float(np.log10(lost(made, limit) / lost(trials, limit))))
    return found


def onnx(name: str, count: int, plans: bool) -> Row:
    """An ONNX model."""
    from quark.onnx.config_file import config_of
    from quark.onnx.layer_runs import open_runs
    from quark.onnx.one_pass import PLANNING, Passes
    from quark.onnx.quantization.config.config import Config

    file, loader = ONNX[name]
    path, step = SHARED / "models" / f"{file}.onnx", 8 if name == "gtcrn" else 1  # frames of a sound: not neighbours
    samples = list(getattr(helper("load_examples"), loader)(3 * count * step))[::step]
    job = Config(config_of({"preset": "A8W8_CPU"})).compile()
    with open_runs(path, job, CANDIDATES, samples[:count]) as layers:
        start = time.process_time()
        trials = study(layers, "sqnr", Journal())
        middle = time.process_time()
        alone_passes = Passes.over(layers, "sqnr")
        estimates = alone_passes.study()
        end = time.process_time()
        passes = Passes.over(layers, "sqnr", PLANNING)
        resting = passes.study()
        spent = list[Passes]()

        def alone() -> Alone:
            spent.append(replace(passes, arrived=deepcopy(passes.arrived)))
            return Alone(spent[-1].losses, spent[-1].left)

        lost = gaps(trials, resting, alone)
    runs, spared = alone_passes.runs(), max(one.runs() for one in spent)
    row = as_row(trials, estimates, passes.all_runs(), runs, (middle - start, end - middle), lost)
    return row | {"runs with plan": spared} | ({"plans": worse(path, samples, count)} if plans else {})


def worse(path: Path, samples: Sequence[Any], count: int) -> float:
    """The SQNR of the passes' plan less that of the trials', dB, the worst over sizes."""
    from quark.onnx.search import search

    keeping = Trying(ledger=Path(tempfile.mkdtemp()) / "l.json")
    first, rest = samples[:count], samples[count:]
    uniform = search(
        path, "A8W8_CPU", first, CANDIDATES, SearchGoal(limit=1e12, evaluation=rest, compare=True), keeping
    ).uniform
    sizes = sorted(costs["size"] for _, costs in uniform.values())
    gaps = []
    for limit in [size * part for size in sizes[1:3] for part in (0.9, 1.0)]:
        by_trials, by_passes = (
            search(
                path,
                "A8W8_CPU",
                first,
                CANDIDATES,
                SearchGoal(limit=limit, evaluation=rest, estimate=estimate),
                keeping,
            )
            for estimate in (False, True)
        )
        gaps.append(float(by_passes.reported or by_passes.value) - float(by_trials.reported or by_trials.value))
    return min(gaps)


def torch_model(name: str) -> tuple[Any, list[Any], list[str]]:
    """Model, windows of tokens, and layers that stay float."""
    import torch

    data = helper("load_examples")
    if name == "torch stories":
        model = data.torch_stories()
        rows = np.atleast_2d(data.token_ids())[:8]
        return model, [{"ids": torch.from_numpy(row[None, :LENGTH].astype(np.int64))} for row in rows], ["output"]
    model, tokenizer = data.torch_shakespeare()
    ids = torch.tensor(data.shakespeare_ids(tokenizer, "train"))
    return model, [{"input_ids": ids[None, k : k + LENGTH]} for k in range(0, 8 * LENGTH, LENGTH)], ["lm_head"]


def torch(name: str, count: int, plans: bool) -> Row:
    """A torch model; the divergence of the logits."""
    from quark.torch import one_pass
    from quark.torch.layer_runs import lay_out
    from quark.torch.sensitivity import TRIED, Source, trials_of

    model, samples, exclude = torch_model(name)
    with tempfile.TemporaryDirectory() as folder:
        common = lay_out(model, samples[:count], Path(folder))
        made = trials_of(Source(model), model, common, {"scheme": TORCH[0], "exclude": exclude}, TORCH)
        start = time.process_time()
        trials = study(made, "kl", Journal())
        middle = time.process_time()
        estimates, alone = made.estimated("kl")
        end = time.process_time()
        lost = gaps(trials, estimates, lambda: alone)
    runs = one_pass.runs(count, len(TORCH)) + alone.left(0) * min(TRIED, count)
    return as_row(trials, estimates, count * len(trials.trials), runs, (middle - start, end - middle), lost)


def as_row(
    trials: Study,
    passes: Study,
    of_trials: float,
    of_passes: float,
    seconds: tuple[float, float],
    lost: Sequence[float],
) -> Row:
    """The figures of a model."""
    found = ranks(trials, passes)
    return {
        "layers": len(trials.layers),
        "runs": (of_trials, of_passes),
        "spearman": found,
        "median": float(np.median(found)),
        "CPU s": seconds,
        "loss": lost,
    }


MODELS: dict[str, Callable[[str, int, bool], Row]] = {
    **dict.fromkeys(ONNX, onnx),
    **dict.fromkeys(("torch stories", "torch llama"), torch),
}


def line(*cells: object) -> None:
    """One line of a Markdown table."""
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--plans", action="store_true", help="also compare plans (ONNX models)")
    parser.add_argument("--json", type=Path, help=record.HELP)
    options, figures = parser.parse_args(), {}
    line("model", "layers", "runs: trials", "estimates", "times fewer", "Spearman", "loss, dB", "CPU s", "", "plan, dB")
    line(*["---"] * 10)
    for name in options.models:
        one = figures[name] = MODELS[name](name, options.samples, options.plans)
        before, after = one["runs"]
        ranked = f"{one['median']:.3f} ({min(one['spearman']):.3f})"
        plans = f"{one['plans']:+.2f}" if "plans" in one else "–"
        seconds, few = (f"{part:.1f}" for part in one["CPU s"]), f"{before / after:.1f}"
        lost = f"{np.median(one['loss']):.2f} ({max(one['loss']):.2f})"
        line(name, one["layers"], f"{before:.0f}", f"{after:.0f}", few, ranked, lost, *seconds, plans)
    if options.json is not None:
        options.json.write_text(json.dumps({"figures": figures}, indent=1))


if __name__ == "__main__":
    sys.exit(record.run(main, __file__))
