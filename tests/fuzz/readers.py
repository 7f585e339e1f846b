"""The readers that are fuzzed, and their causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from tests.fuzz.causes import Cause


@dataclass(frozen=True)
class Reader:
    """A kind of file: the module with its causes (``CAUSES``) and what reads it (``read``); libraries that it needs."""

    module: str
    needs: tuple[str, ...] = ()

    @property
    def read(self) -> Callable[[Path], object]:
        """Reads what a cause has written into a folder."""
        found: Callable[[Path], object] = import_module(f"tests.fuzz.{self.module}").read
        return found


READERS = {"onnx": Reader("onnx_graph_causes")}


@cache
def causes(reader: str) -> tuple[Cause, ...]:
    """The causes of a reader."""
    return tuple(import_module(f"tests.fuzz.{READERS[reader].module}").CAUSES)
