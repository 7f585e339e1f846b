"""``RESULTS.md`` and its plots, printed from the records in ``benchmarks/results``.

    python -m benchmarks.page              write the page from the records that are there
    python -m benchmarks.page --measure    measure the headline figures first (ten minutes on an idle machine)
    python -m benchmarks.page --measure latency graph_cost

A record is what a benchmark leaves with ``--json`` (``benchmarks.record``). Nothing on the page is typed by hand: a
figure that no record holds is not there.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import measure, plots

RECORDS = Path(__file__).with_name("results")
PAGE = Path(__file__).with_name("RESULTS.md")
PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


@dataclass(frozen=True)
class Section:
    """One table of the page.

    Attributes:
        title: its heading.
        says: what is measured, in a sentence.
        command: words after ``python -m benchmarks.`` that measure it.
        columns: headers of the printed table that are shown, in this order.
        plotted: those of them that are drawn as bars, beside a line at 1 (what everything is compared with).
    """

    title: str
    says: str
    command: str
    columns: tuple[str, ...]
    plotted: tuple[str, ...] = ()


SECTIONS = {
    "onnx_ptq": Section(
        "Quantizing a ResNet-50",
        "Seconds and memory of the call from file to file, 16 samples, beside ONNX Runtime's own quantizer.",
        "onnx_ptq --methods minmax percentile --repeats 3",
        ("method", "tool", "call s", "x bare", "peak GB"),
    ),
    "whole_process": Section(
        "The whole process",
        "Processor seconds of a quantization on one core, imports to exit, over those of a process that runs the same "
        "16 samples on ONNX Runtime; what the run before publishing takes is shown apart.",
        "whole_process --repeats 3",
        ("process", "CPU s", "of bare", "first run s", "without, of bare", "peak MB", "of bare's"),
        ("without, of bare",),
    ),
    "resnet_latency": Section(
        "Running it on ONNX Runtime",
        "The quantized ResNet-50, batch 1, stock ONNX Runtime; which kernels run.",
        "onnx_ptq --latency --repeats 5",
        ("model", "ms", "x faster", "MB"),
    ),
    "latency": Section(
        "Real models on ONNX Runtime",
        "Times as fast as float, one thread, fastest of inferences that take turns; ONNX Runtime's quantizer too.",
        "latency --rounds 30",
        ("model", "float ms", "ours ×", "onnxruntime ×", "ours / onnxruntime"),
        ("ours ×", "onnxruntime ×"),
    ),
    "graph_cost": Section(
        "Cost of a large graph",
        "Chains of Conv and Relu with tiny tensors: what the work on the graph itself takes, in processor time.",
        "graph_cost --lengths 100 400 1000",
        ("nodes", "all, CPU s", "without inference, CPU s", "ms a node"),
    ),
    "numerics": Section(
        "Arithmetic",
        "Fake quantization of 16 M float32 over a copy of the same array.",
        "numerics --formats int4 int8 fp8_e4m3 mxfp4 nvfp4 bfp16 --no-weights",
        ("library", "format", "ms", "copy ms", "x copy"),
    ),
    "torch_forward": Section(
        "PyTorch forward",
        "A fake-quantized Llama of 5 M parameters over its float forward, one thread.",
        "torch_forward --schemes 'int8 static' 'fp8 dynamic' mxfp4 nvfp4 --repeats 5",
        ("scheme", "first forward s", "float ms", "quantized ms", "ratio"),
        ("ratio",),
    ),
}


def record_of(stem: str) -> dict[str, Any] | None:
    """The record of a section; None where nobody has measured it."""
    path = RECORDS / f"{stem}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def shown(record: dict[str, Any], columns: tuple[str, ...]) -> str:
    """The chosen columns of the record's first table.

    Raises:
        KeyError: the benchmark prints no such column any more.
    """
    table = record["tables"][0]
    missing = [column for column in columns if column not in table["headers"]]
    if missing:
        raise KeyError(f"{record['command']} prints no column {missing[0]!r}: {', '.join(table['headers'])}")
    places = [table["headers"].index(column) for column in columns]
    return measure.table(columns, [[row[place] for place in places] for row in table["rows"]])


def section(stem: str) -> str:
    """One section, with where and how it was measured."""
    row, record = SECTIONS[stem], record_of(stem)
    if record is None:
        return ""
    machine, load = record["machine"], record["load"]["before"]
    where = f"{machine['date']}, load average {load}" if load is not None else machine["date"]
    drawn = f"![{row.title}](../docs/pictures/{stem}.svg)\n\n" if row.plotted else ""
    return f"\n## {row.title}\n\n{row.says} `{record['command']}` ({where})\n\n{drawn}{shown(record, row.columns)}\n"


def pictures() -> dict[Path, str]:
    """The plots of the page, by the file that each is in."""
    found = {}
    for stem, row in SECTIONS.items():
        record = record_of(stem)
        if row.plotted and record is not None:
            table = record["tables"][0]
            names = [cells[0] for cells in table["rows"]]
            series = [
                (one, [_number(cells[table["headers"].index(one)]) for cells in table["rows"]]) for one in row.plotted
            ]
            found[PICTURES / f"{stem}.svg"] = plots.bars(row.title, names, series, 1.0)
    return found


def _number(cell: str) -> float:
    """A cell of a table; an empty one is no number."""
    return float(cell) if cell else math.nan


def page() -> str:
    """The whole page."""
    records = [found for found in map(record_of, SECTIONS) if found is not None]
    machines = dict.fromkeys(measure.machine_line({**record["machine"], "date": "Measured on"}) for record in records)
    head = [
        "# Results\n",
        "Printed by `python -m benchmarks.page` from `benchmarks/results/*.json`; `make benchmarks-quick` measures",
        "again.",
        "Times on a machine with a load average above its cores are upper bounds. Everything else, with its history:",
        "[speed](../docs/results/speed.md), [accuracy](../docs/results/accuracy.md),",
        "[PyTorch](../docs/results/torch.md), [other programs](../docs/results/outside.md).\n",
        *[line.replace("Measured on; ", "Measured on ") + ".\n" for line in machines],
    ]
    return "\n".join(head).rstrip() + "\n" + "".join(map(section, SECTIONS))


def main() -> int:
    """Measure where asked, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="*", choices=list(SECTIONS), help="measure these first; all without names")
    given = parser.parse_args()
    RECORDS.mkdir(exist_ok=True)
    for stem in (given.measure or SECTIONS) if given.measure is not None else ():
        command = f"{sys.executable} -m benchmarks.{SECTIONS[stem].command} --json {RECORDS / stem}.json"
        print(f"$ {command}", flush=True)
        subprocess.run(command, shell=True, cwd=measure.ROOT, check=False)
    PAGE.write_text(page(), encoding="utf-8")
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")
    print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
