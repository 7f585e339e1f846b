"""``quark torch formats``: which scheme can be written in which format, and which program reads it there."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from quark.cli.output import print_json, show
from quark.report import Table

if TYPE_CHECKING:
    from quark.config.file_formats import Row

WRITTEN = "export"  # in the place of a program: our own export writes it


def run(scheme: str | None, format: str | None, program: str | None, json: bool) -> None:
    """List the rows that are asked for.

    Raises:
        ConfigError: an unknown name.
    """
    from quark.config.file_formats import ANY, chosen_format, table
    from quark.torch.config.schemes import scheme as known

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
    show(detailed(rows) if scheme or program else overview(rows))


def detailed(rows: list[Row]) -> Table:
    """What shows each row."""
    lines = ((row.scheme, row.format, row.program, "yes" if row.works else "no", row.shown_by) for row in rows)
    note = "`quark torch quantize --format F --for P` refuses what is `no` here before it loads the model."
    return Table("Formats", ("scheme", "format", "program", "reads it", "shown by"), tuple(lines), note)


def overview(rows: list[Row]) -> Table:
    """A line for each scheme in each format that can hold it."""
    readers: dict[tuple[str, str], list[str]] = {(row.scheme, row.format): [] for row in rows if row.works}
    for row in rows:
        if row.works and row.program != WRITTEN:
            readers[row.scheme, row.format].append(row.program)
    lines = tuple((scheme, format, ", ".join(found) or "–") for (scheme, format), found in readers.items())
    return Table("Formats", ("scheme", "format", "read by"), lines, "`--scheme` or `--for` says what shows it.")
