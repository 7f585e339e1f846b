"""The command line of the comparison: two folders in, one line a file out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from quark.errors import QuarkError
from quark.onnx.tools.evaluate import FileResult, compare_folders, mean
from quark.report.tables import plain, print_table
from quark.report.values import Table


def parser() -> argparse.ArgumentParser:
    """Both folders are given by flags, or both by position."""
    made = argparse.ArgumentParser(
        prog="python -m quark.onnx.tools.evaluate",
        description="Compare the results of a float model with those of its quantized model: cosine similarity, L2 "
        "distance and PSNR of every NPY, PNG and JPG file, matched by name.",
        epilog="Exit codes: 0 compared, 1 the folders cannot be compared, 2 wrong usage.",
    )
    made.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="baseline folder, then quantized folder")
    made.add_argument("--baseline_results_folder", type=Path, metavar="A", help="results of the float model")
    made.add_argument("--quantized_results_folder", type=Path, metavar="B", help="results of the quantized model")
    made.add_argument("--json", action="store_true", help='print JSON; an infinite PSNR is the word "inf"')
    return made


def folders(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """The two folders, or an error of usage."""
    flags = [arguments.baseline_results_folder, arguments.quantized_results_folder]
    given = [*arguments.folders, *(flag for flag in flags if flag)]
    if len(given) != 2 or len(arguments.folders) == 1:
        parser().error("give two folders: --baseline_results_folder A --quantized_results_folder B, or just A B")
    return given[0], given[1]


def as_table(results: list[FileResult]) -> Table:
    """One row a file and one for the mean."""
    rows = (*results, mean(results))
    cells = tuple((row.name, f"{row.cosine:.6f}", f"{row.l2:.6g}", f"{row.psnr:.2f}") for row in rows)
    return Table("Quantized against baseline", ("file", "cosine", "L2", "PSNR, dB"), cells)


def as_json(results: list[FileResult]) -> str:
    """``{"files": [...], "mean": {...}}``."""
    rows = [{name: plain(v) if isinstance(v, float) else v for name, v in asdict(row).items()} for row in results]
    average = {name: plain(v) for name, v in asdict(mean(results)).items() if name != "name"}
    return json.dumps({"files": rows, "mean": average}, indent=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, print, and return the exit code."""
    options = parser().parse_args(arguments)
    try:
        results = compare_folders(*folders(options))
    except QuarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(as_json(results))
    else:
        print_table(as_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
