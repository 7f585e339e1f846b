"""The oldest transformers that reads what is written for it.

Older ones have no hook through which a quantizer changes the conversions of a checkpoint (5.8), and their reader of
compressed-tensors has none for experts, which it makes up at random (5.13). ``tests/consumers/versions.py`` shows it.
"""

from __future__ import annotations

from importlib.metadata import version

from quark.versions import numbers

OLDEST = "5.13"


def installed() -> str:
    """The version of transformers that is installed."""
    return version("transformers")


def why_too_old() -> str | None:
    """What to say where the installed transformers is older than ``OLDEST``; None where it is not."""
    found = installed()
    if numbers(found) >= numbers(OLDEST):
        return None
    return f"it needs {OLDEST} or newer, and {found} is installed"
