"""A plugin of pytest: the profile of hypothesis that does not shrink, after ``conftest.py`` and before the tests."""

from __future__ import annotations

import hypothesis
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """A property that fails has killed its mutant: the smallest example is not looked for."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", hypothesis.settings.get_profile("project"), phases=phases)
    hypothesis.settings.load_profile("mutants")
