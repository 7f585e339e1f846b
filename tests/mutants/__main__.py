"""``make mutants SEED=1 COUNT=200``: break the package in one place at a time and see whether a test notices.

    python -m tests.mutants --seed 1 --count 200 [--only qdq] [--covering FILE]

1. Places are drawn by the seed from the syntax trees of numerics, observers, onnx/qdq, onnx/npu, resume and export.
2. Which tests run which line is recorded once (``covering.py``), and kept beside the results until a source changes.
3. Each mutant is a copy of one file on a path in front of the sources; the tests that run its line decide, the fastest
   first. A failure or a hang kills it. A mutant on a line that no test of the table runs has survived.

The report has the rate and every survivor. Nothing in the working tree changes.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.mutants.covering import KEPT
from tests.mutants.places import Place, changed_text, places_in

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
#: What is broken -> the tests that are asked.
TARGETS = {
    "quark/numerics": ["tests/numerics", "tests/observers", "tests/operators"],
    "quark/observers": ["tests/observers", "tests/onnx_flow/test_calibration.py"],
    "quark/onnx/qdq": [
        f"tests/onnx_flow/test_{name}.py"
        for name in (
            *("parameters", "place", "emit", "attack", "overrides", "dual_pairs", "dynamic", "nbits", "selection"),
            *("subgraphs", "formats", "names", "decoding", "blocks_and_moves", "describe", "option_effects"),
        )
    ],
    "quark/onnx/npu": ["tests/onnx_flow/test_npu_rules.py", "tests/onnx_flow/test_npu_options.py"],
    "quark/onnx/resume.py": ["tests/onnx_flow/test_resume.py"],
    "quark/onnx/ledger.py": ["tests/onnx_flow/test_resume.py"],
    "quark/onnx/fingerprint.py": ["tests/onnx_flow/test_resume.py"],
    "quark/files": ["tests/files"],
    "quark/torch/export": [
        f"tests/torch_flow/export/test_{name}.py"
        for name in (
            *("layout", "shards", "reload", "bad_files", "bad_input"),
            *("custom_modes", "compressed_tensors", "gguf"),
        )
    ],
}
SECONDS = 120.0
"""A mutant's tests run at most so long, on top of four times what they take without it."""


def files_of(target: str) -> list[str]:
    """The source files of a target."""
    path = SOURCES / target
    found = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [str(one.relative_to(SOURCES)) for one in found if one.is_file()]


def drawn(seed: int, count: int, targets: list[str]) -> list[Place]:
    """Places, each equally likely."""
    found = [place for target in targets for file in files_of(target) for place in places_in(SOURCES / file, file)]
    return random.Random(seed).sample(found, min(count, len(found)))


def pytest_command(*arguments: str) -> list[str]:
    """pytest without what slows it or writes."""
    return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]


def asked(known: dict[str, Any], place: Place) -> list[str]:
    """The tests that run a line, or its function; for what runs when a file is imported, those that run the file."""
    lines = {int(line): tests for line, tests in known["lines"].get(place.file, {}).items()}
    if place.line in lines:
        return lines[place.line]
    inside = [range(node.lineno, (node.end_lineno or 0) + 1) for node in functions(place)]
    around = min((one for one in inside if place.line in one), key=len, default=range(10**6))
    tests = {test for line, found in lines.items() if line in around for test in found}
    return sorted(tests, key=known["seconds"].__getitem__)[:KEPT]


def functions(place: Place) -> list[ast.FunctionDef]:
    """The functions of a file."""
    tree = ast.parse((SOURCES / place.file).read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def recorded(target: str, folder: Path) -> dict[str, Any]:
    """Lines -> tests of one target, from the folder or from a run."""
    digest = hashlib.sha256("".join((SOURCES / file).read_text("utf-8") for file in files_of(target)).encode())
    kept = folder / f"{target.replace('/', '.')}.{digest.hexdigest()[:12]}.json"
    if not kept.exists():
        environment = {**environ(SOURCES), "QUARK_COVERED": target, "QUARK_COVERING": str(kept)}
        tests = [test for test in TARGETS[target] if (ROOT / test).exists()]
        command = [word for word in pytest_command("-p", "tests.mutants.covering", *tests) if word != "-x"]
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def environ(sources: Path) -> dict[str, str]:
    """One thread, the sources of a mutant, nothing left in the tree."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join([str(sources), str(ROOT)])}


def killed(place: Place, tests: list[str], seconds: float) -> bool:
    """Whether one of the tests notices the change."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        sources = Path(name) / "src"
        shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
        (sources / place.file).write_text(changed_text(SOURCES / place.file, place), encoding="utf-8")
        try:
            made = subprocess.run(
                pytest_command(*tests), cwd=ROOT, env=environ(sources), capture_output=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return True
    return made.returncode != 0


def main() -> int:
    """Draw, break, ask, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--only", default="", help="targets whose path holds this")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "quark-mutants")
    given = parser.parse_args()
    given.folder.mkdir(exist_ok=True)
    targets = [target for target in TARGETS if given.only in target]
    survivors, start = [], time.monotonic()
    places = drawn(given.seed, given.count, targets)
    for number, place in enumerate(places, 1):
        target = next(target for target in targets if place.file.startswith(target))
        known = recorded(target, given.folder)
        tests = asked(known, place)
        usual = sum(known["seconds"][test] for test in tests)
        noticed = bool(tests) and killed(place, tests, SECONDS + 4 * usual)
        if not noticed:
            survivors.append(f"{place}  ({len(tests)} tests run it)")
        print(f"{number}/{len(places)} {'killed' if noticed else 'SURVIVED'} {place}", flush=True)
    rate = 1 - len(survivors) / max(1, len(places))
    took = time.monotonic() - start
    print(f"\nseed {given.seed}: {len(places)} mutants, {rate:.1%} killed, {took:.0f} s; survivors:")
    print("\n".join(f"  {line}" for line in survivors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
