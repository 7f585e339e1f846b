"""The commands, their options and their help. The work is imported when a command runs, so that help is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark import parallel
from quark.cli.common import (
    DEFAULT_PRESET,
    Backend,
    ChartReport,
    Compare,
    Drop,
    Estimate,
    FailSlower,
    FailUnder,
    Json,
    Labels,
    LedgerPath,
    Limit,
    OwnMetric,
    PlanFrom,
    PlanOutput,
    PlanPath,
    Purpose,
    ReportPath,
    Rounds,
    Target,
    Threads,
    TuneSpeed,
    chosen_preset,
    preset_names,
)
from quark.cli.paths import LIKE_MODEL, Guarded, Overwrite, Reads, Writes
from quark.cli.plan_app import plan_app
from quark.cli.source_options import Source, takes_samples
from quark.cli.torch_app import torch_app
from quark.cli.transformation import WithPasses

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Quantize trained models: smaller files, faster inference, and a table that says what it cost.",
    epilog="Start with: `quark onnx quantize model.onnx -o quantized.onnx --preset A8W8_CPU --data samples/`",
)
onnx_app = typer.Typer(no_args_is_help=True, help="Quantize, inspect and compare ONNX models.")
app.add_typer(onnx_app, name="onnx")
app.add_typer(torch_app, name="torch")
app.add_typer(plan_app, name="plan")

Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        "-p",
        show_default=DEFAULT_PRESET,
        autocompletion=preset_names,
        help="A configuration by name; `quark presets` lists them.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    Reads(),
    typer.Option("--config", help="A configuration file instead of a preset, such as a plan of `search`."),
]
Candidates = Annotated[
    list[str] | None,
    typer.Option(
        "--candidate",
        "-c",
        metavar="NAME",
        help="What a layer may become: a preset, two data types as in `uint8/int4@32`, with `+adaround` and the like "
        "behind, or `float`; may be repeated.",
    ),
]
Workers = Annotated[int, typer.Option(min=1, max=parallel.MOST, help="Layers, or recipes, that are tried at once.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="OPTION=VALUE", help="Set one option (`quark options` lists them); may be repeated."),
]
Hardware = Annotated[
    str | None, typer.Option("--for", metavar="cpu|npu|gpu", help="What it is to run on: chooses the preset.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="NODE", help="Keep a node in float: its name or a `^regular expression`; may be repeated."),
]


@onnx_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark onnx quantize model.onnx -o q.onnx --preset A8W8_CPU --data calibration/`

`quark onnx quantize model.onnx -o q.onnx --preset XINT8 --data images/ --mean 0.485,0.456,0.406 --std 0.23,0.22,0.23`

`quark onnx quantize model.onnx -o q.onnx --random --set Percentile=99.9 --set "OpTypesToQuantize=[Conv, Gemm]"`

About 32 to 256 samples that look like the real inputs are enough. Exit codes: 0 done, 1 error, 2 wrong usage.""",
)
@takes_samples()
def quantize(
    model: Annotated[Path, Reads(), typer.Argument(help="The float model, an .onnx file. It is not changed.")],
    output: Annotated[
        Path, Writes("model"), typer.Option("--output", "-o", help="Where to write the quantized model.")
    ],
    preset: Preset = None,
    hardware: Hardware = None,
    config: ConfigFile = None,
    settings: Settings = None,
    target: Target = None,
    exclude: Exclude = None,
    tune_speed: TuneSpeed = False,
    report: ReportPath = None,
    plan: PlanPath = None,
    plan_from: PlanFrom = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option("--algorithm", "-a", help="An algorithm, such as ce or adaround; may be repeated."),
    ] = None,
    eval_data: Annotated[
        Path | None, Reads(), typer.Option("--eval-data", help="Samples that the result is judged on, as --data.")
    ] = None,
    fail_under: FailUnder = None,
    fail_slower: FailSlower = False,
    check: Annotated[bool, typer.Option(help="Afterwards run both models: SQNR, cosine, latency.")] = True,
    threads: Threads = None,
    backend: Backend = None,
    overwrite: Overwrite = False,
    json: Json = False,
    *,
    source: Source,
) -> None:
    """Quantize an ONNX model.

    Writes a model that stock ONNX Runtime runs, and tells what was quantized, what it cost in accuracy and what it won
    in size and time. The last lines are a verdict, and the command that helps where it is bad.
    """
    from quark.cli import quantization

    timed = ("TuneSpeed=true",) if tune_speed else ()
    chosen = (*(settings or ()), *timed), target, tuple(exclude or ()), config
    others = tuple(algorithm or ()), eval_data, plan_from
    name = chosen_preset(preset, config, hardware)
    request = quantization.Request(model, output, name, source, *chosen, *others)
    demands = quantization.demanded(fail_under, fail_slower)
    quantization.run(request, report, plan, check, json, demands, overwrite)


