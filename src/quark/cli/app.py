"""The whole command line: the groups, and the commands that belong to none. Work is imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.cli.common import Json
from quark.cli.groups import ROOT
from quark.cli.onnx_app import onnx_app
from quark.cli.paths import Guarded
from quark.cli.plan_app import plan_app
from quark.cli.requests import Auto
from quark.cli.torch_app import torch_app
from quark.cli.values import takes_values

app = typer.Typer(
    **ROOT,
    help="Quantize trained models: smaller files, faster inference, and a table that says what it cost.",
    epilog="Start with: `quark onnx quantize model.onnx -o quantized.onnx --preset A8W8_CPU --data samples/`",
)
app.add_typer(onnx_app, name="onnx")
app.add_typer(torch_app, name="torch")
app.add_typer(plan_app, name="plan")


@app.command(
    cls=Guarded,
    epilog="""**Examples**

`quark auto model.onnx -o best.onnx --data samples/ --for cpu`

`quark auto model.onnx -o best.onnx --data samples/ --for npu --metric task.py:top1 --drop 1% --minutes 5`

`quark auto llama/ -o llama-small/ --data text.txt --for vllm`

Exit codes: 0 solved, 1 error, 2 wrong usage, 3 nothing within the tolerance is better than the float model
(the closest candidate is written).""",
)
@takes_values()
def auto(request: Auto) -> None:
    """Find the best quantized model: try presets and recipes, choose one, and measure it on other samples."""
    from quark.cli import automatic

    automatic.run(request)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Show all settings of this preset.")] = None,
    hardware: Annotated[str | None, typer.Option("--for", help="Only those for `cpu`, `npu` or `gpu`.")] = None,
    json: Json = False,
) -> None:
    """List the ready-made configurations; with a name, show all settings of that one."""
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


Verbose = Annotated[bool, typer.Option("--verbose", help="Show more about an error; may follow any command.")]


Extension = Annotated[
    list[Path] | None,
    typer.Option(
        "--extension",
        metavar="FILE.py",
        help="Run this file first, which registers formats, calibration methods or algorithms of your own; may follow "
        "any command, and be repeated.",
    ),
]


@app.callback()
def top(version: Version = False, verbose: Verbose = False, extension: Extension = None) -> None:
    """Quantize trained models."""
