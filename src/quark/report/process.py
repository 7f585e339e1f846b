"""What this process has used, and what it may use, as the system tells it.

Processors: what the process is bound to, what its container is lent, and what the user says.
"""

from __future__ import annotations

import math
import os
import re
import sys
from functools import cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
ENVIRONMENT = "QUARK_THREADS"


def resident() -> int:
    """Most bytes of memory that this process has had so far; 0 where the system does not tell.

    Linux's ``VmHWM`` is the address space's own: a child does not begin with its parent's mark, as with ``ru_maxrss``.
    """
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
    if found:
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


def present() -> int:
    """Bytes of memory that this process has now; 0 where the system does not tell (only Linux does)."""
    words = read(Path("/proc/self/statm")).split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else 0


def memory(root: Path = CGROUP) -> int | None:
    """Bytes that this process may have: the machine's, or less where its control group says so; None: nobody tells."""
    names = getattr(os, "sysconf_names", {})  # Windows has none
    known = {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= names.keys()
    machine = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if known else []
    words = (read(root / "memory.max") or read(root / "memory" / "memory.limit_in_bytes")).split()
    return min([*machine, *(int(word) for word in words[:1] if word.isdecimal())], default=None)


def lent(root: Path = CGROUP) -> int:
    """Processors that this process may keep busy, at least one.

    The least of: the machine's, those of its affinity, the quota of its control group (rounded up), and the environment
    variable ``QUARK_THREADS``, by which a user says it.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    bound = len(affinity(0)) if affinity else os.cpu_count() or 1
    limits = [bound, quota(root), said()]
    return max(1, min(limit for limit in limits if limit is not None))


def said() -> int | None:
    """The threads that the user says by ``QUARK_THREADS``; None where nothing is said."""
    text = os.environ.get(ENVIRONMENT, "")
    return int(text) if text.isdecimal() and int(text) else None


def shared() -> bool:
    """Whether this machine has processors that are not ours: then threads that wait must not keep theirs busy."""
    return lent() < (os.cpu_count() or 1)


def session_threads() -> int:
    """Threads of a session of ONNX Runtime, for its options: those that are lent; 0, its own choice, where all are."""
    return lent() if shared() else 0


@cache
def quota(root: Path = CGROUP) -> int | None:
    """Processors that the control group (version 2, then 1) lends; None where it sets no limit. Read once a process."""
    two, one = read(root / "cpu.max").split(), root / "cpu"
    words = two or [read(one / "cpu.cfs_quota_us").strip(), read(one / "cpu.cfs_period_us").strip()]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return None  # "max" and -1 mean no limit
    return max(1, math.ceil(int(words[0]) / int(words[1])))


def read(path: Path) -> str:
    """A small file of the system, or nothing."""
    try:
        return path.read_text()
    except OSError:
        return ""
