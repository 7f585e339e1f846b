"""Fields of ``config.json`` that no model has: what numbers and types say alone, and so before torch is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from quark.errors import ModelError

COMPUTES = ("float32", "float16", "bfloat16", "float64")
LAYERS = re.compile(r"(^|_)(n_layers?|num_layers|num_hidden_layers|encoder_layers|decoder_layers)$")  # count modules
COUNTED = re.compile(r"size|num_|n_|dim|head|layer|depth|rank|width|group|experts|length|position")
HEADS = re.compile(r"(^|_)heads?$|experts")
EXPERTS = re.compile(r"(num|n)_(local_|routed_)?experts$")
ROUTED = re.compile(r"(num|n)_experts_per_tok(en)?$")
COUNTS = re.compile(r"(_size|_dim|heads?|layers?|experts|n_embd)$")
POSITIVE = re.compile(r"(max_position_embeddings|rope_theta|_eps|_epsilon)$|rope.*\.factor$")
HUGE = 1 << 31


def type_named(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The name of the type that a configuration says its model computes in; None: it says none.

    Raises:
        ModelError: no model computes in it.
    """
    field = "dtype" if config.get("dtype") else "torch_dtype"
    named = config.get(field)
    if not named:
        return None
    if not isinstance(named, str) or named not in COMPUTES:
        file = str(folder / "config.json")
        raise ModelError(f"{file!r}: {field} is {named!r}, in which no model computes. Allowed: {', '.join(COMPUTES)}")
    return named


def numbers(config: Mapping[str, Any], kind: Any = int, before: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of every number of a kind, with the names of what it is in."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from numbers(value, kind, f"{before}{name}.")
        elif isinstance(value, kind) and not isinstance(value, bool):
            yield f"{before}{name}", value


def is_wrong(name: str, value: int) -> bool:
    """Whether a number can be no size."""
    return bool(COUNTED.search(name)) and not name.endswith("_id") and not 0 < value < HUGE


def check_counts(folder: Path, config: Mapping[str, Any], tensors: Iterable[str]) -> None:
    """There are not more layers than tensors, so that making them has an end, and no numbers that cannot be.

    Raises:
        ModelError: there are.
    """
    for name, value in numbers(config, int | float):
        if POSITIVE.search(name) and not 0 < value < math.inf:
            raise ModelError(f"{str(folder / 'config.json')!r}: {name} is {value}, and it must be a number above 0")
    count = len(list(tensors))
    experts = max((value for name, value in numbers(config) if EXPERTS.search(name)), default=0)
    for name, value in numbers(config):
        own = name.rpartition(".")[2]
        negative = HEADS.search(own) and value < 0
        routed = experts and ROUTED.search(own) and not 0 < value <= experts
        if negative or routed or (COUNTS.search(own) and value >= HUGE):
            raise ModelError(f"{str(folder / 'config.json')!r}: {name} is {value}, which no model has")
        if LAYERS.search(name.rpartition(".")[2]) and not 0 <= value <= count:
            raise ModelError(
                f"{str(folder / 'config.json')!r}: {name} is {value}, and the files hold {count} tensors in all"
            )
