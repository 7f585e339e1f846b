"""``python -m tests.fuzz.run``: every cause in a process of its own, under limits of time and memory, and a table.

    python -m tests.fuzz.run [READER ...] [--only TEXT] [--list] [--seconds N --seed S]

With ``--seconds`` bytes are mutated on from the files of all causes until the time is over (``make fuzz``). A file that
finds something is kept in ``--kept``; it becomes a cause of its own when it is mended. Linux and macOS only.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

from tests.fuzz.causes import SECONDS, Finding, judge
from tests.fuzz.mutation import mutate_files
from tests.fuzz.readers import READERS, causes

MEMORY = 4 << 30
"""Bytes of address space beyond what the program has when it starts."""


def alone(name: str, make: object, read: object, seconds: float = SECONDS) -> tuple[str, str]:
    """(kind, words) of one judgment in a process of its own; kinds: "refused", "answered", "finding"."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(name, make, read, folder, writing)
    os.close(writing)
    found = _wait(reading, child, seconds + 20)
    shutil.rmtree(folder, ignore_errors=True)
    return found if found is not None else ("finding", f"{name}: killed after {seconds + 20:.0f} s, or died")


def _work(name: str, make: object, read: object, folder: Path, writing: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        said = judge(name, make, read, folder)  # type: ignore[arg-type]
        found = ("answered" if said == "answered" else "refused", said)
    except Finding as finding:
        found = ("finding", f"{finding}\n{_last(finding)}")
    os.write(writing, json.dumps(found).encode()[:60_000])
    os._exit(0)


def _last(finding: Finding) -> str:
    """The place in this package where a foreign exception came through."""
    cause = finding.__cause__
    if cause is None:
        return ""
    frames = traceback.extract_tb(cause.__traceback__)
    ours = [frame for frame in frames if "/quark/" in frame.filename]
    return "    " + " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(ours[-4:]))


def _wait(reading: int, child: int, seconds: float) -> tuple[str, str] | None:
    content, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([reading], [], [], 0.5)[0]:
            part = os.read(reading, 65536)
            if not part:
                break
            content += part
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    os.waitpid(child, 0)
    try:
        kind, words = json.loads(content)
    except ValueError:
        return None
    return kind, words


def mutate(readers: list[str], seconds: float, seed: int, kept: Path) -> int:
    """Mutate the files of the causes until the time is over; 1 where something was found."""
    end, number, findings = time.monotonic() + seconds, 0, 0
    counts: Counter[tuple[str, str]] = Counter()
    kept.mkdir(parents=True, exist_ok=True)
    while time.monotonic() < end:
        name = readers[number % len(readers)]
        found = causes(name)
        one = found[(seed * 7919 + number) % len(found)]
        made = partial(mutate_files, one.make, seed * 1_000_003 + number)
        kind, words = alone(f"{one} (mutation {seed}:{number})", made, READERS[name].read)
        counts[name, kind] += 1
        number += 1
        if kind == "finding":
            findings += 1
            folder = kept / f"{name}-{seed}-{number}"
            folder.mkdir(exist_ok=True)
            made(folder)
            print(f"FINDING {words}\n    kept in {folder}", flush=True)
    for (name, kind), count in sorted(counts.items()):
        print(f"{name:20} {kind:10} {count}")
    return int(findings > 0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("readers", nargs="*")
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "quark-fuzz")
    given = parser.parse_args()
    if given.seconds:
        return mutate(given.readers or list(READERS), given.seconds, given.seed, given.kept)
    counts: Counter[tuple[str, str]] = Counter()
    for name in given.readers or READERS:
        for one in causes(name):
            if given.only not in str(one):
                continue
            kind, words = alone(str(one), one.make, READERS[name].read)
            counts[name, kind] += 1
            if kind == "finding" or given.list:
                print(kind.upper(), str(one) if kind != "finding" else "", words, flush=True)
    for (name, kind), count in sorted(counts.items()):
        print(f"{name:20} {kind:10} {count}")
    return int(any(kind == "finding" for _, kind in counts))


if __name__ == "__main__":
    sys.exit(main())
