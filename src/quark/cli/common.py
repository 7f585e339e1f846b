"""Options that commands of both flows have, with one spelling and one help text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from quark.cli.paths import Reads, Writes
from quark.dataclass import dataclass
from quark.errors import check_name
from quark.parallel import MOST

COUNT = 1_000_000_000
"""The largest number of samples, tokens or rounds that an option takes."""
THREADS = ("QUARK_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def limit_threads(count: int | None) -> int | None:
    """Have every library that is loaded from now on, and our own sessions, use so many threads."""
    if count is not None:
        os.environ.update(dict.fromkeys(THREADS, str(count)))
    return count


Threads = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST, callback=limit_threads, help="Processors to use. By default all that this process may use."
    ),
]


def use_backend(name: str | None) -> str | None:
    """Have workers be what ``name`` says."""
    if name is not None:
        from quark.parallel import choose_backend

        choose_backend(name)
    return name


Backend = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        callback=use_backend,
        help="Kind of workers: threading, loky (processes), dask or ray (a cluster whose machines see the folders).",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output instead of tables.")]
FailUnder = Annotated[
    str | None,
    typer.Option(
        "--fail-under",
        metavar="METRIC=X",
        help="Exit with code 3 if the metric is lower: sqnr, psnr (dB), cosine or kept (0 to 1).",
    ),
]
FailSlower = Annotated[
    bool, typer.Option("--fail-slower", help="Exit with code 3 if the float model is faster on this machine.")
]
LedgerPath = Annotated[
    Path | None,
    Writes("state"),
    typer.Option("--ledger", help="A .json file for finished trials; the same command continues from it."),
]
ReportPath = Annotated[
    Path | None,
    Writes(folder=True),
    typer.Option(
        "--report", help="Also write an HTML page: the layers that cause the loss, their values, weights and reasons."
    ),
]
TrialReport = Annotated[
    Path | None,
    Writes(folder=True),
    typer.Option(
        "--report",
        help="Also write an HTML page: the accuracy of all trials by size and latency, why the others lost.",
    ),
]
ChartReport = Annotated[
    Path | None, Writes(folder=True), typer.Option("--report", help="Also write an HTML page with the layers plotted.")
]
PlanPath = Annotated[
    Path | None,
    Writes(),
    typer.Option("--plan", help="Write every decision (tensor, format, scale, why) as JSON, for `quark plan diff`."),
]
PlanFrom = Annotated[
    Path | None,
    Reads(),
    typer.Option(
        "--plan-from", help="Use the decisions of a file that `plan --plan` wrote, or of a quantized ONNX model."
    ),
]
PlanOutput = Annotated[
    Path, Writes(), typer.Option("--output", "-o", help="The plan, a .yaml or .json file to edit and use.")
]
Limit = Annotated[
    float | None, typer.Option(help="In the place of a target: the most of the budget (bytes, bits or seconds).")
]
Compare = Annotated[bool, typer.Option(help="Also measure every candidate for all layers.")]
Estimate = Annotated[
    bool, typer.Option("--estimate", help="Layers by a few passes instead of one trial per layer and candidate.")
]
Rounds = Annotated[int, typer.Option(min=1, max=COUNT, help="Whole plans that are quantized and measured, at most.")]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a search is for, and what it writes."""

    output: PlanOutput
    target: Annotated[
        str | None, typer.Option("--target", metavar="METRIC>=X", help="What the whole quantized model has to reach.")
    ] = None
    limit: Limit = None
    budget: Annotated[
        str,
        typer.Option(
            show_default="size",
            help="What is to be small: size, bits, latency (of CPUs; of an MI300X for torch), or a .yaml of energies.",
        ),
    ] = ""
    metric: Annotated[
        str | None,
        Reads(function=True),
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Your metric for the target: function(path of an ONNX model, or a torch model) → number.",
        ),
    ] = None
    eval_data: Annotated[
        Path | None, Reads(), typer.Option("--eval-data", help="What whole plans are measured on, as --data.")
    ] = None
    compare: Compare = True
    rounds: Rounds = 8
    estimate: Estimate = False
    report: ChartReport = None
    json: Json = False

    def asked(self) -> dict[str, Any]:
        """The fields of what ``search`` of either flow is asked."""
        names = ("target", "budget", "limit", "metric", "rounds", "compare", "estimate")
        return {name: getattr(self, name) for name in names}


#: The preset of ``--for``, and of no option at all: ``cpu``.
USUAL = {"cpu": "A8W8_CPU", "npu": "XINT8", "gpu": "FP16"}
DEFAULT_PRESET = USUAL["cpu"]


def preset_names() -> list[str]:
    """What a shell completes ``--preset`` with."""
    from quark.config.presets import PRESETS

    return list(PRESETS)


def preset_for(hardware: str) -> str:
    """The usual preset of a kind of hardware.

    Raises:
        ConfigError: an unknown kind.
    """
    check_name("--for", hardware, USUAL)
    return USUAL[hardware]


def chosen_preset(preset: str | None, config: Path | None, hardware: str | None = None) -> str:
    """The preset that was typed, or that of the hardware, or the usual one.

    Raises:
        typer.BadParameter: two of the options, or a kind of hardware that does not exist.
    """
    typed = {"--preset": preset, "--config": config, "--for": hardware}
    given = [name for name, value in typed.items() if value is not None]
    if len(given) > 1:
        raise typer.BadParameter(f"give {' or '.join(given)}, not both: each of them says how to quantize")
    return preset or preset_for(hardware or "cpu")


Purpose = Annotated[
    str | None,
    typer.Option("--for", help="ONNX: `cpu`, `npu`, `size`; a folder: `vllm`, `llama.cpp`, `genai`, `transformers`."),
]
OwnMetric = Annotated[
    str | None,
    Reads(function=True),
    typer.Option(
        "--metric",
        metavar="NAME",
        help="`top1`, `top5`, `map50`, `miou`, `si-sdr`, `perplexity`, or `FILE.py:FUNCTION`: model → number(s).",
    ),
]
Drop = Annotated[
    str | None, typer.Option(help="Allowed loss of the metric, or of the float model's answers, such as 1%.")
]
Labels = Annotated[
    Path | None,
    Reads(),
    typer.Option(help="ONNX: classes (.txt, .csv, .npy), COCO-style boxes (.json), a folder of masks, clean sounds."),
]
TuneSpeed = Annotated[
    bool,
    typer.Option(
        "--tune-speed",
        help="Time several choices of integer and float layers on this machine, and keep the fastest one.",
    ),
]
