"""What every job shares: its calibration feeds, its own peak memory, its clock."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Feeds = dict[str, np.ndarray]
SEPARATOR = "|"


def write_feeds(path: Path, feeds: list[Feeds]) -> None:
    """Store samples (input name -> array) as one archive, sample k under `k|name`."""
    arrays: dict[str, Any] = {
        f"{k}{SEPARATOR}{name}": value for k, feed in enumerate(feeds) for name, value in feed.items()
    }
    np.savez(path, **arrays)


def read_feeds(path: str | Path) -> Iterator[Feeds]:
    """Yield the samples in order; only one is in memory at a time."""
    with np.load(path) as archive:
        for names in feed_names(archive.files):
            yield {name: archive[key] for key, name in names}


def feed_names(keys: list[str]) -> list[list[tuple[str, str]]]:
    """(key, input name) of every array of every sample, in order."""
    found: dict[int, list[tuple[str, str]]] = {}
    for key in keys:
        index, name = key.split(SEPARATOR, 1)
        found.setdefault(int(index), []).append((key, name))
    return [found[index] for index in sorted(found)]


class FileReader:
    """A calibration reader over stored feeds: `get_next` until None, `rewind`, `len`."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.feeds = read_feeds(path)

    def get_next(self) -> Feeds | None:
        """The next sample, or None after the last."""
        return next(self.feeds, None)

    def rewind(self) -> None:
        """Start again from the first sample."""
        self.feeds = read_feeds(self.path)

    def __len__(self) -> int:
        """The number of samples."""
        with np.load(self.path) as archive:
            return len(feed_names(archive.files))


def peak_bytes() -> int:
    """The most memory this process ever had resident.

    Linux's `VmHWM` belongs to the address space, so a child does not inherit its parent's mark, as `ru_maxrss` does.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of wall time that a call takes, and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def measured(function: Callable[[], Any]) -> dict[str, float]:
    """Wall time of a call, and the processor time that all its threads took: others' load lengthens only the first."""
    before = time.process_time()
    seconds, _ = timed(function)
    return {"seconds": seconds, "cpu_seconds": time.process_time() - before}


def version(*distributions: str) -> str:
    """`name version` of the first distribution that is installed."""
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def main(run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read the job named first, run it, and write the result with the peak memory to the file named second."""
    job = json.loads(Path(sys.argv[1]).read_text())
    result = run(job)
    Path(sys.argv[2]).write_text(json.dumps({**result, "peak_bytes": peak_bytes()}))