@onnx_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark onnx plan model.onnx --preset XINT8`

`quark onnx plan model.onnx --preset A8W8 --exclude conv1 --tensors`""",
)
def plan(
    model: Annotated[Path, Reads(), typer.Argument(help="The float model, an .onnx file.")],
    preset: Preset = None,
    hardware: Hardware = None,
    config: ConfigFile = None,
    settings: Settings = None,
    target: Target = None,
    exclude: Exclude = None,
    tensors: Annotated[bool, typer.Option(help="Also list every quantized tensor.")] = False,
    plan: PlanPath = None,
    plan_from: PlanFrom = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Show what a quantization would do, without data and without writing anything.

    What is quantized with which data type by which rule, what stays float and why, and the predicted file size, memory
    and time.
    """
    from quark.cli import planning
    from quark.cli.quantization import Request

    chosen = tuple(settings or ()), target, tuple(exclude or ()), config
    request = Request(model, model, chosen_preset(preset, config, hardware), Source(), *chosen, plan_from=plan_from)
    planning.run(request, tensors, plan, json)


@onnx_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark onnx sensitivity model.onnx --preset A8W8 --data samples/ --samples 16 --report layers.html`

`quark onnx sensitivity model.onnx -p A8W8 -c A8W8 -c uint8/int4 -c A16W8 --data samples/`""",
)
@takes_samples(16)
def sensitivity(
    model: Annotated[Path, Reads(), typer.Argument(help="The float model, an .onnx file.")],
    preset: Preset = None,
    config: ConfigFile = None,
    candidate: Candidates = None,
    settings: Settings = None,
    target: Target = None,
    exclude: Exclude = None,
    metric: Annotated[
        str,
        Reads(function=True),
        typer.Option(help="What ranks the layers: sqnr, mse, cosine, kl, or FILE.py:FUNCTION of a model's path."),
    ] = "sqnr",
    workers: Workers = 1,
    backend: Backend = None,
    ledger: LedgerPath = None,
    report: ChartReport = None,
    overwrite: Overwrite = False,
    json: Json = False,
    *,
    source: Source,
) -> None:
    """Rank the layers by what the model loses when only that layer is quantized.

    One calibration, then every layer alone under every candidate (the preset itself when none is given).
    """
    from quark.cli import searching

    request = searching.Request(
        model,
        chosen_preset(preset, config),
        config,
        tuple(candidate or ()),
        source,
        (tuple(settings or ()), target, tuple(exclude or ())),
        workers,
        ledger,
    )
    searching.run_sensitivity(request, metric, report, json)


@onnx_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark onnx search model.onnx -o plan.yaml --target "sqnr>=30" -c uint8/int4 -c A8W8 -c A16W8 --data samples/`

`quark onnx search model.onnx -o plan.yaml --target "top1>=0.85" --metric task.py:top1 --budget latency --data samples/`

`quark onnx quantize model.onnx -o q.onnx --config plan.yaml --data samples/`""",
)
@takes_samples(16)
def search(
    model: Annotated[Path, Reads(), typer.Argument(help="The float model, an .onnx file.")],
    output: PlanOutput,
    goal: Annotated[
        str | None, typer.Option("--target", metavar="METRIC>=X", help="What the whole quantized model has to reach.")
    ] = None,
    limit: Limit = None,
    budget: Annotated[
        str | None, typer.Option(help="What is to be small: size, bits, latency (for CPUs), or a .yaml of energies.")
    ] = None,
    metric: Annotated[
        str | None,
        Reads(function=True),
        typer.Option(
            metavar="FILE.py:FUNCTION", help="Your metric for the target: function(path of a model) → number."
        ),
    ] = None,
    preset: Preset = None,
    config: ConfigFile = None,
    candidate: Candidates = None,
    eval_data: Annotated[
        Path | None, Reads(), typer.Option("--eval-data", help="Samples that whole plans are measured on, as --data.")
    ] = None,
    settings: Settings = None,
    layout: Annotated[str | None, typer.Option("--layout", metavar="cpu|any", help="As of `quantize`.")] = None,
    exclude: Exclude = None,
    compare: Compare = True,
    rounds: Rounds = 8,
    estimate: Estimate = False,
    fail_under: FailUnder = None,
    fail_slower: FailSlower = False,
    workers: Workers = 1,
    backend: Backend = None,
    ledger: LedgerPath = None,
    report: ChartReport = None,
    overwrite: Overwrite = False,
    json: Json = False,
    *,
    source: Source,
) -> None:
    """Find a mixed-precision plan: a data type for every layer, so that a metric meets its target at least cost.

    Every layer is tried alone, integer programming chooses, the whole plan is quantized and measured, until it holds.
    Exit code 3: the target is out of reach, and the nearest plan is written. The last lines are a verdict.
    """
    from quark.cli import quantization, searching
    from quark.cli.search_tables import Wanted

    request = searching.Request(
        model,
        chosen_preset(preset, config),
        config,
        tuple(candidate or ()),
        source,
        (tuple(settings or ()), layout, tuple(exclude or ())),
        workers,
        ledger,
    )
    wanted = Wanted(output, goal, limit, budget or "", metric, eval_data, compare, rounds, estimate)
    searching.run_search(request, wanted, report, json, quantization.demanded(fail_under, fail_slower))


