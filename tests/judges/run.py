"""The scoreboard: tests of other programs, run as they are, with this package in their place (`make scoreboard`).

    python tests/judges/run.py FOLDER [--only NAME …]    run what FOLDER holds, write results.json and the page
    python tests/judges/run.py --page                    write the page from results.json

FOLDER holds a checkout (or the unpacked source distribution) of each judge under its name; what is not there is not
run, and the page says so. Where a judge's tests can run on its own code too, they do: the page gives both counts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS, PAGE = HERE / "results.json", ROOT / "docs" / "results" / "scoreboard.md"
#: A file beside the sources that says what of them is not there, for the page.
NOTE = "NOTE"


@dataclass(frozen=True)
class Judge:
    """One program whose tests are run.

    Attributes:
        title: as the page calls it.
        says: what is in whose place, in a sentence.
        tests: files or folders below FOLDER/name; of our own folder where they need nothing of theirs.
        plugins: modules here that pytest loads first.
        baseline: plugins of a run with the judge's own code; None where there is none.
        numbers: plugins of a run in which operators may be others, elsewhere, more or fewer; None for no such run.
        packages: what its version is taken from.
        reasons: pattern in a failure's message -> why, in words.
        absent: the same for failures of the environment, which count as skipped.
    """

    title: str
    says: str
    tests: tuple[str, ...]
    plugins: tuple[str, ...] = ()
    baseline: tuple[str, ...] | None = None
    numbers: tuple[str, ...] | None = None
    packages: tuple[str, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()
    absent: tuple[tuple[str, str], ...] = (
        (r"CUDA|cuda", "needs a CUDA device"),
        (r"huggingface\.co", "downloads a model"),
    )


#: Tables of a judge: title, field of its record.
TABLES = (
    ("failed, because", "reasons"),
    ("failed on their numbers, because", "numbers_failed"),
    ("skipped, because", "skips"),
)
HEAD = """# Tests of other programs

Written by `make scoreboard JUDGES=FOLDER` from `tests/judges/results.json`. Tests that others wrote are run as they
are, but for what is said under each; an adapter in `tests/judges` puts this package in the place of the program that
they test. *Passed* counts cases that could run here and call this package; *of theirs*: of the cases that the program
itself passes here, those that pass with this package; *numbers*: cases that pass where assertions about which operators
there are, where and how many are noted and do not stop the test, so that it goes on to compare outputs.

