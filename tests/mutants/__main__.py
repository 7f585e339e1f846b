"""``make mutants SEED=1 COUNT=200``: break the package in one place at a time and see whether a test notices.

    python -m tests.mutants --seed 1 --count 200 [--only qdq] [--warm] [--jobs 4]

1. Places are drawn by the seed from the syntax trees of numerics, observers, onnx/qdq, onnx/npu, resume, files, export.
2. Which tests run which line is recorded (``covering.py``), per test file, and kept until that changes.
3. The tests that run a mutant's line decide (``trying.py``), the likeliest first. A failure or a hang kills it. It is
   tried in a process that has everything loaded, then, if it lives, in one that imports the mutant. A mutant on a line
   that no test of the table runs has survived.

The report has the rate of each package and every survivor. One that ``equivalent.tsv`` names is not tried, and listed
with the reason why nothing can notice it: the first rate counts it as not killed, the second leaves it out. A test that
fails without a change is not a witness: what it has killed is tried without it. Nothing in the working tree changes.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import os
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.mutants.covering import ROOT, SOURCES, Covering, record_of
from tests.mutants.places import Place, places_in
from tests.mutants.trying import QUIET, Trial, Turn, Warm, cold, forked

#: What is broken.
TARGETS = (
    *("quark/numerics", "quark/observers", "quark/onnx/qdq", "quark/onnx/npu"),
    *("quark/onnx/counted.py", "quark/onnx/fingerprint.py", "quark/files", "quark/torch/export"),
)
#: The tests that are not asked: they read texts, run examples, start other programs for minutes, or need a device.
NOT_ASKED = (
    *("tests/consumers", "tests/report", "tests/test_advice", "tests/test_algorithm_pages", "tests/test_architecture"),
    *("tests/test_benchmarks", "tests/test_cli", "tests/test_commands", "tests/test_deferred", "tests/test_demo"),
    *("tests/test_docs", "tests/test_kills", "tests/test_measure", "tests/test_migration", "tests/test_notebooks"),
    *("tests/test_parallel", "tests/test_site", "tests/test_telemetry", "tests/test_unused"),
    *(
        f"tests/onnx_flow/test_{name}"
        for name in ("auto.py", "examples", "every_model", "finetune", "large", "recipes", "resume_kills", "run.py")
    ),
    "tests/onnx_flow/test_shapeshifter",
    *(f"tests/torch_flow/test_{name}" for name in ("auto", "benchmark", "cli", "diffusion", "gpu", "learned")),
    *(f"tests/torch_flow/test_{name}" for name in ("other_programs", "real_models", "reconstruct", "rotation")),
)
KEPT = 200
"""At most so many tests are asked about a line, and at most for so many seconds."""
LAST, LAST_SECONDS = 2000, 90.0
"""The same of what has survived those: a row of a table runs when its file is imported, and few tests look at it."""
KEPT_SECONDS = 30.0
TICK, QUICK = 0.02, 0.1
"""Seconds: what any test costs at least; and below which all cases of a test are asked at once."""
IMPORTED = 12
"""So many tests are asked first where everything is imported anew: most of such a trial is imports."""
LIBRARIES = (
    *("numpy", "onnx", "onnxruntime", "onnxscript", "torch", "safetensors.torch", "scipy.optimize", "yaml"),
    *("hypothesis", "onnx_ir", "pydantic", "transformers", "transformers.models.llama.modeling_llama"),
)


def files_of(target: str) -> list[str]:
    """The source files of a target."""
    path = SOURCES / target
    found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [str(one.relative_to(SOURCES)) for one in found if one.is_file()]


def test_files() -> list[str]:
    """The test files that are asked."""
    found = (str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    return sorted(file for file in found if not file.startswith(NOT_ASKED))


def drawn(seed: int, count: int, targets: list[str]) -> list[Place]:
    """Places, each equally likely."""
    found = [place for target in targets for file in files_of(target) for place in places_in(SOURCES / file, file)]
    return random.Random(seed).sample(found, min(count, len(found)))


class Known:
    """Which tests run a line, and how long each takes."""

    def __init__(self, folder: Path) -> None:
        self.lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.seconds: dict[str, float] = {}
        self.runs: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))  # lines, by test and source
        for file in test_files():
            record = record_of(folder, file)
            self._add(record) if record else print(f"no record of {file}: its tests are not asked")

    def _add(self, record: dict[str, Any]) -> None:
        tests = [test for test, _ in record["tests"]]
        self.seconds.update(record["tests"])
        for source, lines in record["lines"].items():
            for line, numbers in lines.items():
                self.lines[source][int(line)] += [tests[number] for number in numbers]
                for number in numbers:
                    self.runs[tests[number]][source] += 1

    def asked(self, place: Place, count: int = KEPT, seconds: float = KEPT_SECONDS, around: bool = False) -> list[str]:
        """The tests that run a line, or else its function, or else (it runs when the file is imported) the file.

        Args:
            count, seconds: so many tests at most, which take so long.
            around: those that run its function, too: tests recorded before a line was changed are not known to run it.
        """
        lines = self.lines[place.file]
        spans = [range(place.line, place.end_line + 1), *bodies_around(place), range(10**6)]
        running = ({test for line, tests in lines.items() if line in span for test in tests} for span in spans)
        found = next(filter(None, running), set())
        for body in bodies_around(place)[:around]:
            found = found.union(*(tests for line, tests in lines.items() if line in body))
        if not bodies_around(place) or self.runs_at_import(place):  # a table or default is read before a test begins
            beside = importers(place.file, "tests")
            named = {test for test in self.seconds if Path(place.file).stem in test.split("::")[0]}
            reading = {test for test in self.seconds if test.split("::")[0] in beside}
            found = found.union(named, reading, *map(self._all, importers(place.file)))
        return self._few(found, place.file, count, seconds)

    def runs_at_import(self, place: Place) -> bool:
        """Whether no test runs a line: a function that makes tables runs when its file is imported."""
        return not any(self.lines[place.file].get(line) for line in range(place.line, place.end_line + 1))

    @cache  # noqa: B019 - one object for the whole run
    def _all(self, file: str) -> frozenset[str]:
        return frozenset(test for tests in self.lines[file].values() for test in tests)

    def _few(self, found: set[str], source: str, count: int, seconds: float) -> list[str]:
        """The likeliest for their time first: tests that run little beside the source, and quick ones.

        Of those that take longer one case of every test comes before the second.
        """
        order = sorted(found, key=lambda one: ((self.seconds[one] + TICK) / (self._share(one, source) + TICK), one))
        quick = [test for test in order if self.seconds[test] < QUICK][: count // 2]
        cases: dict[str, list[str]] = defaultdict(list)
        for test in (one for one in order if self.seconds[one] >= QUICK):
            cases[test.split("[")[0]].append(test)
        turns = quick + [test for turn in itertools.zip_longest(*cases.values()) for test in turn if test]
        sums = itertools.accumulate(self.seconds[test] for test in turns)
        return [test for test, total in zip(turns, sums, strict=True) if total <= seconds][:count] or turns[:1]

    def _share(self, test: str, source: str) -> float:
        """Of the lines that a test runs, those of a source; all, where its file is named after that or imports it."""
        runs, file = self.runs[test], test.split("::")[0]
        near = Path(source).stem in file or file in importers(source, "tests")
        return near + runs.get(source, 0) / max(1, sum(runs.values()))


@cache
def _functions(file: str) -> list[range]:
    tree = ast.parse((SOURCES / file).read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return sorted((range(node.lineno, (node.end_lineno or 0) + 1) for node in found), key=len)


@cache
def importers(file: str, folder: str = "src/quark") -> set[str]:
    """The files of a folder that import one of the package."""
    name = file.removesuffix(".py").replace("/", ".")
    parent, _, stem = name.rpartition(".")
    listed = rf"from {re.escape(parent)} import (\([^)]*|.*)\b{stem}\b"  # on one line, or in parentheses on several
    words = re.compile(rf"^\s*(from {re.escape(name)} import|{listed})", re.M)
    found = (path for path in (ROOT / folder).rglob("*.py") if words.search(path.read_text(encoding="utf-8")))
    return {str(path.relative_to(SOURCES if folder.startswith("src") else ROOT)) for path in found}


def bodies_around(place: Place) -> list[range]:
    """The lines of the functions around a place, the innermost first."""
    return [one for one in _functions(place.file) if place.line in one]


def record(folder: Path, jobs: int) -> None:
    """Run the test files that have no record, traced, each in a process of its own: what ends one ends no other."""
    stale = [file for file in test_files() if record_of(folder, file) is None]
    if not stale:
        return
    print(f"recording which lines {len(stale)} test files run", flush=True)
    prefixes = tuple(str(SOURCES / target) for target in TARGETS)
    arguments = [word for word in QUIET if word != "-x"]

    def traced(file: str) -> bool:
        return forked(lambda: pytest.main([*arguments, file], plugins=[Covering(prefixes, folder)]) != 0, 600.0)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(traced, stale))


def turns_of(place: Place, known: Known) -> list[Turn]:
    """The tests of a mutant, in turns."""
    first = known.asked(place)
    others = [test for test in known.asked(place, LAST, LAST_SECONDS, around=True) if test not in first]
    return [{test: known.seconds[test] for test in tests} for tests in (first, others) if tests]


def parted(turn: Turn) -> list[Turn]:
    """The likeliest tests of a turn, and the others."""
    tests = list(turn.items())
    return [dict(part) for part in (tests[:IMPORTED], tests[IMPORTED:]) if part]


def judged(places: list[Place], known: Known, warm_only: bool, jobs: int, log: Path) -> list[Place]:
    """The survivors; every mutant is told as it is tried."""
    plan: list[Trial] = [(place, turns_of(place, known)) for place in places]
    log.write_text("", encoding="utf-8")
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda start: warmly(plan[start::jobs], places, log), range(jobs)))
        told = (line.split() for line in log.read_text(encoding="utf-8").splitlines())
        noticed = {places[int(number)]: word for number, word, *_ in told}
        if len(noticed) < len(plan):
            raise SystemExit("the tests could not be collected: run them, and mend what fails")

        def killed(trial: Trial) -> bool:
            place, turns = trial
            if noticed[place] == "True":
                return True
            imports = noticed[place] == "None" or known.runs_at_import(place)
            again = turns if imports else [] if warm_only else turns[:1]
            return any(cold(place, part) for turn in again for part in parted(turn))

        survived = []
        for number, ((place, turns), dead) in enumerate(zip(plan, pool.map(killed, plan), strict=True), 1):
            asked = sum(map(len, turns))
            print(f"{number}/{len(plan)} {'killed' if dead else 'SURVIVED'} {place}  ({asked} tests)", flush=True)
            survived += [] if dead else [place]
    return survived


def warmly(plan: list[Trial], places: list[Place], log: Path) -> None:
    """Try mutants in a process that has everything loaded.

    Args:
        log: where a line is written for each: its number, whether it was noticed, and what it is.
    """

    def heard(place: Place, noticed: bool | None, witness: str) -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{places.index(place)} {noticed} {place}  by {witness}\n")

    def work() -> bool:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        files = sorted({test.split("::")[0] for _, turns in plan for turn in turns for test in turn})
        failures = Path(tempfile.gettempdir()) / "failures"
        trying = Warm(failures, plan=plan, heard=heard)
        return pytest.main([*QUIET, "-p", "tests.mutants.unshrunk", *files], plugins=[trying]) != 0

    forked(work, 24 * 3600.0, loud=True)


@cache
def equivalent() -> dict[tuple[str, str, str, str], str]:
    """(file, text of the line, expression, what it becomes) -> why nothing can notice it (``*``: what lives of it)."""
    path = Path(__file__).with_name("equivalent.tsv")
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {(file, line, was, becomes): reason for file, line, was, becomes, reason in rows}


def reason_of(place: Place) -> str | None:
    """Why nothing can notice a mutant that has lived, if the list says so."""
    file, line, was, becomes = named(place)
    known = equivalent()
    return known.get((file, line, was, becomes)) or known.get((file, line, "*", "*"))


def named(place: Place) -> tuple[str, str, str, str]:
    """What a row of the list says about a mutant: nothing that moves when lines above it do."""
    line = (SOURCES / place.file).read_text(encoding="utf-8").splitlines()[place.line - 1].strip()
    return place.file, line, place.was, place.becomes


def report(seed: int, places: list[Place], survived: list[Place], targets: list[str], took: float) -> None:
    """The rates, and what survived."""
    for target in targets:
        here = [place for place in places if place.file.startswith(target)]
        lost = sum(place in survived for place in here)
        if here:
            print(f"{target:28} {len(here) - lost:4} of {len(here):4} killed")
    reasons = {place: reason_of(place) for place in survived}
    same = sum(bool(reason) for reason in reasons.values())
    rate, wrong = 1 - len(survived) / max(1, len(places)), max(1, len(places) - same)
    for place, reason in reasons.items():
        print(f"  {place}{f'  equivalent: {reason}' if reason else ''}")
    print(f"seed {seed}: {len(places)} mutants, {rate:.1%} killed, {same} equivalent, {took:.0f} s")
    lost = len(survived) - same
    print(f"{wrong - lost} of the {wrong} that change a result are killed: {1 - lost / wrong:.1%}")


def main() -> int:
    """Draw, break, ask, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", default="", help="targets whose path holds this")
    parser.add_argument(
        "--warm", action="store_true", help="no second trial of what is in functions: quicker, a few more survivors"
    )
    parser.add_argument("--jobs", type=int, default=min(4, max(1, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "quark-mutants")
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    os.chdir(ROOT)
    for switch in ("ORT_DISABLE_TELEMETRY", "ORT_TELEMETRY_DISABLED"):
        os.environ[switch] = "1"
    for name in LIBRARIES:  # nothing of ours: a mutant tried in a process of its own imports that anew
        importlib.import_module(name)
    targets = [target for target in TARGETS if given.only in target]
    start = time.monotonic()
    record(given.folder, given.jobs)
    places = drawn(given.seed, given.count, targets)
    known = [place for place in places if named(place) in equivalent()]
    tried = [place for place in places if place not in known]
    log = given.folder / f"tried-{given.seed}.txt"
    survived = known + judged(tried, Known(given.folder), given.warm, given.jobs, log)
    report(given.seed, places, survived, targets, time.monotonic() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
