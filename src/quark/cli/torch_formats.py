"""``quark torch formats``: which scheme can be written in which format, and which program reads it there."""

from __future__ import annotations

from dataclasses import asdict

from quark.cli.output import print_json, show
from quark.report import Table


def run(scheme: str | None, format: str | None, program: str | None, json: bool) -> None:
    """List the rows that are asked for.

    Raises:
        ConfigError: an unknown name.
    """
    from quark.torch.config.schemes import scheme as known
    from quark.torch.export.formats import ANY, chosen_format, table

    if scheme is not None:
        known(scheme)
    chosen_format(format, program)
    rows = [
        row
        for row in table()
        if (scheme is None or row.scheme in (scheme, ANY))
        and (format is None or row.format == format)
        and (program is None or row.program == program)
    ]
    if json:
        print_json({"formats": [asdict(row) for row in rows]})
        return
    lines = tuple((row.scheme, row.format, row.program, "yes" if row.works else "no", row.shown_by) for row in rows)
    note = "`quark torch quantize --format F --for P` refuses what is `no` here before it loads the model."
    show(Table("Formats", ("scheme", "format", "program", "reads it", "shown by"), lines, note))