@onnx_app.command(cls=Guarded, epilog="**Example**: `quark onnx explain quantized.onnx conv1_output`")
def explain(
    model: Annotated[Path, Reads(), typer.Argument(help="A model that was quantized by this tool.")],
    name: Annotated[str, typer.Argument(metavar="TENSOR", help="A tensor or node, by its name in either model.")],
    json: Json = False,
) -> None:
    """Say why a tensor or node of a quantized model is what it is, and by which rule."""
    from quark.cli import planning

    planning.run_explain(model, name, json)


@onnx_app.command(cls=Guarded, epilog="**Example**: `quark onnx inspect model.onnx`")
def inspect(
    model: Annotated[Path, Reads(), typer.Argument(help="An .onnx file, float or quantized.")],
    json: Json = False,
) -> None:
    """Show what a model is made of: inputs, outputs, operators, weights, and how it is quantized."""
    from quark.cli import inspection

    inspection.run(model, json)


@onnx_app.command(
    cls=Guarded,
    epilog="""**Example**

`quark onnx compare model.onnx q.onnx --data samples.npz --report report.html`

`quark onnx compare model.onnx a8w8.onnx cpu.onnx --data samples.npz --report both.html`""",
)
@takes_samples()
def compare(
    model: Annotated[Path, Reads(), typer.Argument(metavar="FLOAT_MODEL", help="The float model.")],
    quantized: Annotated[
        list[Path], Reads(), typer.Argument(metavar="QUANTIZED_MODEL...", help="The models made from it, one or more.")
    ],
    report: ReportPath = None,
    fail_under: FailUnder = None,
    overwrite: Overwrite = False,
    json: Json = False,
    *,
    source: Source,
) -> None:
    """Run a float model and its quantized forms on the same samples and show how far apart they are.

    End to end (every output), and layer by layer (every tensor that both models have). The last lines are a verdict.
    """
    from quark.cli import comparison
    from quark.cli.verdicts import parse_bound

    request = comparison.Request(model, tuple(quantized), source)
    comparison.run(request, report, json, parse_bound(fail_under) if fail_under else None)


