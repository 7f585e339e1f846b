"""``quark onnx``: its commands, their options and their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.cli.common import Json
from quark.cli.groups import ROOT
from quark.cli.passes_told import WithPasses
from quark.cli.paths import Guarded, Overwrite, Reads, Writes
from quark.cli.requests import Compare, Predict, Quantize, Rank, SearchRequest
from quark.cli.values import takes_values

onnx_app = typer.Typer(**ROOT, help="Quantize, inspect and compare ONNX models.")


@onnx_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark onnx quantize model.onnx -o q.onnx --preset A8W8_CPU --data calibration/`

`quark onnx quantize model.onnx -o q.onnx --preset XINT8 --data images/ --mean 0.485,0.456,0.406 --std 0.23,0.22,0.23`

`quark onnx quantize model.onnx -o q.onnx --random --set Percentile=99.9 --set "OpTypesToQuantize=[Conv, Gemm]"`

About 32 to 256 samples that look like the real inputs are enough. Exit codes: 0 done, 1 error, 2 wrong usage, 3 a bound
(`--fail-under`, `--fail-slower`) is not met.""",
)
@takes_values()
def quantize(request: Quantize) -> None:
    """Quantize an ONNX model.

    Writes a model that stock ONNX Runtime runs, and shows what was quantized, the loss in accuracy and the gain in size
    and speed. The last lines are the verdict, and a command to try if accuracy is not good.
    """
    from quark.cli import quantization

    quantization.run(request)


@onnx_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark onnx plan model.onnx --preset XINT8`

`quark onnx plan model.onnx --preset A8W8 --exclude conv1 --tensors`""",
)
@takes_values()
def plan(request: Predict) -> None:
    """Show what a quantization would do, without data and without writing anything.

    What is quantized with which data type by which rule, what stays float and why, and the predicted file size, memory
    and time.
    """
    from quark.cli import planning

    planning.run(request)


@onnx_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark onnx sensitivity model.onnx --preset A8W8 --data samples/ --samples 16 --report layers.html`

`quark onnx sensitivity model.onnx -p A8W8 -c A8W8 -c uint8/int4 -c A16W8 --data samples/`""",
)
@takes_values(samples=16)
def sensitivity(request: Rank) -> None:
    """Rank the layers by what the model loses when only that layer is quantized.

    One calibration, then every layer alone under every candidate (the preset itself when none is given).
    """
    from quark.cli import searching

    searching.run_sensitivity(request)


@onnx_app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark onnx search model.onnx -o plan.yaml --target "sqnr>=30" -c uint8/int4 -c A8W8 -c A16W8 --data samples/`

`quark onnx search model.onnx -o plan.yaml --target "top1>=0.85" --metric task.py:top1 --budget latency --data samples/`

`quark onnx quantize model.onnx -o q.onnx --config plan.yaml --data samples/`""",
)
@takes_values(samples=16)
def search(request: SearchRequest) -> None:
    """Find a mixed-precision plan: a data type for every layer, so that a metric meets its target at the lowest cost.

    Every layer is tried alone, integer programming chooses, the whole plan is quantized and measured, until it holds.
    Exit code 3: the target is out of reach, and the nearest plan is written. The last lines are a verdict.
    """
    from quark.cli import searching

    searching.run_search(request)


@onnx_app.command(cls=Guarded, epilog="**Example**: `quark onnx explain quantized.onnx conv1_output`")
def explain(
    model: Annotated[Path, Reads(), typer.Argument(help="A model that was quantized by this tool.")],
    name: Annotated[
        str | None, typer.Argument(metavar="TENSOR", help="A tensor or node, by its name in either model.")
    ] = None,
    json: Json = False,
) -> None:
    """Say why a tensor or node was quantized as it is, and by which rule; without a name, why nodes stay in float."""
    from quark.cli import planning

    planning.run_explain(model, name, json)


@onnx_app.command(cls=Guarded, epilog="**Example**: `quark onnx inspect model.onnx`")
def inspect(
    model: Annotated[Path, Reads(), typer.Argument(help="An .onnx file, float or quantized.")],
    json: Json = False,
) -> None:
    """Show inputs, outputs, operators and weights of a model, and how it is quantized."""
    from quark.cli import inspection

    inspection.run(model, json)


@onnx_app.command(
    cls=Guarded,
    epilog="""**Example**

`quark onnx compare model.onnx q.onnx --data samples.npz --report report.html`

`quark onnx compare model.onnx a8w8.onnx cpu.onnx --data samples.npz --report both.html`""",
)
@takes_values()
def compare(request: Compare) -> None:
    """Run a float model and its quantized forms on the same samples and show how far apart they are.

    End to end (every output), and layer by layer (every tensor that both models have). The last lines are a verdict.
    """
    from quark.cli import comparison

    comparison.run(request)


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
    """Apply graph passes to an ONNX model: fold, fuse, convert; its outputs do not change.

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
