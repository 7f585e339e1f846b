"""Count what a call costs without a clock: the Python functions that run inside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls(function: Callable[..., Any], *arguments: Any) -> int:
    """Number of Python and C functions that ``function(*arguments)`` calls."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        function(*arguments)
    finally:
        sys.setprofile(previous)
    return count
