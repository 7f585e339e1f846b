"""``quark plan``: plan files of either flow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quark.cli.common import Json
from quark.cli.groups import CommandGroup
from quark.cli.paths import Guarded, Reads

plan_app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Compare plans: what a quantization decided about every tensor."
)
PlanFile = Annotated[
    Path,
    Reads(),
    typer.Argument(metavar="PLAN", help="A file that `--plan` wrote, or a quantized ONNX model or checkpoint folder."),
]


@plan_app.callback()
def plans() -> None:
    """Compare plans: what a quantization decided about every tensor."""


@plan_app.command(cls=Guarded, epilog="**Example**: `quark plan diff before.json after.json`")
def diff(before: PlanFile, after: PlanFile, json: Json = False) -> None:
    """Say about which tensors, layers and nodes two plans decide differently."""
    from quark.cli.output import print_json, show
    from quark.cli.plans import plan_in
    from quark.config.plan_diff import differences
    from quark.report import Table

    one, other = plan_in(before), plan_in(after)
    found = list(differences(one, other))
    if json:
        print_json({"before": before, "after": after, "differences": [vars(row) for row in found]})
        return
    if found:
        rows = tuple((row.name, row.before, row.after) for row in found)
        show(Table("Differences", ("name", "before", "after"), rows))
    tensors, names = len({**one.tensors, **other.tensors}), len({row.name for row in found})
    print(f"{names or 'no'} difference{'s' if names > 1 else ''}: {tensors} quantized tensors compared.")
