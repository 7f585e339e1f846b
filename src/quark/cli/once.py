"""The warnings of one command, each told once: steps that look at the same folder find the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_once() -> Iterator[None]:
    """Within the block a warning that nobody handles is printed the first time only; handlers that are set see all."""
    seen: set[tuple[str, str]] = set()

    def first(record: logging.LogRecord) -> bool:
        key = record.name, record.getMessage()
        known = key in seen
        seen.add(key)
        return not known

    printer = logging.lastResort
    if printer is None:
        yield
        return
    printer.addFilter(first)
    try:
        yield
    finally:
        printer.removeFilter(first)
