"""Versions as numbers, which can be compared."""

from __future__ import annotations

import re


def numbers(version: str) -> tuple[int, ...]:
    """``"1.21.0rc1"`` as ``(1, 21, 0)``."""
    return tuple(int(part) for part in re.findall(r"(?:^|\.)(\d+)", version.split("+")[0]))
