"""What a test says of the numbers alone: where operators stand and how many there are is noted and does not stop it.

A program that places its Q/DQ pairs elsewhere fails a test of counts before the test compares outputs. Here the
assertions of ``unittest`` that compare (not those that wait for an error) are noted in the report, and the test goes on
to the outputs, which ``numpy.testing`` compares.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Generator
from functools import wraps
from typing import Any

import pytest

COMPARED = ("Equal", "NotEqual", "True", "False", "In", "NotIn", "Is", "IsNone", "IsNotNone", "Greater", "GreaterEqual")
NOTED: list[str] = []


def noted(check: Callable[..., None]) -> Callable[..., None]:
    """The assertion, which does not stop."""

    @wraps(check)
    def call(*positional: Any, **given: Any) -> None:
        try:
            check(*positional, **given)
        except AssertionError as error:
            NOTED.append(" ".join(str(error).split())[:200])

    return call


def pytest_configure(config: pytest.Config) -> None:
    """Before their modules are imported."""
    for name in COMPARED:
        setattr(unittest.TestCase, f"assert{name}", noted(getattr(unittest.TestCase, f"assert{name}")))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, None]:
    """Every test has its own notes."""
    NOTED.clear()
    yield
    item.user_properties.extend(("noted", one) for one in NOTED)
