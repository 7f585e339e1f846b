"""A case that passes without a call of ours says nothing of us: it counts as skipped."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import wraps
from typing import Any

import pytest

CALLS = [0]


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours in the place of one of theirs."""

    @wraps(function)
    def call(*positional: Any, **given: Any) -> Any:
        CALLS[0] += 1
        return function(*positional, **given)

    return call


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, None]:
    """Judge the call of the test itself."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "setup":
        CALLS[0] = 0
    if report.when == "call" and report.passed and not CALLS[0]:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "Skipped: calls nothing of this package")
