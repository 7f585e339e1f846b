"""A budget of time: nothing begins that would, at the pace that was seen, end after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """What is left of a budget, and how long each kind of step takes.

    Args:
        seconds: the budget, from now on.

    Attributes:
        end: when the budget is over, as ``time.perf_counter`` counts; kept in advance of it: ``reserved``.
        reserved: seconds that must be left at the end.
        took: the longest step of each kind so far, in seconds.
    """

    def __init__(self, seconds: float) -> None:
        self.end, self.reserved = time.perf_counter() + seconds, 0.0
        self.took: dict[str, float] = {}

    @property
    def left(self) -> float:
        """Seconds until the last step has to be over; negative when it is too late."""
        return self.end - self.reserved - time.perf_counter()

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Take the time of a step, also of one that fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.took[kind] = max(self.took.get(kind, 0.0), time.perf_counter() - start)

    def usual(self, *kinds: str) -> float:
        """Seconds that these steps take together; of a kind that was never seen, none."""
        return sum(self.took.get(kind, 0.0) for kind in kinds)

    def fits(self, seconds: float) -> bool:
        """Whether a step of this length would end in time."""
        return self.left >= seconds