| judge | files | passed | of theirs | numbers | skipped | versions | date |
|---|---|---|---|---|---|---|---|"""
ONNXRUNTIME_REASONS = (
    (r"NotHere: (.*)", "not here: {0}"),
    (r"concat_u8u8", "a Relu behind a Concat is rounded once more: 0.106 off on values up to 12, 0.05 are allowed"),
    (r"Not equal to tolerance.*f8e4m3", "one of 50 values is 0.065 off, 0.05 are allowed: FP8 has 3 bits of mantissa"),
    (r"Not equal to tolerance.*QDQ_32_True", "symmetric 4-bit scales are positive here; theirs may be negative"),
    (r"Unable to check expected shape", "the weights of integer operators are stored transposed, under another name"),
    (r"operators are \['EmbedLayerNormalization'\]", "EmbedLayerNormalization stays float"),
    (r"operators are \['(Pad|Slice)'\]", "a lone {0} computes nothing and stays float: refused"),
    (r"computes on other types than float32", "dynamic kernels have no float16: refused; their file does not load"),
    (r"already quantized", "a model that is quantized in part is refused"),
    (r"'Softmax' matches no node", "a name that matches nothing is refused"),
    (r"Distribution is for the FP8", "Distribution is for FP8 only"),
    (r"reduce_range is for integers", "half of the codes of symmetric unsigned weights: refused"),
    (r"KeyError: 'AddOut'", "the last result is float, so it has no quantized partner"),
    (r"KeyError: 'op_0_out_", "added tensors have other names"),
    (
        r"buffer of 8 bytes|list index out of range|array is 0-dimensional",
        "the same parameters in other fields or ranks",
    ),
    (r"(option(\(s\)| ')|is not present|Must provide both).* not found in", "refused as wanted, in other words"),
    (r"QLinear\w+'|QAttention'|QGemm'|op_type (QLinear|QGemm)", "integer operators that we do not write, or elsewhere"),
    (
        r"Assert failed|op count|op_type \w+Linear|Lists differ|_scale' != '|Expected \d QuantizeLinear",
        "other Q/DQ pairs, or elsewhere",
    ),
    (r"False is not true", "an operator of another type, or elsewhere"),
    (r"6 != 2", "an int32 bias keeps the scale input x weight, which is logged"),
)
ONNXRUNTIME_ABSENT = (
    (r"onnx' has no attribute 'subbyte'|pack_float32_to_4bit|dtype\(u?int4\)", "uses what onnx has taken away"),
    (r"KeyError: 'UseQDQContribOps'|'' != 'com.microsoft'|128 != 127", "older than its own program, which fails, too"),
    (r"at least 3 dimensions", "its model is not valid: its own program fails, too"),
    (r"Name or service not known|urlopen", "downloads a model"),
)
OURS_FOR_ONNXRUNTIME = ("judge_reached", "judge_older_onnx", "judge_onnxruntime", "judge_onnxruntime_nbits")
JUDGES = {
    "onnx": Judge(
        "onnx, node tests",
        "The cases of QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear that the package onnx holds: our "
        "arithmetic, and the operators that we write for types which ONNX Runtime's kernels refuse, in the reference "
        "evaluator and in ONNX Runtime.",
        ("onnx_nodes.py",),
        packages=("onnx", "onnxruntime"),
    ),
    "onnxruntime": Judge(
        "onnxruntime, tests of its quantizer",
        "`quantize_static`, `quantize_dynamic`, `quantize` and `MatMul4BitsQuantizer` are ours, by the arguments of "
        "[the migration page](../migrate/onnxruntime.md).",
        ("onnxruntime/test/python/quantization",),
        OURS_FOR_ONNXRUNTIME,
        ("judge_older_onnx",),
        (*OURS_FOR_ONNXRUNTIME, "judge_numbers"),
        ("onnxruntime",),
        ONNXRUNTIME_REASONS,
        ONNXRUNTIME_ABSENT,
    ),
    "microxcaling": Judge(
        "microxcaling, kernels against its Python",
        "Its compiled kernels are our arithmetic; its tests compare them with its reference, encoding by encoding.",
        ("mx/tests/test_quantize_mx.py",),
        ("judge_reached", "judge_microxcaling"),
        packages=("torch",),
    ),
    "compressed-tensors": Judge(
        "compressed-tensors, compressors",
        "Codes are packed and unpacked by our functions, those that write our files.",
        ("tests/test_compressors", "tests/test_quantization/test_utils"),
        ("judge_reached", "judge_compressed_tensors"),
        (),
        packages=("compressed-tensors",),
    ),
    "transformers": Judge(
        "transformers, integration of quark",
        "The package `quark` is this one; the model that the test downloads is a small Llama that we export.",
        ("tests/quantization/quark_integration/test_quark.py",),
        ("judge_transformers",),
        packages=("transformers",),
    ),
    "Olive": Judge(
        "Olive, pass QuarkQuantization",
        "The package `quark` is this one. The marks that skip the tests beside onnxruntime-genai are taken off.",
        ("test/passes/quark_quantizer",),
        ("judge_olive",),
        packages=("olive-ai",),
        reasons=((r"cannot import name '_build_algo_configs'", "the released Olive is older than this test"),),
    ),
}


def version_of(package: str) -> str:
    """Name and version."""
    return f"{package} {importlib.metadata.version(package)}"


def cases(judge: Judge, folder: Path, plugins: tuple[str, ...]) -> dict[str, list[str]]:
    """[outcome, message] of every case of a run."""
    with tempfile.TemporaryDirectory() as work:
        report = Path(work) / "report.xml"
        places = [folder / one for one in judge.tests]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            str(folder),
        ]
        command += ["-o", "junit_family=xunit2", f"--junitxml={report}", "-W", "ignore"]
        command += [word for name in plugins for word in ("-p", name)]
        paths = [ROOT / "src", HERE, *{one if one.is_dir() else one.parent for one in places}, folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        done = subprocess.run(
            [*command, *map(str, places)], cwd=work, env=environment, capture_output=True, check=False, timeout=3600
        )
        if not report.exists():
            raise SystemExit(f"pytest did not run:\n{done.stderr[-2000:].decode()}")
        found: dict[str, list[str]] = {}
        for name, said in map(read, ElementTree.parse(report).getroot().iter("testcase")):
            if name not in found or found[name][0] != "failed":  # parts of a test have its name: one that failed counts
                found[name] = sorted_out(judge, said)
        return found


def read(case: ElementTree.Element) -> tuple[str, list[str]]:
    """Name, outcome and message of a case."""
    name = f"{case.get('classname', '').rsplit('.', 2)[-1]}.{case.get('name')}"
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            kind = "skipped" if child.tag == "skipped" else "failed"
            return name, [kind, re.sub(r"\s+", " ", (child.get("message") or child.text or ""))[:600]]
    return name, ["passed", ""]


def sorted_out(judge: Judge, said: list[str]) -> list[str]:
    """A case that lacks something of the environment is skipped, not failed."""
    words = next((words for pattern, words in judge.absent if re.search(pattern, said[1])), None)
    return said if words is None or said[0] == "passed" else ["skipped", words]


def reason(judge: Judge, message: str) -> str:
    """Why a case failed, in words of the judge's table, or its message."""
    for pattern, words in judge.reasons:
        found = re.search(pattern, message)
        if found:
            return words.format(*[group[:60] for group in found.groups("")])
    return message[:100]


