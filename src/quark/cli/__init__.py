"""The command line ``quark``."""

from __future__ import annotations
