"""What this process has used, as the system tells it."""

from __future__ import annotations

import re
import sys
from pathlib import Path


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