@onnx_app.command(
    cls=WithPasses,
    epilog="**Example**: `quark onnx transform model.onnx -o out.onnx --config passes.yaml`",
)
def transform(
    model: Annotated[Path, Reads(), typer.Argument(help="An .onnx file. It is not changed.")],
    output: Annotated[
        Path, Writes("model"), typer.Option("--output", "-o", help="Where to write the transformed model.")
    ],
    config: Annotated[
        str,
        Reads(),
        typer.Option(help="A YAML file with the key `passes`, or a template: xint8, a8w8, a16w8, bf16, bfp16."),
    ],
    register: Annotated[
        list[Path] | None,
        Reads(),
        typer.Option(help="A Python file that registers passes of your own (`register_pass`); may be repeated."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Apply graph passes to an ONNX model: fold, fuse, convert; its outputs stay what they are.

    The YAML file lists passes in order, as in `passes: {fold_batch_norm: {}, convert_opset_version:
    {target_opset_version: 21}}`.
    """
    from quark.cli import transformation

    transformation.run(model, output, config, json, register or [])


@onnx_app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    epilog="**Example**: `quark onnx tool convert_fp16_to_fp32 model.onnx out.onnx`",
)
def tool(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The tool; without one, a list of them.")] = "",
) -> None:
    """Convert, strip, inspect: one small program per job (`quark onnx tool` lists them, `NAME --help` explains one)."""
    from quark.cli import tooling

    raise typer.Exit(tooling.run(name, context.args))


@app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark auto model.onnx -o best.onnx --data samples/ --for cpu`

`quark auto model.onnx -o best.onnx --data samples/ --for npu --metric task.py:top1 --drop 1% --minutes 5`

`quark auto llama/ -o llama-small/ --data text.txt --for vllm`

Exit codes: 0 solved, 1 error, 2 wrong usage, 3 nothing within the tolerance wins (the nearest miss is written).""",
)
@takes_samples()
def auto(
    model: Annotated[Path, Reads(), typer.Argument(help="An .onnx file, or a torch folder. It is not changed.")],
    output: Annotated[Path, Writes(LIKE_MODEL), typer.Option("--output", "-o", help="Where to write the best model.")],
    purpose: Purpose = None,
    metric: OwnMetric = None,
    labels: Labels = None,
    drop: Drop = None,
    minutes: Annotated[float, typer.Option(min=0.0, help="Time for all trials.")] = 10.0,
    seq_len: Annotated[int, typer.Option(min=2, help="Folders: tokens per window.")] = 512,
    ledger: LedgerPath = None,
    workers: Workers = 1,
    backend: Backend = None,
    report: ReportPath = None,
    overwrite: Overwrite = False,
    json: Json = False,
    *,
    source: Source,
) -> None:
    """Find the best quantized model: try presets and recipes, choose, and prove it on samples that decided nothing."""
    from quark.cli import automatic

    asked = purpose or automatic.usual(model), metric, drop, minutes, ledger, seq_len, labels, workers
    automatic.run(automatic.Request(model, output, source, *asked), report, overwrite, json)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Show all that this preset says.")] = None,
    hardware: Annotated[str | None, typer.Option("--for", help="Only those for `cpu`, `npu` or `gpu`.")] = None,
    json: Json = False,
) -> None:
    """List the ready-made configurations, a line each; with a name, all that one says."""
    from quark.cli import listing

    listing.run_presets(name, hardware, json)


@app.command()
def doctor(json: Json = False) -> None:
    """Show what this installation and this machine can do, and what is missing for what."""
    from quark.cli import doctor as command

    command.run(json)


@app.command()
def options(json: Json = False) -> None:
    """List the options that `--set` and `extra_options` know, with their defaults."""
    from quark.cli import listing

    listing.run_options(json)


def _version(wanted: bool) -> None:
    if wanted:
        from quark import __version__

        print(f"quark {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


Verbose = Annotated[bool, typer.Option("--verbose", help="Tell more about an error; may stand behind any command.")]


@app.callback()
def top(version: Version = False, verbose: Verbose = False) -> None:
    """Quantize trained models."""
