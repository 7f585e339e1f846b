"""What every test may use: the folder of shared reference data, and reproducible property tests."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("project", deadline=None, derandomize=True)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ``shared`` beside the repository: real models, real data and reference vectors."""
    folder = Path(__file__).parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("no folder 'shared' beside the repository")
    return folder
