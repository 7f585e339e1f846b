"""What is done about memory that is free.

Python looks for objects that hold one another (a tenth of the time of imports and of large graphs), and the C library
gives pages back to the system.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: New objects after which Python looks for cycles meanwhile (its default is 700), and rounds of the middle generation
#: after which it looks through everything (10): two looks at a graph of 10,000 nodes took a tenth of its time.
YOUNG, ALL = 50_000, 100
#: Parameters of glibc's ``mallopt`` (malloc.h).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: Bytes of freed memory that stay in the process: as many as the observed tensors of one sample of ResNet-50.
KEPT = 1 << 27


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for cycles less often.

    Weights do not wait for it: who works on models lets go of them by itself.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], YOUNG) if before[0] else 0, before[1], max(before[2], ALL))
    try:
        yield
    finally:
        gc.set_threshold(*before)


def keep_freed_memory() -> None:
    """Let the C library (glibc) keep what is freed between two samples, instead of fetching it from the system again.

    The system hands out every page anew, and zeroes it: half of all page faults of a calibration, 0.1 s for ResNet-50.
    32 MiB is where glibc itself takes the first threshold to when blocks of that size are freed. Nothing sets it back,
    so this is for processes of our own, the command line's, and not for those of callers.
    """
    with suppress(OSError, AttributeError, TypeError):  # another C library, Windows
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 1 << 25)
        library.mallopt(_TRIM_THRESHOLD, KEPT)
