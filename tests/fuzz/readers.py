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
    """A kind of file.

    Attributes:
        module: where its causes are, and ``read``, which reads what a cause has written.
        table: the name of the list of causes.
        needs: libraries without which it cannot read.
    """

    module: str
    table: str = "CAUSES"
    needs: tuple[str, ...] = ()

    @property
    def read(self) -> Callable[[Path], object]:
        """Reads what a cause has written into a folder."""
        found: Callable[[Path], object] = import_module(f"tests.fuzz.{self.module}").read
        return found


READERS = {
    "onnx": Reader("onnx_graph_causes"),
    "npy": Reader("data_causes", "NPY"),
    "npz": Reader("data_causes", "NPZ"),
    "image": Reader("data_causes", "IMAGE", ("PIL",)),
    "sound": Reader("sample_causes", "SOUNDS"),
    "list": Reader("sample_causes", "LISTS"),
    "labels": Reader("sample_causes", "LABELS"),
    "safetensors": Reader("torch_causes", "SAFETENSORS", ("torch", "safetensors")),
    "index": Reader("torch_causes", "INDEXES", ("torch", "safetensors")),
    "config": Reader("config_causes", "CONFIGS", ("torch", "safetensors")),
    "recipe": Reader("config_causes", "RECIPES"),
    "preprocess": Reader("settings_causes", "PREPROCESS"),
    "plan": Reader("settings_causes", "PLANS"),
    "energy": Reader("settings_causes", "ENERGIES"),
    "resume": Reader("state_causes", "RESUMES"),
    "ledger": Reader("state_causes", "LEDGERS"),
    "mark": Reader("state_causes", "MARKS", ("torch",)),
    "plan file": Reader("state_causes", "PLAN_FILES"),
    "external": Reader("config_causes", "EXTERNAL"),
    "tokenizer": Reader("tokenizer_causes", "TOKENIZERS", ("torch", "transformers", "gguf")),
    "tokens": Reader("torch_causes", "TOKENS", ("torch",)),
    "ids": Reader("small_causes", "IDS", ("torch",)),
    "algorithm": Reader("small_causes", "ALGORITHMS", ("torch",)),
    "pairs": Reader("small_causes", "PAIRS"),
    "subgraphs": Reader("small_causes", "SUBGRAPHS"),
    "mask": Reader("small_causes", "MASKS", ("PIL",)),
    "model text": Reader("small_causes", "MODEL_TEXTS"),
    "results": Reader("small_causes", "RESULTS", ("PIL",)),
}


@cache
def causes(reader: str) -> tuple[Cause, ...]:
    """The causes of a reader."""
    return tuple(getattr(import_module(f"tests.fuzz.{READERS[reader].module}"), READERS[reader].table))