def judged(name: str, folder: Path) -> dict[str, Any]:
    """The record of one judge."""
    judge = JUDGES[name]
    found = cases(judge, folder, judge.plugins)
    theirs = None if judge.baseline is None else cases(judge, folder, judge.baseline)
    counts = Counter(kind for kind, _ in found.values())
    record: dict[str, Any] = {
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "files": len({one for place in judge.tests for one in files(folder / place)}),
        "versions": [version_of(one) for one in judge.packages],
        "date": time.strftime("%Y-%m-%d"),
        "reasons": Counter(reason(judge, message) for kind, message in found.values() if kind == "failed"),
        "skips": Counter(message[:100] for kind, message in found.values() if kind == "skipped"),
        "failures": sorted(case for case, (kind, _) in found.items() if kind == "failed"),
    }
    if (folder / NOTE).exists():
        record["note"] = (folder / NOTE).read_text(encoding="utf-8").strip()
    if judge.numbers is not None:
        loose = cases(judge, folder, judge.numbers)
        failed = {case: message for case, (kind, message) in loose.items() if kind == "failed"}
        record["numbers"] = sum(kind == "passed" for kind, _ in loose.values())
        record["numbers_failed"] = Counter(reason(judge, message) for message in failed.values())
        record["numbers_failures"] = sorted(failed)
    if theirs is not None:
        right = {case for case, (kind, _) in theirs.items() if kind == "passed"}
        ours = {case for case, (kind, _) in found.items() if kind != "skipped"}
        record["theirs"] = len(right & ours)
        record["both"] = sum(found[case][0] == "passed" for case in right & ours)
    return record


def files(place: Path) -> list[Path]:
    """The test files of a place."""
    return [place] if place.is_file() else sorted(place.rglob("test_*.py"))


def page(results: dict[str, Any]) -> str:
    """The page."""
    lines = [HEAD]
    for name, judge in JUDGES.items():
        found = results.get(name)
        if found is None:
            lines.append(f"| {judge.title} | 0 | not run: its sources were not there | | | | | |")
            continue
        ran = found["passed"] + found["failed"]
        share, numbers = part(found["passed"], ran), ""
        if "numbers" in found:
            numbers = part(found["numbers"], found["numbers"] + sum(found["numbers_failed"].values()))
        theirs = f"{found['both']} of {found['theirs']}" if "theirs" in found else ""
        versions = ", ".join(found["versions"])
        cells = (judge.title, found["files"], share, theirs, numbers, found["skipped"], versions, found["date"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for name, judge in JUDGES.items():
        found = results.get(name)
        lines += ["", f"## {judge.title}", "", f"{judge.says} {(found or {}).get('note', '')}".strip()]
        for title, rows in TABLES:
            counted = sorted((found or {}).get(rows, {}).items(), key=lambda row: (-row[1], row[0]))
            if counted:
                lines += ["", f"| cases | {title} |", "|---|---|"]
                lines += [f"| {count} | {cell(words)} |" for words, count in counted]
    return "\n".join(lines) + "\n"


def part(count: int, whole: int) -> str:
    """Of how many, in words."""
    return f"{count} of {whole} ({100 * count / whole:.0f} %)" if whole else "none ran"


def cell(text: str) -> str:
    """Text in a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def main() -> int:
    """Run the judges that are there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", nargs="*", choices=JUDGES)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in () if given.page else given.only or JUDGES:
        folder = HERE if name == "onnx" else (given.folder or Path()).resolve() / name
        if not folder.exists():
            print(f"{name}: not run, {folder} is not there")
            continue
        results[name] = judged(name, folder)
        print(name, *(f"{results[name][kind]} {kind}" for kind in ("passed", "failed", "skipped")), sep=", ")
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
